"""Bar charts of `bench speed` and `bench kernels`. Importing this needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from tiercel.bench.plot import save_figure, style


def draw_bars(
    names: Sequence[str], values: Sequence[float], axis: str, title: str, path: Path
) -> None:
    """Write one horizontal bar for each name, with its value next to it.

    Args:
        names: names from top to bottom.
        values: value of each name; not negative.
        axis: label of the axis.
        title: title of the figure.
        path: file to write; its ending is .svg, .png or .pdf.
    """
    with style():
        figure = Figure(figsize=(8, 1 + 0.3 * len(names)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(range(len(names)), values, color="0.45")
        axes.bar_label(bars, fmt="{:,.3g}" if max(values) < 10 else "{:,.0f}", padding=3)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel(axis)
        axes.grid(visible=False, axis="y")
        figure.suptitle(title, fontsize=9)
        save_figure(figure, path)
