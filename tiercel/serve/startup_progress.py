"""How far the server's start has come, for `/ready` and for those who watch it.

The engine's own start is most of it, the server's rehearsal the rest. On a terminal one line is
rewritten; else the log gets a line for each stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from tiercel.ipc.messages import Progress

_LOG: Final = logging.getLogger("tiercel.serve")
ENGINE_SHARE: Final = 0.9


class StartupProgress:
    """Follows starts of the engine, one after the other."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        """Set up.

        Args:
            show: rewrites the line of a terminal, "" takes it away; None: the log tells of stages.
        """
        self._show = show
        self._stage = ""
        self._rehearsed = 0.0

    def progress(self, engine_share: float) -> float:
        """Of the first start, 0 to 1.

        Args:
            engine_share: of the engine's own part.
        """
        return ENGINE_SHARE * engine_share + (1 - ENGINE_SHARE) * self._rehearsed

    def on_progress(self, message: Progress) -> None:
        """The engine says how far a stage has come."""
        self._tell(message.what, message.done, message.total)

    def on_warmup(self, done: int, total: int) -> None:
        """So many requests of the server's own have been answered."""
        self._rehearsed = done / total
        self._tell("Rehearsing requests", done, total)

    def end(self) -> None:
        """Requests are taken, or there will be no engine."""
        self._stage = ""
        if self._show is not None:
            self._show("")

    def _tell(self, what: str, done: int, total: int) -> None:
        if self._show is not None:
            self._show(f"{what} {done / total:.0%}" if total else f"{what} ...")
        elif what != self._stage:
            _LOG.info("starting", extra={"fields": {"stage": what}})
        self._stage = what
