"""Results as text: a table on a terminal, plain aligned columns elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tiercel.bench.compare import Comparison
from tiercel.bench.report import Level, Report, rows

MAX_CLIENT_LOAD: Final = 0.8  # above it, pieces wait for the client
MAX_LATE_S: Final = 0.01

Table = list[list[str]]  # the first row is the head; the first column is left-aligned


def level_table(report: Report) -> Table:
    """The table of a report: one column for each level, one row for each figure of a level."""
    table = [["", *(level.load.name for level in report.levels)]]
    for row in rows():
        values = [row.get(level.summary) for level in report.levels]
        if any(value is not None for value in values):
            table.append([row.title, *(number(value, row.digits) for value in values)])
    return table


def comparison_tables(
    first: Report, second: Report, figures: Sequence[Comparison]
) -> list[tuple[str, Table]]:
    """One table for each load: the figures of both and their ratio."""
    tables: dict[str, Table] = {}
    for figure in figures:
        table = tables.setdefault(figure.load, [["", first.label, second.label, "ratio"]])
        values = [number(value, figure.digits) for value in (figure.first, figure.second)]
        table.append([figure.title, *values, number(figure.ratio, 3)])
    return list(tables.items())


def notes(report: Report) -> list[str]:
    """Notes for the reader of the figures, one line each."""
    found = []
    for level in report.levels:
        found += [f"{level.load.name}: {text}" for text in _level_notes(level)]
    if report.is_partial:
        found.append("Interrupted: the result is partial.")
    return found


def _level_notes(level: Level) -> list[str]:
    summary = level.summary
    found = []
    for kind, count in summary.errors.items():
        detail = next(sample.detail for sample in level.samples if sample.error == kind)
        found.append(f"{count} requests failed: {kind}{': ' if detail else ''}{detail}.")
    if summary.unfinished:
        found.append(f"{summary.unfinished} requests were cut off.")
    if summary.short:
        found.append(f"{summary.short} answers are shorter than requested.")
    if summary.cached_tokens > summary.prompt_tokens // 100:
        share = summary.cached_tokens / max(summary.prompt_tokens, 1)
        found.append(
            f"{share:.0%} of the prompt tokens came from a prefix cache; another --seed avoids it."
        )
    if summary.drafts is not None:
        rates = ", ".join(f"{rate:.0%}" for rate in summary.drafts.place_rates())
        found.append(f"draft tokens accepted, by position: {rates}.")
    if summary.client_load is not None and summary.client_load > MAX_CLIENT_LOAD:
        found.append(
            f"the client used {summary.client_load:.0%} of a core: its own work is in the figures."
        )
    if summary.late is not None and summary.late.p99 > MAX_LATE_S:
        found.append(f"requests were sent late: p99 {1000 * summary.late.p99:.0f} ms.")
    return found


def number(value: float | None, digits: int) -> str:
    """A figure as a cell: with thousands separators, a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def plain(table: Table) -> str:
    """Aligned columns, two spaces apart."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
