"""The files of benchmarks/results: their format, and the only way to read and write them.

    python -m benchmarks.figures convert raw.json --out benchmarks/results/e2e_serve_h200.json

    {"command": "python -m benchmarks.act_mul ...", "revision": "695d571",
     "date": "2026-11-21T13:34:37Z",
     "hardware": {"gpu": "NVIDIA H200"}, "versions": {"torch": "2.11.0+cu130"},
     "notes": "only where something needs a word",
     "rows": [
      {"name": "rows=1 inner=12288 silu bf16", "median_us": 1.236844},
      ...]}

A row is flat and on its own line. Fields that are not integers have their unit in the
name. Samples are summarised first: `flat` replaces lists by median, minimum and maximum.
`convert` does the same for the output of `tiercel bench ... --json`, with a histogram of each time.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from tiercel.bench.environment import installed_version
from tiercel.bench.report import Level
from tiercel.bench.speed import Trial
from tiercel.bench.statistics import Spread, inter_token_s

ROOT = Path(__file__).parents[1]
MAX_LINES, MAX_BYTES = 2000, 200_000  # of a file: figures, not samples
HISTOGRAM_BINS = 20
DECIMALS = 9  # of the edges of a histogram, in seconds
# One of these is a part of the name of each field that is not an integer.
UNITS = frozenset(
    "us ms s second seconds gbps tflops mhz watts percent cycles tokens per "  # noqa: SIM905
    "ratio share fraction over of error nmse".split()
)

Text = Annotated[str, msgspec.Meta(min_length=1)]
FieldName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]*$")]
Scalar = str | int | float | bool | None
Row = dict[str, Scalar]


class Figures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A result file.

    Attributes:
        command: command that measured; for scripts that were not kept, what they did.
        revision: commit that was measured, "... with changes" where the working tree differed.
        date: date of the run, UTC.
        hardware, versions: hardware and versions of the machine that measured.
        notes: what else a reader must know; says why a value is "unknown".
        rows: figures.
    """

    command: Text
    revision: Annotated[str, msgspec.Meta(pattern=r"^(unknown|[0-9a-f]{7,12}( with changes)?)$")]
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ)?$")]
    hardware: Annotated[dict[FieldName, Text | int], msgspec.Meta(min_length=1)]
    versions: Annotated[dict[FieldName, Text], msgspec.Meta(min_length=1)]
    notes: Text | None = None
    rows: Annotated[
        list[Annotated[dict[FieldName, Scalar], msgspec.Meta(min_length=1)]],
        msgspec.Meta(min_length=1),
    ]

    def __post_init__(self) -> None:
        """Check rules that the types do not express."""
        origin = (self.command, self.revision, *self.hardware.values(), *self.versions.values())
        if "unknown" in origin and self.notes is None:
            raise ValueError("something is unknown and `notes` does not say why")
        for number, row in enumerate(self.rows):
            for name, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise ValueError(f"row {number}: {name} is {value}")
                if isinstance(value, float) and not UNITS.intersection(name.split("_")):
                    raise ValueError(f"row {number}: {name!r} does not name its unit")

    @property
    def short_revision(self) -> str:
        """The commit without a note on changes."""
        return self.revision.split()[0]


def encode(figures: Figures) -> str:
    """The text of a file.

    Raises:
        ValueError: the file is larger than the limit.
    """
    head = {name: getattr(figures, name) for name in figures.__struct_fields__}
    rows = head.pop("rows")
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items() if value]
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    text = "\n".join(["{", *lines, ' "rows": [', body, " ]", "}", ""])
    if text.count("\n") > MAX_LINES or len(text) > MAX_BYTES:
        raise ValueError(
            f"{text.count(chr(10))} lines, {len(text)} bytes: more than {MAX_LINES} or {MAX_BYTES}"
        )
    return text


def read(path: Path) -> Figures:
    """Read a file and check it as when it is written.

    Raises:
        msgspec.ValidationError: it is not a result file.
        ValueError: it is too large, or was not written by this module.
    """
    text = path.read_text()
    figures = msgspec.json.decode(text, type=Figures)
    if encode(figures) != text:
        raise ValueError(f"{path.name} is not as benchmarks/figures.py writes it")
    return figures


