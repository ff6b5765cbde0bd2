"""The layout of `--help`: plain aligned rows without boxes, so that a command fits one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cyclopts.help import PlainFormatter

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions


class CompactFormatter(PlainFormatter):
    """Help formatter with one row per option: names and type, meaning, default."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:  # noqa: ARG002
        """Print one group of options or commands."""
        from rich.text import Text

        rows = [(_label(entry), _description(entry)) for entry in panel.entries]
        rows = [row for row in rows if row[0]]
        if not rows:
            return
        width = max(len(label) for label, _ in rows)
        console.print()
        console.print(Text(f"{panel.title or 'Options'}:", style="bold"))
        for label, description in rows:
            console.print(Text(f"  {label:<{width}}  {description}".rstrip()), soft_wrap=True)

    def render_description(
        self,
        console: Console,
        options: ConsoleOptions,  # noqa: ARG002
        description: Any,
    ) -> None:
        """Print the description of the command; each group brings its own blank line."""
        text = _plain(description)
        if text:
            console.print(text, markup=False)


def _label(entry: HelpEntry) -> str:
    if "--version" in entry.positive_names or "--help" in entry.positive_names:
        return ""  # every command has them
    names = [*entry.positive_shorts, *entry.positive_names]
    if entry.positional_label:
        names.insert(0, f"[{entry.positional_label}]")
    label = ", ".join(names)
    return f"{label} {entry.metavar}" if entry.metavar and names[-1].startswith("-") else label


def _plain(text: Any) -> str:
    """The plain characters of a cyclopts text, which is wrapped for styling."""
    return str(getattr(text, "primary_renderable", text or "")).strip()


def _description(entry: HelpEntry) -> str:
    text = _plain(entry.description)
    is_worth_it = entry.default not in (None, "", "False", "None", "[]", "()")
    return f"{text} [{entry.default}]" if is_worth_it else text
