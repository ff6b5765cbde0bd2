"""Figures of results: throughput against load, and latency percentiles against load, in panels.

Readable in greyscale: results differ in marker and grey, percentiles in line style. Importing this
needs matplotlib, the extra `bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from tiercel.bench.environment import machine_name
from tiercel.bench.report import Level, Report
from tiercel.bench.statistics import Spread
from tiercel.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS: Final = (".svg", ".png", ".pdf")
_MARKERS: Final = "osD^v"
_SHADES: Final = ("0.0", "0.45", "0.65", "0.25", "0.8")
_PERCENTILES: Final = (("p50", "-"), ("p90", "--"), ("p99", ":"))
_LOADS: Final = {"concurrency": "concurrent requests", "rate": "requests sent per second"}
_TITLES: Final = ("output tokens per second", "time to first token, ms", "time per token, ms")


def draw(reports: Sequence[Report], path: Path) -> None:
    """Write the figure: one row of panels for each kind of load in the results.

    Raises:
        ArgumentError: the ending is unknown, or there is nothing to plot.
    """
    if path.suffix not in ENDINGS:
        raise ArgumentError(
            f"{path}: a figure cannot be written as {path.suffix or 'a file without ending'}.",
            hint=f"Use {', '.join(ENDINGS)}.",
        )
    loads = [level.load for report in reports for level in report.levels]
    kinds = [
        (name, axis)
        for name, axis in _LOADS.items()
        if any(getattr(load, name) is not None for load in loads)
    ]
    if not kinds:
        raise ArgumentError("the result holds no level to plot.", hint="Measure at least one.")
    with style():
        figure = Figure(figsize=(10, 0.6 + 3.4 * len(kinds)), layout="constrained")
        axes = figure.subplots(len(kinds), 3, squeeze=False)
        for (name, axis), row in zip(kinds, axes, strict=True):
            _draw_row(reports, name, axis, row)
        figure.suptitle(_caption(reports[0]), fontsize=9)
        save_figure(figure, path)


def style() -> AbstractContextManager[None]:
    """Style of all figures."""
    return mpl.rc_context(
        {
            "svg.hashsalt": "tiercel",  # equal results give equal files
            "svg.fonttype": "none",
            "font.size": 9,
            "axes.grid": True,
            "grid.color": "0.88",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
        }
    )


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure; equal figures give equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata)


def _draw_row(reports: Sequence[Report], kind: str, axis: str, row: Sequence[Axes]) -> None:
    for index, report in enumerate(reports):
        levels = [level for level in report.levels if getattr(level.load, kind) is not None]
        at = [float(getattr(level.load, kind)) for level in levels]
        marker, shade = _MARKERS[index % len(_MARKERS)], _SHADES[index % len(_SHADES)]
        rates = [level.summary.completion_rate for level in levels]
        row[0].plot(at, rates, marker=marker, color=shade, label=report.label)
        for axes, field in ((row[1], "first_token"), (row[2], "inter_token")):
            for part, style in _PERCENTILES:
                axes.plot(
                    at,
                    _milliseconds(levels, field, part),
                    linestyle=style,
                    marker=marker,
                    markersize=4,
                    color=shade,
                    label=f"{report.label} {part}",
                )
    measured = {getattr(level.load, kind) for report in reports for level in report.levels}
    ticks = sorted(load for load in measured if load is not None)
    for axes, title in zip(row, _TITLES, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel(axis)
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7, handlelength=3.5)


def _milliseconds(levels: Sequence[Level], field: str, part: str) -> list[float]:
    spreads: list[Spread | None] = [getattr(level.summary, field) for level in levels]
    return [float("nan") if s is None else 1000 * float(getattr(s, part)) for s in spreads]


def _caption(report: Report) -> str:
    """Workload and machine, which every figure names."""
    shape = report.workload
    length = "prompts from a file"
    if shape.input_len is not None:
        length = f"prompts of {_range(shape.input_len.low, shape.input_len.high)} tokens"
    answers = _range(shape.output_len.low, shape.output_len.high)
    where = machine_name(report.hardware)
    return f"{report.model}; {length}, answers of {answers}; measured from: {where}"


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
