"""The loop around `Engine.step`, for a thread or a process of its own.

Other threads put calls into an inbox, and the loop makes them between two steps. So an abort is
done before the next step, and only this thread touches the engine. With nothing to do the loop
sleeps until a call comes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol

from tiercel.engine.engine import RequestUpdate
from tiercel.engine.prompt_progress import ProgressReports
from tiercel.errors import OutOfMemoryError, TiercelError
from tiercel.faults import Faults
from tiercel.request.request import Request, Status, TokenUpdate


class SteppingEngine(Protocol):
    """The part of `Engine` that the loop uses."""

    @property
    def has_work(self) -> bool: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request: Request) -> None: ...
    def stop(self, request: Request, stop_reason: str) -> None: ...
    def step(self) -> list[RequestUpdate]: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step.

    Attributes:
        started_s: `perf_counter` when it began.
        seconds: its duration.
        entered: requests whose first step it was.
        num_preempted: requests that gave their memory back and wait again.
        updates: new tokens and ends of requests.
        computing: requests whose progress is reported: part of their prompt is computed.
    """

    started_s: float
    seconds: float
    entered: tuple[Request, ...]
    num_preempted: int
    updates: Sequence[RequestUpdate]
    computing: tuple[Request, ...] = ()


def is_first(update: RequestUpdate) -> bool:
    """Whether it is the first update of a request that has not failed: its prompt is done."""
    request = update.request
    has_only_these = len(request.output_token_ids) == len(update.new_token_ids)
    return has_only_these and request.finish_reason != "error"


def token_update(update: RequestUpdate) -> TokenUpdate:
    """A copy of an update for another thread or process: the request itself goes on changing."""
    request, new = update.request, update.new_token_ids
    logprobs = tuple(request.logprobs[-len(new) :]) if new else ()
    return TokenUpdate(new, logprobs, request.finish_reason, request.stop_reason)


class LoopListener(Protocol):
    """The receiver of results, called on the loop's own thread."""

    def on_step(self, result: StepResult) -> None:
        """A step is done."""

    def on_refused(self, request: Request, error: TiercelError) -> None:
        """The engine refuses a request; all other requests go on."""

    def on_idle(self) -> None:
        """There is nothing to do."""


class EngineLoop:
    """Runs one engine; `run` on one thread, everything else from any."""

    def __init__(
        self, engine: SteppingEngine, listener: LoopListener, faults: Faults | None = None
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._faults = faults or Faults()
        self._num_steps = 0
        self._inbox: deque[Callable[[], None]] = deque()
        self._has_news = threading.Condition()
        self._is_stopping = False
        self._reports = ProgressReports()
        # In order of arrival: every request that has not ended, with its status after the last
        # step; None before its first step.
        self._live: dict[Request, Status | None] = {}

    def submit(self, request: Request) -> None:
        """Give a request to the engine; if it is refused, the listener is notified."""
        self.call(partial(self._submit, request))

    def abort(self, request: Request) -> None:
        """End a request in any state, before the next step; there is no update of it."""
        self.call(partial(self._abort, request))

    def stop(self, request: Request, stop_string: str) -> None:
        """End a request at a stop string, before the next step; there is no update of it."""
        self.call(partial(self._stop, request, stop_string))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the loop's thread, between two steps, in the order of the calls."""
        with self._has_news:
            self._inbox.append(function)
            self._has_news.notify()

    def shutdown(self) -> None:
        """Let `run` return after the step under way; requests that are live then are aborted."""
        with self._has_news:
            self._is_stopping = True
            self._has_news.notify()

    def running(self) -> list[Request]:
        """Requests with memory, oldest first; on the loop's thread, or when `run` has ended."""
        return [request for request in list(self._live) if request.status is Status.RUNNING]

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def run(self) -> None:
        """Run until `shutdown`.

        Raises:
            Exception: any error of a step but running out of memory; the state of the engine cannot
                be trusted then.
        """
        while not self._is_stopping:
            self._wait_for_work()
            while self._inbox:
                self._inbox.popleft()()
            if self._engine.has_work and not self._is_stopping:
                self._step()
        for request in list(self._live):
            self._abort(request)

    def _wait_for_work(self) -> None:
        if self._engine.has_work or self._inbox:
            return
        self._listener.on_idle()
        with self._has_news:
            while not self._inbox and not self._is_stopping:
                self._has_news.wait()

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request)
        except TiercelError as error:
            self._listener.on_refused(request, error)
        else:
            self._live[request] = None

    def _abort(self, request: Request) -> None:
        if request in self._live:
            del self._live[request]
            self._engine.abort(request)

    def _stop(self, request: Request, stop_string: str) -> None:
        if request in self._live:
            del self._live[request]
            self._engine.stop(request, stop_string)

    def _step(self) -> None:
        started = perf_counter()
        self._num_steps += 1
        try:
            self._faults.before_step(self._num_steps)
            updates = self._engine.step()
        except OutOfMemoryError:
            if not self._live:
                raise
            updates = [self._give_up_newest()]
        entered, num_preempted = self._note_changes()
        # The engine may still report on a request that was aborted while its step was under way.
        updates = [update for update in updates if update.request in self._live]
        for update in updates:
            if update.request.finish_reason is not None:
                del self._live[update.request]
        ended = perf_counter()
        computing = self._reports.take(self._live, ended)
        self._listener.on_step(
            StepResult(started, ended - started, entered, num_preempted, updates, computing)
        )

    def _note_changes(self) -> tuple[tuple[Request, ...], int]:
        """Requests that have begun, and the number of those that were preempted."""
        changed = [
            (request, before)
            for request, before in self._live.items()
            if request.status is not (before or Status.WAITING)
        ]
        for request, _ in changed:
            self._live[request] = request.status
        entered = tuple(request for request, before in changed if before is None)
        return entered, sum(request.status is Status.WAITING for request, _ in changed)

    def _give_up_newest(self) -> RequestUpdate:
        """End the request with memory that came last; the remaining ones may then fit."""
        request = (self.running() or list(self._live))[-1]
        self._engine.abort(request)
        request.finish_reason, request.stop_reason = "error", OutOfMemoryError.code
        return RequestUpdate(request, ())
