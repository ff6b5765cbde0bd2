"""Ctrl-C while requests run: raised immediately where that is safe, else a moment later.

Python raises KeyboardInterrupt between any two instructions of the main thread. In the middle of
the engine's bookkeeping it would leave rows and blocks without an owner, or tokens that were never
delivered. So it is deferred there, and let through where nothing is half done: while the model
computes. A program's own handler for SIGINT stays in place; other threads are not interrupted.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without enumerations: 2 us, not 37
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class _Deferral:
    """A signal handler that notes the signal, or raises the interrupt while it is open.

    Attributes:
        is_open: whether an `allowed` block runs. A flag: Python takes ten times as long to exchange
            handlers, and a step opens and closes it twice.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._has_come = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self._has_come = True
        if self.is_open:
            self.raise_noted()

    def raise_noted(self) -> None:
        """Raise the interrupt that was deferred."""
        if self._has_come:
            self._has_come = False
            raise KeyboardInterrupt


_deferrals: list[_Deferral] = []  # the one of the main thread's `deferred` block, if it is in one


@contextmanager
def deferred() -> Generator[None]:
    """Defer Ctrl-C to the end of the block, except in `allowed` blocks within.

    Raises:
        KeyboardInterrupt: at the end.
    """
    if not _is_main() or _signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    handler = _Deferral()
    _signal.signal(signal.SIGINT, handler)
    _deferrals.append(handler)
    try:
        yield
    finally:
        _deferrals.remove(handler)
        _signal.signal(signal.SIGINT, signal.default_int_handler)
        handler.raise_noted()


@contextmanager
def allowed() -> Generator[None]:
    """Let Ctrl-C through again within a `deferred` block: nothing is half done here.

    Raises:
        KeyboardInterrupt: at any time.
    """
    if not _deferrals or not _is_main():
        yield
        return
    handler = _deferrals[-1]
    try:
        handler.is_open = True
        handler.raise_noted()
        yield
    finally:
        handler.is_open = False


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
