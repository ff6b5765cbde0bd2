"""Options and output that the commands of `tiercel bench` share."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from tiercel.cli.terminal import UsageError, note, one_line, write

if TYPE_CHECKING:
    from tiercel.bench.completions import Completion
    from tiercel.bench.report import Report
    from tiercel.bench.statistics import Bounds
    from tiercel.bench.tables import Table
    from tiercel.bench.workload import Workload

WORKLOAD_GROUP = Group("Requests", sort_key=1)
LOAD_GROUP = Group("Load", sort_key=2)
OUTPUT_GROUP = Group("Output", sort_key=3)
MAX_LEVEL = 65_536
MAX_REQUESTS = 10_000_000


@Parameter(name="*", group=WORKLOAD_GROUP)
@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Requests of the workload."""

    input_len: Annotated[str, Parameter(help="Tokens of a prompt: N or LOW:HIGH.")] = "512"
    output_len: Annotated[str, Parameter(help="Tokens of an answer: N or LOW:HIGH.")] = "128"
    file: Annotated[
        Path | None, Parameter(help='Prompts instead: lines {"prompt": ..., "max_tokens": N}.')
    ] = None
    token_ids: Annotated[str, Parameter(help="Sample prompts from these ids.")] = "1000:30000"
    temperature: Annotated[float, Parameter(help="0 is greedy.")] = 0.0
    seed: Annotated[int, Parameter(help="Same seed, same requests.")] = 0
    requests: Annotated[
        int | None, Parameter(help="For each load [4 times the load, at least 32].")
    ] = None
    warm_up: Annotated[
        int | None, Parameter(help="Before each load, not counted [the concurrency].")
    ] = None