def save(path: Path | None, head: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file; nothing happens without a path.

    Args:
        path: path of the file.
        head: all fields except the rows, as from `benchmarks.common.environment`.
        rows: figures; nested ones are made `flat`.
    """
    if path is not None:
        figures = msgspec.convert({**head, "rows": [flat(row) for row in rows]}, Figures)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(encode(figures))


def flat(row: Mapping[str, Any]) -> Row:
    """A row of scalars: names of nested fields are joined by "_", lists are summarised.

    Of numbers median, minimum, maximum and count are kept, of texts all.
    """
    result: Row = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            result |= {f"{name}_{inner}": x for inner, x in flat(value).items()}
        elif isinstance(value, list | tuple):
            result |= _summed_up(name, value)
        else:
            result[name] = value
    return result


def _summed_up(name: str, values: Sequence[Any]) -> Row:
    if values and isinstance(values[0], str):
        return {name: ", ".join(values)}
    row: Row = {f"{name}_count": len(values)}
    if values:
        row |= {f"{name}_median": statistics.median(values)}
        row |= {f"{name}_min": min(values), f"{name}_max": max(values)}
    return row


def revision() -> str:
    """The commit of this checkout, and whether the working tree differs from it."""
    at = _git("rev-parse", "--short", "HEAD")
    changes = _git("status", "--porcelain", "-uno", "--", "tiercel", "benchmarks/*.py")
    return f"{at} with changes" if changes else at or "unknown"


def about(command: str, date: str, hardware: Mapping[str, str | int]) -> dict[str, Any]:
    """Origin of the figures: all fields of a file except its rows."""
    packages = {name: installed_version(name) for name in ("torch", "triton", "tiercel")}
    head: dict[str, Any] = {"command": command, "revision": revision(), "date": date}
    head["hardware"] = {name: value for name, value in hardware.items() if value is not None}
    head["versions"] = {"python": platform.python_version()}
    head["versions"] |= {name: version for name, version in packages.items() if version}
    if head["revision"] == "unknown":
        head["notes"] = "The revision is unknown: measured outside of a git checkout."
    return head


def convert(raw: Mapping[str, Any], measured: str) -> tuple[dict[str, Any], list[Row]]:
    """Head and rows from the --json output of a `tiercel bench` command.

    Args:
        raw: content of the --json file.
        measured: revision that was measured.
    """
    head: dict[str, Any] = {"command": raw["command"], "revision": measured, "date": raw["utc"]}
    head |= {"hardware": raw["hardware"], "versions": raw["versions"]}
    if switches := raw.get("switches"):
        head["notes"] = " ".join(f"{name}={value}" for name, value in switches.items())
    model = {name: raw[name] for name in ("model", "model_sha256", "dtype") if raw.get(name)}
    if "levels" in raw:
        levels = msgspec.convert(raw["levels"], list[Level])
        return head, [row for level in levels for row in level_rows(level, model)]
    costs = {name: value for name, value in raw.get("cost", {}).items() if isinstance(value, int)}
    ceilings = {name: raw[name] for name in ("read_gbps", "tflops") if name in raw}
    device = {"name": "model and device", **model, **costs, **ceilings}
    return head, [device, *map(trial_row, raw["results"])]


def trial_row(result: Mapping[str, Any]) -> Row:
    """A row of `tiercel bench speed`; a row of `bench kernels` is unchanged."""
    if "trial" not in result:
        return flat(result)
    trial, rates = msgspec.convert(result["trial"], Trial), result["rates"]
    row: Row = {"name": trial.name, **msgspec.to_builtins(trial), "runs": len(rates)}
    row["tokens_per_second"] = result.get("mean", statistics.fmean(rates))
    row |= {"tokens_per_second_min": min(rates), "tokens_per_second_max": max(rates)}
    if "floor" in result:
        row["deviation_tokens_per_second"] = result["deviation"]
        row |= {"floor_tokens_per_second": result["floor"], "share_of_floor": result["ratio"]}
    return row


def level_rows(level: Level, model: Mapping[str, str]) -> list[Row]:
    """A load level: its figures, then a histogram of each time of its requests."""
    names = {
        "request_rate": "requests_per_second",
        "completion_rate": "completion_tokens_per_second",
        "total_rate": "all_tokens_per_second",
        "goodput": "good_requests_per_second",
        "client_load": "client_share_of_a_core",
    }
    row: dict[str, Any] = {"name": level.load.name, **model}
    for name, value in msgspec.to_builtins(level.summary).items():
        if isinstance(getattr(level.summary, name), Spread):
            row |= {f"{name}_{part}_s": seconds for part, seconds in value.items()}
        elif value is not None:
            row[names.get(name, name)] = value
    if level.summary.drafts is not None:
        row["drafts"] = row["drafts"] | {
            "accepted_per_pos": dict(enumerate(level.summary.drafts.accepted_per_pos, 1))
        }
    ok = [sample for sample in level.samples if sample.error is None]
    times = {
        "first token": [sample.first_s for sample in ok],
        "inter-token": [inter_token_s(sample) for sample in ok],
        "gap": [gap for sample in ok for gap in np.diff(sample.piece_s).tolist()],
        "end to end": [sample.latency_s for sample in ok],
    }
    found = {name: [x for x in seconds if x is not None] for name, seconds in times.items()}
    return [flat(row), *(bar for name, x in found.items() for bar in histogram(name, x))]


def histogram(name: str, seconds: list[float]) -> list[Row]:
    """A row for each interval that is not empty."""
    if not seconds:
        return []
    counts, edges = np.histogram(seconds, HISTOGRAM_BINS)
    ends = [round(edge, DECIMALS) for edge in edges.tolist()]
    return [
        {"name": f"histogram of {name}", "from_s": low, "to_s": high, "count": count}
        for count, low, high in zip(counts.tolist(), ends, ends[1:], strict=False)
        if count
    ]


def _git(*arguments: str) -> str:
    """Output of git; empty outside of a checkout, or without git."""
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return answer.stdout.strip()


def main() -> None:
    """Convert a result of `tiercel bench`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("convert", help="what `tiercel bench ... --json` wrote")
    command.add_argument("raw", type=Path)
    command.add_argument("--revision", default=revision(), help="that ran; this checkout's")
    command.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    save(options.out, *convert(json.loads(options.raw.read_text()), options.revision))


if __name__ == "__main__":
    main()
