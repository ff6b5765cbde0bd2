"""The console that help is printed on. Imported on demand: it loads rich."""

from __future__ import annotations

import sys
from typing import Never

from rich.console import Console


class HelpConsole(Console):
    """Wraps nothing, so that examples can be copied, and lets `run` answer for a closed pipe."""

    def __init__(self) -> None:
        # With NO_COLOR rich keeps bold: no colour system at all keeps plain text plain.
        is_plain = Console().no_color or not sys.stdout.isatty()
        super().__init__(color_system=None if is_plain else "auto", highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> Never:
        """Raise what rich would turn into status 1."""
        raise BrokenPipeError
