"""A bridge between an engine loop on a thread and readers on asyncio event loops of this process.

The engine runs ahead of the reader of a request. So each request exists twice: the caller's, which
a `TokenStream` brings up to date as its updates are read, and the engine's, a clone of it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from tiercel.engine.engine import RequestUpdate
from tiercel.engine.loop import EngineLoop, SteppingEngine, StepResult, is_first, token_update
from tiercel.engine.prompt_progress import num_computed
from tiercel.errors import EngineDeadError, InvalidRequestError, TiercelError
from tiercel.faults import Faults
from tiercel.ipc import streams
from tiercel.ipc.streams import TokenStream
from tiercel.request.request import Request


@dataclass(frozen=True, slots=True)
class BridgedRequest:
    """A request under way.

    Attributes:
        stream: updates of the caller's request.
        engine_request: the engine's clone of that request.
        event_loop: event loop on which the stream is read.
    """

    stream: TokenStream
    engine_request: Request
    event_loop: asyncio.AbstractEventLoop


class AsyncioBridge:
    """Runs one engine; `run` on a thread of its own, everything else on event loops."""

    def __init__(self, engine: SteppingEngine, faults: Faults) -> None:
        self.loop = EngineLoop(engine, self, faults)
        self._lock = threading.Lock()
        self._by_engine_request: dict[Request, BridgedRequest] = {}
        self._by_request: dict[Request, BridgedRequest] = {}
        self._ended: TiercelError | None = None

    def run(self) -> None:
        """Run the loop until its `shutdown`; then every open stream ends with an error."""
        try:
            self.loop.run()
        finally:
            self._end(sys.exception())

    def submit(self, request: Request) -> BridgedRequest:
        """Hand a request to the engine; a caller that leaves before its end must call `abort`.

        Raises:
            TiercelError: the loop has ended.
        """
        bridged = BridgedRequest(
            stream=TokenStream(request, perf_counter()),
            engine_request=request.clone_for_engine(),
            event_loop=asyncio.get_running_loop(),
        )
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._by_engine_request[bridged.engine_request] = bridged
            self._by_request[request] = bridged
        self.loop.submit(bridged.engine_request)
        return bridged

    def abort(self, request: Request) -> None:
        """End a request in any state; nothing happens if its last update has arrived."""
        bridged = self._by_request.get(request)
        if bridged is not None:
            self._forget(bridged)
            self.loop.abort(bridged.engine_request)

    def stop(self, request: Request, stop_string: str) -> None:
        """End a request whose text reached a stop string; its stream ends without an update."""
        streams.stop(request, stop_string)
        bridged = self._by_request.get(request)
        if bridged is not None:
            self._forget(bridged)
            self.loop.stop(bridged.engine_request, stop_string)

    def on_step(self, result: StepResult) -> None:
        """Hand out what a step did."""
        calls: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for engine_request in result.entered:
            bridged = self._by_engine_request.get(engine_request)
            if bridged is not None:
                enter = partial(bridged.stream.enter, result.started_s, engine_request.num_cached)
                calls.setdefault(bridged.event_loop, []).append(enter)
        for engine_request in result.computing:
            bridged = self._by_engine_request.get(engine_request)
            if bridged is not None:
                advance = partial(bridged.stream.advance, num_computed(engine_request))
                calls.setdefault(bridged.event_loop, []).append(advance)
        for update in result.updates:
            bridged = self._by_engine_request.get(update.request)
            if bridged is None:
                continue
            calls.setdefault(bridged.event_loop, []).extend(_calls_of(bridged.stream, update))
            if update.request.finish_reason is not None:
                self._forget(bridged)
        for event_loop, listed in calls.items():
            self._deliver(event_loop, listed)

    def on_refused(self, request: Request, error: TiercelError) -> None:
        """Hand out why a request was not taken."""
        bridged = self._by_engine_request.get(request)
        if bridged is not None:
            self._forget(bridged)
            self._deliver(bridged.event_loop, [partial(bridged.stream.push, error)])

    def on_idle(self) -> None:
        """Nothing to do."""

    def _forget(self, bridged: BridgedRequest) -> None:
        self._by_engine_request.pop(bridged.engine_request, None)
        self._by_request.pop(bridged.stream.request, None)

    def _deliver(
        self, event_loop: asyncio.AbstractEventLoop, calls: Sequence[Callable[[], None]]
    ) -> None:
        try:
            event_loop.call_soon_threadsafe(_make, calls)
        except RuntimeError:  # closed with streams still open: these are not read any more
            unread = self._by_engine_request.values()
            for bridged in [b for b in unread if b.event_loop is event_loop]:
                self._forget(bridged)
                self.loop.abort(bridged.engine_request)

    def _end(self, cause: BaseException | None) -> None:
        if cause is None:
            error: TiercelError = InvalidRequestError(
                "the model is closed.", hint="Make a new one."
            )
        else:
            error = EngineDeadError("the engine has failed.", hint="Make a new one.")
            error.__cause__ = cause
        with self._lock:
            self._ended = error
        for bridged in list(self._by_engine_request.values()):
            self._forget(bridged)
            self._deliver(bridged.event_loop, [partial(bridged.stream.push, error)])


def _calls_of(stream: TokenStream, update: RequestUpdate) -> Iterator[Callable[[], None]]:
    """The calls that hand one update to its stream."""
    request = update.request
    if is_first(update) and request.prompt_logprobs:
        yield partial(stream.add_prompt_logprobs, tuple(request.prompt_logprobs))
    if is_first(update) and request.embedding is not None:
        yield partial(stream.set_embedding, request.embedding)
    if is_first(update) and len(request.scores):
        yield partial(stream.set_scores, request.scores)
    if is_first(update) and request.item_tokens:
        yield partial(stream.set_item_tokens, tuple(request.item_tokens))
    yield partial(stream.push, token_update(update))


def _make(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
