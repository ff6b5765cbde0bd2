"""How the engine process says that a step advances.

The thread that computes calls a `Pulse` when it has advanced: on a CPU after each layer and each
product of the head, on a GPU when the device's event at the end of a step has come. No other thread
does, so a step that hangs sends nothing, whatever else the process does.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Final

from tiercel.ipc.messages import Advanced

MESSAGE_SECONDS: Final = 0.2  # between two messages at least


class Pulse:
    """Sends a message each time that a step has advanced, up to five a second."""

    def __init__(
        self, send: Callable[[Advanced], None], clock: Callable[[], float] = perf_counter
    ) -> None:
        self._send = send
        self._clock = clock
        self._last_s: float | None = None  # of the call before; None when nothing was under way
        self._sent_s: float | None = None
        self._longest_s = 0.0

    def __call__(self) -> None:
        """Note that the step has advanced."""
        now_s = self._clock()
        if self._last_s is not None:
            self._longest_s = max(self._longest_s, now_s - self._last_s)
        self._last_s = now_s
        if self._sent_s is None or now_s - self._sent_s >= MESSAGE_SECONDS:
            self._send(Advanced(self._longest_s))
            self._sent_s, self._longest_s = now_s, 0.0

    def rest(self) -> None:
        """Note that there is nothing to do: the time until the next call is no pause of a step."""
        self._last_s = None
