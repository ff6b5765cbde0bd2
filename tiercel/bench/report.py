"""A measurement result: the JSON file, and its rows for a table.

{"format": 1, "kind": "serve", "command": ..., "utc": ..., "label": ..., "versions": {...},
 "hardware": {...}, "target": {...}, "model": ..., "model_sha256": ..., "workload": {...},
 "bounds": {...}, "is_partial": false,
 "levels": [{"load": {"concurrency": 4}, "summary": {...}, "samples": [...]}]}
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from tiercel.bench.completions import Sample
from tiercel.bench.statistics import Bounds, Spread, Summary
from tiercel.bench.workload import Workload
from tiercel.errors import ArgumentError

FORMAT: Final = 1
MAX_FILE_BYTES: Final = 1 << 30


class Load(msgspec.Struct, frozen=True, omit_defaults=True):
    """Load of a level: the number of concurrent requests, or requests per second."""

    requests: int
    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        """The name of the load in tables."""
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g}/s"


class Level(msgspec.Struct, frozen=True):
    """One load and its results."""

    load: Load
    summary: Summary
    samples: list[Sample]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole measurement.

    Attributes:
        label: engine and version, for legends.
        target: facts that the server reports about itself; empty offline.
        hardware: hardware of the machine that ran the command; the server's only if it is the same.
        is_partial: whether Ctrl-C ended the measurement.
    """

    format: int = FORMAT
    kind: Literal["serve", "throughput"]
    command: str
    utc: str
    label: str
    versions: dict[str, str]
    hardware: dict[str, str]
    target: dict[str, str]
    model: str
    model_sha256: str | None
    workload: Workload
    bounds: Bounds
    is_partial: bool
    levels: list[Level]


class Row(msgspec.Struct, frozen=True):
    """A figure of the table: its title, how to get it, its factor and digits."""

    title: str
    get: Callable[[Summary], float | None]
    digits: int
    is_less_better: bool


def _time_rows(title: str, get: Callable[[Summary], Spread | None]) -> list[Row]:
    def part(field: str) -> Callable[[Summary], float | None]:
        def read(summary: Summary) -> float | None:
            found = get(summary)
            return None if found is None else 1000 * float(getattr(found, field))

        return read

    fields = ("mean", "p50", "p90", "p99")
    return [Row(f"{title} {name}, ms", part(name), 2, is_less_better=True) for name in fields]


def _acceptance(summary: Summary) -> float | None:
    share = None if summary.drafts is None else summary.drafts.acceptance
    return None if share is None else 100 * share


def rows() -> list[Row]:
    """The figures in the order of the table."""
    return [
        Row("answers", lambda s: s.ok, 0, is_less_better=False),
        Row("errors", lambda s: sum(s.errors.values()), 0, is_less_better=True),
        Row("requests/s", lambda s: s.request_rate, 2, is_less_better=False),
        Row("goodput, requests/s", lambda s: s.goodput, 2, is_less_better=False),
        Row("output tokens/s", lambda s: s.completion_rate, 1, is_less_better=False),
        Row("all tokens/s", lambda s: s.total_rate, 1, is_less_better=False),
        Row("accepted drafts, %", _acceptance, 1, is_less_better=False),
        *_time_rows("first token", lambda s: s.first_token),
        *_time_rows("inter-token", lambda s: s.inter_token),
        *_time_rows("gap", lambda s: s.gap),
        *_time_rows("end to end", lambda s: s.latency),
    ]


def load(path: Path) -> Report:
    """Read a report.

    Raises:
        ArgumentError: the file contains no report, or one of another format.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ArgumentError(f"{path}: the file has over {MAX_FILE_BYTES} bytes.")
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentError(
            f"{path}: the file is not a result of tiercel bench: {error!s:.120}.",
            hint="Give a file that --json wrote.",
        ) from error
    if report.format != FORMAT:
        raise ArgumentError(
            f"{path}: the result has format {report.format}.", hint=f"This version reads {FORMAT}."
        )
    return report
