"""Plots results of benchmarks/e2e_score.py: items per second against the length of the list.

    python -m benchmarks.e2e_score_plot score_a.json score_b.json docs/scoring.svg

A panel for each model and length of query; readable in greyscale.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.figures import Row, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Name in the results, words, line, grey, marker.
LINES = (
    ("cached_roofline", "roofline, query cached", ":", "0.0", ""),
    ("cached", "packed, query cached", "-", "0.0", "o"),
    ("cold", "packed, query computed", "--", "0.3", "s"),
    ("separate", "a prompt per item, query cached", "-", "0.5", "^"),
    ("one_by_one", "a call per item, query cached", "-", "0.7", "v"),
)
STYLE = {
    "svg.hashsalt": "tiercel",  # equal results give equal files
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "0.9",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
COLUMNS = 2


def draw(paths: Sequence[Path], figure_path: Path) -> None:
    """Write the figure in the format of its ending."""
    files = [read(path) for path in paths]
    kinds: dict[tuple[str, int], list[Row]] = {}
    for file in files:
        lists = [row for row in file.rows if row["name"] == "list"]
        for row in sorted(lists, key=lambda row: row["prefix"]):
            kinds.setdefault((row["model"], row["prefix"]), []).append(row)
    num_rows = -(-len(kinds) // COLUMNS)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * COLUMNS, 0.9 + 2.8 * num_rows), layout="constrained")
        panels = figure.subplots(num_rows, COLUMNS, squeeze=False, sharey=True).ravel()
        for panel, ((model, prefix), rows) in zip(panels, kinds.items(), strict=False):
            draw_panel(panel, rows, f"{model}, query of {prefix} tokens")
        for panel in panels[len(kinds) :]:
            panel.set_visible(False)
        lines, words = panels[0].get_legend_handles_labels()
        figure.legend(lines, words, loc="outside lower center", ncols=3, fontsize=8)
        where = files[0].hardware.get("gpu") or files[0].hardware.get("cpu")
        figure.suptitle(f"Scoring a list on one {where}", fontsize=9)
        metadata = {"Date": None} if figure_path.suffix == ".svg" else None
        figure.savefig(figure_path, metadata=metadata)


def draw_panel(panel: Axes, rows: list[Row], title: str) -> None:
    at = [row["items"] for row in rows]
    for name, words, line, grey, marker in LINES:
        key = f"{name}_items_per_s"
        if key in rows[0]:  # there is no roofline without a GPU
            rates = [row[key] for row in rows]
            panel.plot(at, rates, line, color=grey, marker=marker, markersize=4, label=words)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks(at, [str(count) for count in at])
    panel.tick_params(axis="x", which="minor", length=0)
    panel.yaxis.set_major_formatter(lambda rate, _: f"{rate:,.0f}")
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(f"items of {rows[0]['item_len']} tokens")
    panel.set_ylabel("items per second")


def main() -> None:
    """Plot from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("figure", type=Path)
    options = parser.parse_args()
    draw(options.results, options.figure)


if __name__ == "__main__":
    main()
