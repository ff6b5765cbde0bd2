"""Progress of the server's start, for `/ready`, the terminal and the log.

The engine's start is most of it; warm-up requests are the remainder. On a terminal one line is
rewritten; otherwise the log gets a line for each stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from tiercel.ipc.messages import Progress

_LOG: Final = logging.getLogger("tiercel.serve")
ENGINE_SHARE: Final = 0.9


class StartupProgress:
    """Progress of starts of the engine, one after another."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        """Set up.

        Args:
            show: rewrites the status line of a terminal, "" removes it; None: stages go to the log.
        """
        self._show = show
        self._stage = ""
        self._warmed_up = 0.0

    def progress(self, engine_share: float) -> float:
        """Progress of the first start, 0 to 1.

        Args:
            engine_share: progress of the engine's part, 0 to 1.
        """
        return ENGINE_SHARE * engine_share + (1 - ENGINE_SHARE) * self._warmed_up

    def on_progress(self, message: Progress) -> None:
        """Note the progress of a stage of the engine's start."""
        self._tell(message.what, message.done, message.total)

    def on_warmup(self, done: int, total: int) -> None:
        """Note how many warm-up requests are done."""
        self._warmed_up = done / total
        self._tell("Rehearsing requests", done, total)

    def end(self) -> None:
        """End the progress: requests are accepted, or the engine has ended."""
        self._stage = ""
        if self._show is not None:
            self._show("")

    def _tell(self, what: str, done: int, total: int) -> None:
        if self._show is not None:
            self._show(f"{what} {done / total:.0%}" if total else f"{what} ...")
        elif what != self._stage:
            _LOG.info("starting", extra={"fields": {"stage": what}})
        self._stage = what