@Parameter(name="*", group=OUTPUT_GROUP)
@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Output of the figures."""

    json: Annotated[Path | None, Parameter(help="Write everything, each request too.")] = None
    plot: Annotated[Path | None, Parameter(help="Draw it, as .svg, .png or .pdf.")] = None
    compare: Annotated[
        tuple[Path, Path] | None, Parameter(help="Compare two --json files; measure nothing.")
    ] = None
    label: Annotated[str | None, Parameter(help="Name in tables and legends.")] = None
    goodput: Annotated[
        str | None, Parameter(help="Count requests within first=500,inter=50,latency=9000 ms.")
    ] = None


def parse_levels(text: str) -> list[int]:
    """Read `1,2,4`.

    Raises:
        UsageError: it is not a list of counts.
    """
    return parse_counts("--concurrency", text, low=1, high=MAX_LEVEL)


def parse_counts(name: str, text: str, *, low: int = 0, high: int = MAX_REQUESTS) -> list[int]:
    """Read the counts of an option, without duplicates.

    Raises:
        UsageError: it is not a list of counts.
    """
    parts = text.split(",")
    is_sound = (part.isascii() and part.isdigit() and len(part) < 10 for part in parts)
    if not all(is_sound) or not all(low <= int(part) <= high for part in parts):
        raise UsageError(
            f"{name} {text!r:.60} is not a list of counts.", hint="Write it like 1,2,4."
        )
    return list(dict.fromkeys(int(part) for part in parts))


def parse_rates(text: str) -> list[float]:
    """Read `0.5,1,2`.

    Raises:
        UsageError: it is not a list of rates.
    """
    rates = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = math.nan
        if not 1e-3 <= rate <= 1e5:
            raise UsageError(
                f"--rate {text!r:.60} is not a list of requests per second.",
                hint="Write it like 0.5,1,2.",
            )
        rates.append(rate)
    return list(dict.fromkeys(rates))


def make_workload(
    options: WorkloadOptions,
) -> tuple[Workload, Sequence[Completion] | None]:
    """Make the workload, with prompts from a file if one is given.

    Raises:
        UsageError: a value cannot be read or is out of range.
        ArgumentError: the file contains something else.
    """
    from tiercel.bench import workload

    for name, value, low in (
        ("--requests", options.requests, 1),
        ("--warm-up", options.warm_up, 0),
    ):
        if value is not None and not low <= value <= MAX_REQUESTS:
            raise UsageError(f"{name} {value} is out of range.", hint="Use a count.")
    if not 0.0 <= options.temperature <= 2.0:
        raise UsageError(f"--temperature {options.temperature} is out of range.", hint="0 to 2.")
    lengths = {}
    for name, low in (("input_len", 1), ("output_len", 1), ("token_ids", 0)):
        try:
            lengths[name] = workload.parse_lengths(getattr(options, name), low)
        except ValueError as error:
            raise UsageError(f"--{name.replace('_', '-')}: {error}.") from error
    if options.file is None:
        shape = workload.Workload(
            lengths["input_len"],
            lengths["output_len"],
            options.seed,
            options.temperature,
            lengths["token_ids"],
        )
        return shape, None
    shape = workload.Workload(
        None,
        lengths["output_len"],
        options.seed,
        options.temperature,
        file_sha256=workload.file_sha256(options.file),
    )
    return shape, workload.read_requests(options.file, shape)


def parse_bounds(text: str | None) -> Bounds:
    """Read `first=500,inter=50,latency=9000`, or a part of it.

    Raises:
        UsageError: the text cannot be read.
    """
    from tiercel.bench.statistics import Bounds

    fields = {"first": "first_token_ms", "inter": "inter_token_ms", "latency": "latency_ms"}
    found: dict[str, float] = {}
    for part in text.split(",") if text is not None else ():
        name, _, value = part.partition("=")
        try:
            found[fields[name]] = float(value)
        except (KeyError, ValueError):
            found[name] = math.nan
        if not all(0 < bound < math.inf for bound in found.values()):
            raise UsageError(
                f"--goodput {text!r:.80} is not a list of bounds in milliseconds.",
                hint="Write them like first=500,inter=50,latency=9000.",
            )
    return Bounds(**found)


def check_output(json: Path | None, plot: Path | None) -> None:
    """Check before the measurement that its output can be written; folders are created.

    Raises:
        UsageError: the path is a folder, the plot's ending is unknown, or matplotlib is missing.
        OSError: a file's folder cannot be created or written to.
    """
    import importlib.util

    for path in (json, plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise UsageError(f"{path}: is a folder.", hint="Name a file in it.")
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent))
    if plot is None:
        return
    if plot.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"--plot {plot}: the ending is unknown.", hint="Use .svg, .png or .pdf.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed.",
            hint="Run pip install 'tiercel[bench]'.",
        )


def show_report(report: Report, options: OutputOptions) -> None:
    """Write the table to standard output, notes to standard error, and the files."""
    from tiercel.bench import tables
    from tiercel.bench.files import save

    if options.json is not None:
        save(report, options.json)
    write_table(f"{report.label}: {report.model}", tables.level_table(report))
    for text in tables.notes(report):
        note(one_line(text))
    if options.plot is not None:
        _draw([report], options.plot)


def show_comparison(first: Path, second: Path, options: OutputOptions) -> None:
    """Write the tables of two results, and plot both.

    Raises:
        ArgumentError: a file contains no result, or the workloads differ.
    """
    from tiercel.bench import compare, tables
    from tiercel.bench import report as reports

    a, b = reports.load(first), reports.load(second)
    for title, table in tables.comparison_tables(a, b, compare.compare(a, b)):
        write_table(title, table)
    if options.plot is not None:
        _draw([a, b], options.plot)


def _draw(found: Sequence[Report], path: Path) -> None:
    from tiercel.bench.plot import draw

    draw(found, path)


def write_table(title: str, table: Table) -> None:
    """Write a rich table on a terminal, else plain columns under a title."""
    import sys

    from tiercel.bench.tables import plain

    title = one_line(title)
    if not sys.stdout.isatty():
        write(f"{title}\n{plain(table)}\n")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(highlight=False, markup=False)
    drawn = RichTable(title=title, box=box.SIMPLE_HEAD)
    for index, head in enumerate(table[0]):
        drawn.add_column(one_line(head), justify="right" if index else "left")
    for row in table[1:]:
        drawn.add_row(*row)
    console.print(drawn)
