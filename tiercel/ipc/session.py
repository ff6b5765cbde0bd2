"""The engine process once PyTorch is loaded: a model, its loop, and the messages about them.

The thread of the loop sends; another one reads what the parent sends and puts it into the loop's
inbox. A request with a grammar makes a detour over the thread that compiles: steps and other
requests do not wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import Final

from tiercel.engine.engine import RequestUpdate
from tiercel.engine.load import LoadedModel
from tiercel.engine.loop import EngineLoop, StepResult, is_first, token_update
from tiercel.engine.prompt_progress import num_computed
from tiercel.errors import TiercelError
from tiercel.ipc.counters import Counters
from tiercel.ipc.matcher_queue import MatcherQueue
from tiercel.ipc.messages import (
    Abort,
    Delta,
    Embedding,
    Entered,
    ErrorInfo,
    Forget,
    Forgotten,
    FromEngine,
    ItemTokens,
    NewRequest,
    Outputs,
    PromptProgress,
    Refused,
    Scores,
    Stats,
    Stop,
    ToEngine,
    split_prompt_logprobs,
    value_bytes,
)
from tiercel.ipc.pulse import Pulse
from tiercel.request.request import Request

STATS_SECONDS: Final = 0.1

Send = Callable[[FromEngine], None]


class EngineSession:
    """One loaded model and the requests that its client names by keys."""

    def __init__(self, loaded: LoadedModel, send: Send) -> None:
        self.loop = EngineLoop(loaded.engine, self, loaded.faults)
        self._matchers = MatcherQueue(
            loaded.matchers, self._is_wanted, self._on_matcher, self._on_broken
        )
        self._lock = threading.Lock()  # a request is submitted or ended, not both
        self._send = send
        self._pulse = Pulse(send)
        self._engine = loaded.engine
        self._engine.runner.watch(self._pulse)
        self._counters = Counters(loaded.engine)
        self._stats_s = 0.0
        self._requests: dict[int, Request] = {}
        self._keys: dict[Request, int] = {}
        self._last_key = 0
        self._told_key = 0

    def handle(self, message: ToEngine) -> None:
        """Take a message; on the thread that reads."""
        if isinstance(message, NewRequest):
            self._take(message)
        elif isinstance(message, Forget):
            self.loop.call(self._forget_history)
        elif isinstance(message, Abort | Stop):
            with self._lock:
                request_to_end = self._forget(message.key)
            if request_to_end is None:
                return  # it has ended meanwhile
            if isinstance(message, Stop):
                self.loop.stop(request_to_end, message.stop_string)
            else:
                self.loop.abort(request_to_end)

    def _take(self, message: NewRequest) -> None:
        request = message.request()
        self._requests[message.key] = request
        self._keys[request] = message.key
        if request.grammar is None:
            self._submit(request)
        else:
            self._matchers.put(request)

    def _submit(self, request: Request) -> None:
        with self._lock:
            key = self._keys.get(request)
            if key is not None:  # else it was aborted meanwhile
                self.loop.submit(request)
                self.loop.call(lambda: self._note_key(key))

    def _is_wanted(self, request: Request) -> bool:
        return request in self._keys

    def _on_matcher(self, request: Request, error: TiercelError | None) -> None:
        if error is None:
            self._submit(request)
        else:
            self.on_refused(request, error)

    def _on_broken(self, call: Future[None]) -> None:
        """Let the loop fail with the exception of the other thread."""
        self.loop.call(call.result)

    def suspects(self) -> tuple[str, ...]:
        """Ids of the requests of a step that failed."""
        return tuple(request.request_id for request in self.loop.running())

    def on_step(self, result: StepResult) -> None:
        """Send the results of a step."""
        self._pulse()
        self._counters.add(result)
        entered = [
            Entered(key, request.num_cached)
            for request in result.entered
            if (key := self._keys.get(request)) is not None
        ]
        deltas = [
            self._delta(key, update)
            for update in result.updates
            if (key := self._keys.get(update.request)) is not None
        ]
        if entered or deltas or self._last_key != self._told_key:
            self._told_key = self._last_key
            self._send(Outputs(result.started_s, self._last_key, tuple(entered), tuple(deltas)))
        for request in result.computing:
            key = self._keys.get(request)
            if key is not None:
                self._send(PromptProgress(key, num_computed(request)))
        if perf_counter() - self._stats_s >= STATS_SECONDS:
            self._send_stats()

    def on_refused(self, request: Request, error: TiercelError) -> None:
        """Send why a request was not taken."""
        key = self._keys.get(request)
        if key is not None:
            self._forget(key)
            self._send(Refused(key, ErrorInfo.of(error)))

    def on_idle(self) -> None:
        """Send the counters."""
        self._pulse.rest()
        self._send_stats()

    def _forget_history(self) -> None:
        self._engine.forget()
        self._counters = Counters(self._engine)
        self._send(Forgotten())

    def _note_key(self, key: int) -> None:
        self._last_key = max(self._last_key, key)

    def _forget(self, key: int) -> Request | None:
        request = self._requests.pop(key, None)
        if request is not None:
            self._keys.pop(request, None)
        return request

    def _delta(self, key: int, update: RequestUpdate) -> Delta:
        if is_first(update):
            for message in split_prompt_logprobs(key, update.request.prompt_logprobs):
                self._send(message)
            if update.request.embedding is not None:
                self._send(Embedding(key, value_bytes(update.request.embedding)))
            if len(update.request.scores):
                self._send(Scores(key, value_bytes(update.request.scores)))
            if update.request.item_tokens:
                self._send(ItemTokens(key, tuple(update.request.item_tokens)))
        if update.request.finish_reason is not None:
            self._forget(key)
        now = token_update(update)
        return Delta(key, now.new_token_ids, now.logprobs, now.finish_reason, now.stop_reason)

    def _send_stats(self) -> None:
        self._stats_s = perf_counter()
        num_running = len(self.loop.running())
        self._send(Stats(self._counters.take(num_running, self.loop.num_live - num_running)))
