"""Draws results of benchmarks/e2e_score.py.

python -m benchmarks.e2e_score_plot score_a.json score_b.json docs/score.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.e2e_score import ITEM_LEN


def draw(paths: Sequence[Path], figure_path: Path) -> None:
    """Items per second against the length of the list, a panel for each model and query."""
    style = {"svg.hashsalt": "tiercel", "svg.fonttype": "none", "font.size": 9}
    style |= {"axes.grid": True, "grid.color": "0.9", "legend.frameon": False}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    reports = [json.loads(path.read_text()) for path in paths]
    prefixes = sorted({row["prefix"] for report in reports for row in report["results"]})
    lines = (
        ("cached_roofline", "roofline, query cached", "k:", ""),
        ("cached", "packed, query cached", "k-", "o"),
        ("cold", "packed, query computed", "k--", "s"),
        ("separate", "a prompt per item, query cached", "0.5", "^"),
        ("one_by_one", "a call per item, query cached", "0.7", "v"),
    )
    with mpl.rc_context(style):
        figure = Figure(
            figsize=(3.1 * len(prefixes), 0.8 + 2.7 * len(reports)), layout="constrained"
        )
        panels = figure.subplots(len(reports), len(prefixes), squeeze=False, sharey="row")
        for report, row_of_panels in zip(reports, panels, strict=True):
            for prefix, panel in zip(prefixes, row_of_panels, strict=True):
                rows = [row for row in report["results"] if row["prefix"] == prefix]
                at = [row["items"] for row in rows]
                for name, label, kind, marker in lines:
                    if rows and f"{name}_items_per_s" in rows[0]:
                        rates = [row[f"{name}_items_per_s"] for row in rows]
                        format_ = {} if kind[0] == "0" else {"linestyle": kind[1:]}
                        color = kind if kind[0] == "0" else "k"
                        panel.plot(at, rates, color=color, marker=marker, label=label, **format_)
                panel.set_xscale("log")
                panel.set_yscale("log")
                panel.set_xticks(at, [str(count) for count in at])
                panel.minorticks_off()
                panel.set_title(f"{report['model']}, query of {prefix} tokens", fontsize=9)
                panel.set_xlabel(f"items of {ITEM_LEN} tokens in the list")
            row_of_panels[0].set_ylabel("items per second")
        panels[0][0].legend(fontsize=7)
        where = reports[0].get("gpu") or reports[0].get("cpu")
        figure.suptitle(f"Scoring a list, {where}", fontsize=9)
        metadata = {"Date": None} if figure_path.suffix == ".svg" else None
        figure.savefig(figure_path, metadata=metadata)


def main() -> None:
    """Draw from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("figure", type=Path)
    options = parser.parse_args()
    draw(options.results, options.figure)


if __name__ == "__main__":
    main()
