"""Compiles the grammars of requests from another process, on a thread of its own.

Compiling a grammar takes up to a second, so it is not done on the thread of the loop. A caller in
the process of the engine compiles before it submits. The compiler releases the GIL meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tiercel.errors import TiercelError
from tiercel.grammar.matchers import Matchers
from tiercel.ipc.fair_queue import FairQueue
from tiercel.request.request import Request


class MatcherQueue:
    """Attaches matchers to requests one after the other, those of different clients in turn.

    Args:
        matchers: makes the matchers.
        is_wanted: whether a request that waited still needs one.
        on_done: called on the queue's thread with the request and the error, if there was one.
        on_broken: called with what failed in another way; nothing can be trusted then.
    """

    def __init__(
        self,
        matchers: Matchers,
        is_wanted: Callable[[Request], bool],
        on_done: Callable[[Request, TiercelError | None], None],
        on_broken: Callable[[Future[None]], None],
    ) -> None:
        self._matchers, self._is_wanted = matchers, is_wanted
        self._on_done, self._on_broken = on_done, on_broken
        self._waiting: FairQueue[Request] = FairQueue()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammars")  # started by the first request

    def put(self, request: Request) -> None:
        """Add a request with a grammar; from any thread."""
        with self._lock:
            self._waiting.put(request.client, request)
        # Each call takes the request whose turn it is then, not this one.
        self._thread.submit(self._attach_next).add_done_callback(self._check)

    def _attach_next(self) -> None:
        with self._lock:
            request = self._waiting.take()
        if request is None or not self._is_wanted(request):
            return
        try:
            request.matcher = self._matchers.make(request.grammar, request.stop_ids)
        except TiercelError as error:
            self._on_done(request, error)
        else:
            self._on_done(request, None)

    def _check(self, call: Future[None]) -> None:
        if not call.cancelled() and call.exception() is not None:
            self._on_broken(call)
