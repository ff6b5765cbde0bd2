"""Tells an engine that computes for long from one that hangs.

The engine says when a step advances (`ipc/pulse.py`) and how long it took at most from one
advance to the next. While there is work, its silence is measured against that: an engine counts as
hung when it has been silent for `PATIENCE` times the longest of its recent pauses, and for a least
time that an option sets. A step may take as long as it likes while it advances.

An engine that starts has no requests yet, so it is never taken for hung while it fetches, compiles,
loads or warms up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from tiercel.errors import EngineDeadError
from tiercel.ipc.messages import Advanced, FromEngine, Outputs, Stats
from tiercel.ipc.spawn import StartedEngine

PATIENCE: Final = 20  # pauses between two advances
NUM_PAUSES: Final = 32  # messages that are remembered; they come up to five times a second
TICKS: Final = 10  # in which the least time is counted
_STACKS_SECONDS: Final = 0.2  # for the stacks of a hung engine to reach the log


class Watchdog:
    """Watches the engine processes of a supervisor, one after the other."""

    def __init__(self, least_s: float, is_busy: Callable[[], bool]) -> None:
        """Set up.

        Args:
            least_s: an engine that was silent for less does not count as hung.
            is_busy: whether the engine has work, so that silence means that it hangs.
        """
        self._least_s = least_s
        self._is_busy = is_busy
        self._num_signs = 0
        self._pauses: deque[float] = deque(maxlen=NUM_PAUSES)

    @property
    def limit_s(self) -> float:
        """How long the engine may be silent while there is work."""
        return max(self._least_s, PATIENCE * max(self._pauses, default=0.0))

    def note(self, message: FromEngine) -> None:
        """Take note of a message; only those of the thread that computes are signs of life."""
        if isinstance(message, Advanced):
            self._pauses.append(message.longest_s)
        if isinstance(message, Advanced | Outputs | Stats):
            self._num_signs += 1

    async def watch(self, engine: StartedEngine) -> None:
        """Kill a process that does not advance though there is work.

        Ticks are counted, not seconds: while this process itself is stopped, the engine may be
        well.
        """
        num_silent, seen = 0, self._num_signs
        while num_silent * self._least_s < TICKS * self.limit_s:
            await asyncio.sleep(self._least_s / TICKS)
            is_silent = self._num_signs == seen and self._is_busy()
            num_silent = num_silent + 1 if is_silent else 0
            seen = self._num_signs
        engine.dump_stacks()
        await asyncio.sleep(_STACKS_SECONDS)
        engine.give_up(EngineDeadError(f"no progress in {self.limit_s:.3g} s while there was work"))
