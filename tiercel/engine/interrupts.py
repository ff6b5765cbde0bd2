"""Ctrl-C while requests run: raised immediately where that is safe, else a moment later.

Python raises KeyboardInterrupt between any two instructions of the main thread. In the middle of
the engine's bookkeeping it would leave rows and blocks without an owner, or tokens that were never
delivered. So it is deferred there, and let through where nothing is half done: while the model
computes. A program's own handler for SIGINT stays in place; other threads are not interrupted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class _Deferral:
    """A signal handler that only notes the signal."""

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.has_come = True

    def raise_noted(self) -> None:
        """Raise the interrupt that was deferred."""
        if self.has_come:
            self.has_come = False
            raise KeyboardInterrupt


@contextmanager
def deferred() -> Generator[None]:
    """Defer Ctrl-C to the end of the block, except in `allowed` blocks within.

    Raises:
        KeyboardInterrupt: at the end.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    handler = _Deferral()
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        handler.raise_noted()


@contextmanager
def allowed() -> Generator[None]:
    """Let Ctrl-C through again within a `deferred` block: nothing is half done here.

    Raises:
        KeyboardInterrupt: at any time.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not isinstance(handler, _Deferral):
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        handler.raise_noted()
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
