"""An engine loop for readers on event loops of the same process.

The engine goes on with a request while its reader is elsewhere. So each request exists twice: the
reader's, which a `TokenStream` brings up to date, and the engine's twin of it.
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
from tiercel.ipc.messages import NewRequest
from tiercel.ipc.streams import TokenStream
from tiercel.request.request import Request


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads a request.

    Attributes:
        stream: of the reader's request.
        twin: the engine's.
        event_loop: on which the stream is read.
    """

    stream: TokenStream
    twin: Request
    event_loop: asyncio.AbstractEventLoop


class Readers:
    """Runs one engine for them; `run` on a thread of its own, everything else on event loops."""

    def __init__(self, engine: SteppingEngine, faults: Faults) -> None:
        self.loop = EngineLoop(engine, self, faults)
        self._lock = threading.Lock()
        self._by_twin: dict[Request, Reader] = {}
        self._by_request: dict[Request, Reader] = {}
        self._ended: TiercelError | None = None

    def run(self) -> None:
        """Run the loop until its `shutdown`; then every open stream ends with an error."""
        try:
            self.loop.run()
        finally:
            self._end(sys.exception())

    def submit(self, request: Request) -> Reader:
        """Hand a request to the engine; whoever leaves early must call `abort`.

        Raises:
            TiercelError: the loop has ended.
        """
        twin = NewRequest.of(0, request).request()
        twin.wants_logits, twin.matcher = request.wants_logits, request.matcher
        reader = Reader(TokenStream(request, perf_counter()), twin, asyncio.get_running_loop())
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._by_twin[twin] = self._by_request[request] = reader
        self.loop.submit(twin)
        return reader

    def abort(self, request: Request) -> None:
        """End a request in any state; nothing happens if its last update has arrived."""
        reader = self._by_request.get(request)
        if reader is not None:
            self._forget(reader)
            self.loop.abort(reader.twin)

    def stop(self, request: Request, stop_string: str) -> None:
        """End a request whose text reached a stop string; its stream ends without an update."""
        streams.stop(request, stop_string)
        reader = self._by_request.get(request)
        if reader is not None:
            self._forget(reader)
            self.loop.stop(reader.twin, stop_string)

    def on_step(self, result: StepResult) -> None:
        """Hand out what a step did."""
        calls: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for twin in result.entered:
            reader = self._by_twin.get(twin)
            if reader is not None:
                enter = partial(reader.stream.enter, result.started_s, twin.num_cached)
                calls.setdefault(reader.event_loop, []).append(enter)
        for twin in result.computing:
            reader = self._by_twin.get(twin)
            if reader is not None:
                advance = partial(reader.stream.advance, num_computed(twin))
                calls.setdefault(reader.event_loop, []).append(advance)
        for update in result.updates:
            reader = self._by_twin.get(update.request)
            if reader is None:
                continue
            calls.setdefault(reader.event_loop, []).extend(_calls_of(reader.stream, update))
            if update.request.finish_reason is not None:
                self._forget(reader)
        for event_loop, listed in calls.items():
            self._deliver(event_loop, listed)

    def on_refused(self, request: Request, error: TiercelError) -> None:
        """Hand out why a request was not taken."""
        reader = self._by_twin.get(request)
        if reader is not None:
            self._forget(reader)
            self._deliver(reader.event_loop, [partial(reader.stream.push, error)])

    def on_idle(self) -> None:
        """Nothing to do."""

    def _forget(self, reader: Reader) -> None:
        self._by_twin.pop(reader.twin, None)
        self._by_request.pop(reader.stream.request, None)

    def _deliver(
        self, event_loop: asyncio.AbstractEventLoop, calls: Sequence[Callable[[], None]]
    ) -> None:
        try:
            event_loop.call_soon_threadsafe(_make, calls)
        except RuntimeError:  # it was closed without a word: nobody reads these any more
            for reader in [r for r in self._by_twin.values() if r.event_loop is event_loop]:
                self._forget(reader)
                self.loop.abort(reader.twin)

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
        for reader in list(self._by_twin.values()):
            self._forget(reader)
            self._deliver(reader.event_loop, [partial(reader.stream.push, error)])


def _calls_of(stream: TokenStream, update: RequestUpdate) -> Iterator[Callable[[], None]]:
    """What hands one update to its stream."""
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
