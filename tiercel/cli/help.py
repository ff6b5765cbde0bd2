"""The shape of `--help`: plain aligned rows without boxes, so that a command fits one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cyclopts.help import PlainFormatter

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

_LABEL_WIDTH = 32  # the longest flag with its type: --gpu-memory-utilization FLOAT


class CompactFormatter(PlainFormatter):
    """One row per option: its names and type, what it does, its default."""

    def __call__(self, console: Console, _options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one group of options or commands."""
        from rich.text import Text

        rows = [(_label(entry), _description(entry)) for entry in panel.entries]
        rows = [row for row in rows if row[0]]
        if not rows:
            return
        console.print(Text(f"{panel.title or 'Options'}:", style="bold"))
        for label, description in rows:
            line = Text(f"  {label:<{_LABEL_WIDTH}} {description}".rstrip())
            console.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
        console.print()


def _label(entry: Any) -> str:
    names = [*entry.positive_shorts, *entry.positive_names]
    if entry.positional_label:
        names.insert(0, f"[{entry.positional_label}]")
    if any(name in ("-h", "--version") for name in names):
        return ""  # named on the last line of each page
    label = ", ".join(names)
    return f"{label} {entry.metavar}" if entry.metavar and names[-1].startswith("-") else label


def _description(entry: Any) -> str:
    text = str(getattr(entry.description, "plain", entry.description or "")).strip()
    is_worth_it = entry.default not in (None, "", "False", "None", "[]", "()")
    return f"{text} [{entry.default}]" if is_worth_it else text
