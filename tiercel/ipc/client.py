"""The engine as the HTTP process sees it: requests go in, streams of tokens come out.

Free of PyTorch, and of threads: everything happens on one event loop. `Supervisor` keeps an engine
process alive; the client knows which requests are in it, and which of them wait.

What waits is counted here, exactly, because a refusal must cost nothing. The engine names the
newest request that it knew when a step began and those that entered by that step. So a request is
under way to the engine, or it runs, or it waits; those under way will find the rows that are free,
unless an older one waits already.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Final

from tiercel.config import LoadOptions
from tiercel.errors import EngineDeadError, EngineDiedTwiceError, QueueFullError
from tiercel.ipc import streams
from tiercel.ipc.messages import (
    Abort,
    Delta,
    Embedding,
    EngineInfo,
    EngineStats,
    Forget,
    Forgotten,
    FromEngine,
    ItemTokens,
    NewRequest,
    Outputs,
    Progress,
    PromptLogprobs,
    PromptProgress,
    Ready,
    Refused,
    Scores,
    Stats,
    Stop,
    encode,
    read_values,
)
from tiercel.ipc.siblings import Siblings
from tiercel.ipc.spawn import StartEngine, start_engine
from tiercel.ipc.streams import TokenStream
from tiercel.ipc.supervisor import EngineState, Supervisor, SupervisorSettings
from tiercel.params import LIMITS
from tiercel.request.request import ABORTED, Request, TokenUpdate

_LOG = logging.getLogger(__name__)

MAX_RETRY_SECONDS: Final = 60
MAX_UNSENT_BYTES: Final = 64 * 2**20  # of an engine that does not read
_RATE_SAMPLES: Final = 32  # ends of requests from which the speed of the queue is estimated
_POLL_SECONDS: Final = 0.02

# Messages for the stream of one request.
StreamMessage = PromptLogprobs | PromptProgress | Embedding | Scores | ItemTokens | Refused


class EngineClient:
    """One model in an engine process that is started again when it dies.

    Attributes:
        info: description of the engine that was ready last; None before the first.
        stats: counters that the engine sent last.
        on_stats: callback for each message of counters; some fields count from one to the next.
        on_progress: callback for the stages of a start.
    """

    def __init__(
        self,
        options: LoadOptions,
        *,
        max_waiting: int = LIMITS.max_waiting_requests,
        settings: SupervisorSettings | None = None,
        siblings: Siblings | None = None,
        name: str = "",
        start: StartEngine = start_engine,
    ) -> None:
        """Set up; nothing is started.

        Args:
            options: options of the load.
            max_waiting: requests that may wait for an engine row.
            settings: settings of restarts and the heartbeat.
            siblings: all engines of the server; None: this one alone.
            name: name of the engine in the log if there are several.
            start: starts a process, on this machine or another.
        """
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.on_progress: Callable[[Progress], None] | None = None
        self._max_waiting = max_waiting
        self._is_draining = False
        self._has_forgotten = asyncio.Event()
        self._next_key = 1
        self._last_known_key = 0
        self._live: dict[int, TokenStream] = {}
        self._keys: dict[Request, int] = {}
        self._waiting: dict[int, None] = {}  # oldest first: neither entered nor ended
        self._ends: deque[float] = deque(maxlen=_RATE_SAMPLES)
        settings = settings or SupervisorSettings()
        self._siblings = siblings or Siblings(settings.window_s)
        self._supervisor = Supervisor(
            partial(start, options),
            settings,
            self._on_message,
            self._on_lost,
            self._is_busy,
            self._siblings.files,
            name,
        )
        self._siblings.given_up.append(lambda: self._supervisor.state is EngineState.DEAD)

    @property
    def replicas(self) -> tuple[EngineClient, ...]:
        """The engines of the server, of which this one is the only one; see `Replicas`."""
        return (self,)

    @property
    def state(self) -> EngineState:
        """Whether requests are taken, and if not, why."""
        state = self._supervisor.state
        return (
            EngineState.DRAINING if self._is_draining and state is not EngineState.DEAD else state
        )

    @property
    def progress(self) -> float:
        """How far the start of this engine process has come, 0 to 1; it never falls."""
        return self._supervisor.progress

    @property
    def num_restarts(self) -> int:
        """Engine processes that were started after the first."""
        return self._supervisor.num_restarts

    @property
    def failure(self) -> str | None:
        """Why the last engine process ended; None if none did."""
        return self._supervisor.failure

    @property
    def final_error(self) -> EngineDeadError:
        """What a request gets once the engine is dead; meaningless before."""
        return self._supervisor.final_error

    @property
    def pid(self) -> int | None:
        """The engine process, or None while there is none."""
        return self._supervisor.pid

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an engine row."""
        return self._count_waiting(0)

    @property
    def num_running(self) -> int:
        """Requests that have had a step and are not done."""
        return len(self._live) - len(self._waiting)

    @property
    def num_live(self) -> int:
        """Requests that are not done, those under way to the engine included."""
        return len(self._live)

    @property
    def num_spare(self) -> int:
        """Requests that would find a free row."""
        return max(0, self._num_free - len(self._waiting))

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the engine has yet to compute for its requests, as far as is known."""
        return sum(stream.num_waiting_tokens for stream in self._live.values())

    @property
    def is_clogged(self) -> bool:
        """Whether the engine does not read what it is sent."""
        return self._supervisor.unsent_bytes > MAX_UNSENT_BYTES

    async def start(self) -> None:
        """Start the engine process; returns once it runs, long before it is ready.

        Raises:
            EngineDeadError: no process can be started.
        """
        await self._supervisor.start()

    async def wait_ready(self) -> EngineInfo:
        """Wait until the model is loaded.

        Raises:
            TiercelError: the error of loading, of its own class.
            EngineDeadError: starting it was given up.
        """
        await self._supervisor.wait_ready()
        assert self.info is not None, "an engine is ready once it has sent its info"
        return self.info

    async def wait_ended(self) -> None:
        """Wait until there will be no engine any more: it is dead, or the client was closed."""
        await self._supervisor.wait_ended()

    def check_room(self, count: int = 1) -> None:
        """Refuse requests that do not fit the queue.

        Raises:
            QueueFullError: more than `max_waiting` would wait; `retry_after_s` is an estimate.
            EngineDeadError: no engine is ready.
        """
        if self.state is EngineState.DEAD:
            raise self.final_error
        if self.state is not EngineState.READY:
            raise not_ready_error(self.state)
        waiting = self._count_waiting(count)
        if waiting > self._max_waiting or self.is_clogged:
            raise queue_full_error(self._max_waiting, self.retry_after(waiting))

    def submit(self, request: Request) -> TokenStream:
        """Hand a request to the engine.

        Args:
            request: new; from here on the stream alone changes it.

        Returns:
            Its updates. A reader that leaves before the end must call `abort`.

        Raises:
            QueueFullError, EngineDeadError: as `check_room`.
        """
        assert not request.wants_logits, "logits stay in the process of the engine"
        self.check_room()
        key = self._next_key
        stream = TokenStream(request, perf_counter())
        self._supervisor.send(encode(NewRequest.of(key, request)))
        self._next_key += 1
        self._live[key] = stream
        self._keys[request] = key
        self._waiting[key] = None
        return stream

    def abort(self, request: Request) -> None:
        """End a request in any state; its stream ends with the reason ``abort``.

        Nothing happens if its last update has arrived.
        """
        key = self._keys.get(request)
        if key is not None:
            self._supervisor.send(encode(Abort(key)))
            self._remove(key).push(ABORTED)

    def stop(self, request: Request, stop_string: str) -> None:
        """End a request whose text reached a stop string; its stream ends without an update."""
        streams.stop(request, stop_string)
        key = self._keys.get(request)
        if key is not None:
            self._supervisor.send(encode(Stop(key, stop_string)))
            self._remove(key)

    async def forget(self) -> None:
        """Let the engine count from zero again and keep no prefix; nothing may be under way."""
        self._has_forgotten.clear()
        if self.state is EngineState.READY:
            self._supervisor.send(encode(Forget()))
            await self._has_forgotten.wait()
        self._ends.clear()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """End the engine; safe to call again.

        Args:
            drain_seconds: how long requests that are under way may go on; then they are aborted.
        """
        self._is_draining = True
        deadline = perf_counter() + drain_seconds
        while self._live and perf_counter() < deadline:
            await asyncio.sleep(min(_POLL_SECONDS, drain_seconds))
        for stream in list(self._live.values()):
            self.abort(stream.request)
        await self._supervisor.stop()

    def _is_busy(self) -> bool:
        return bool(self._live or self.stats.num_running or self.stats.num_waiting)

    def _count_waiting(self, more: int) -> int:
        """How many wait, or would with `more` requests."""
        return max(0, len(self._waiting) + more - self._num_free)

    @property
    def _num_free(self) -> int:
        """Rows for requests that are under way; none if an older request waits already."""
        oldest = next(iter(self._waiting), None)
        if self.info is None or (oldest is not None and oldest <= self._last_known_key):
            return 0
        return max(0, self.info.max_num_seqs - self.num_running)

    def retry_after(self, waiting: int) -> int:
        """Seconds until so many requests have left the queue, by the speed of the last ones."""
        if len(self._ends) < 2:
            return 1
        seconds_each = (perf_counter() - self._ends[0]) / len(self._ends)
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(seconds_each * waiting)))

    def _remove(self, key: int) -> TokenStream:
        stream = self._live.pop(key)
        del self._keys[stream.request]
        self._waiting.pop(key, None)
        return stream

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._on_outputs(message)
        elif isinstance(message, Stats):
            self.stats = message.stats
            if self.on_stats is not None:
                self.on_stats(message.stats)
        elif isinstance(message, StreamMessage):
            if message.key in self._live:  # else it was aborted meanwhile
                self._on_stream_message(message)
        elif isinstance(message, Progress) and self.on_progress is not None:
            self.on_progress(message)
        elif isinstance(message, Ready):
            self.info = message.info
        elif isinstance(message, Forgotten):
            self.stats = EngineStats()
            self._has_forgotten.set()

    def _on_stream_message(self, message: StreamMessage) -> None:
        stream = self._live[message.key]
        if isinstance(message, PromptLogprobs):
            stream.add_prompt_logprobs(message.entries)
        elif isinstance(message, PromptProgress):
            stream.advance(message.num_computed)
        elif isinstance(message, Embedding):
            stream.set_embedding(read_values(message.embedding))
        elif isinstance(message, Scores):
            stream.set_scores(read_values(message.scores))
        elif isinstance(message, ItemTokens):
            stream.set_item_tokens(message.entries)
        else:
            self._remove(message.key).push(message.error.error())

    def _on_outputs(self, message: Outputs) -> None:
        self._last_known_key = max(self._last_known_key, message.last_key)
        for entered in message.entered:
            if entered.key in self._live:
                del self._waiting[entered.key]
                self._live[entered.key].enter(message.started_s, entered.num_cached)
        for delta in message.deltas:
            if delta.key in self._live:
                self._on_delta(delta)

    def _on_delta(self, delta: Delta) -> None:
        stream = self._live[delta.key]
        if delta.finish_reason is not None:
            self._remove(delta.key)
            self._ends.append(perf_counter())
            if delta.finish_reason != "error":
                self._siblings.suspects.note_answer(stream.request)
        stream.push(
            TokenUpdate(delta.new_token_ids, delta.logprobs, delta.finish_reason, delta.stop_reason)
        )

    def _on_lost(self, suspects: tuple[str, ...], final: EngineDeadError | None) -> None:
        """End every stream of an engine that has died; log whose step it may have been."""
        ran = [s.request for key, s in self._live.items() if key not in self._waiting]
        named = [request for request in ran if request.request_id in suspects] or ran
        again = self._siblings.suspects.note_death(named, perf_counter())
        if named:
            _LOG.error("requests of %s's last step: %s", self._supervisor.name, _ids(named))
        if again:
            _LOG.error("of these, seen in the last step of another engine: %s", _ids(again))
        if not self._siblings.are_given_up:
            final = None  # another engine answers, or will
        for key in list(self._live):
            stream = self._remove(key)
            is_again = any(request is stream.request for request in again)
            stream.push(final or (_died_twice_error() if is_again else _lost_error()))
        self.stats = EngineStats()
        self._ends.clear()
        self._has_forgotten.set()  # no engine is left that could answer


def not_ready_error(state: EngineState) -> EngineDeadError:
    """The error of a request that no engine can take yet."""
    return EngineDeadError(f"the engine is {state.value}.", hint="Ask /ready, then send it again.")


def queue_full_error(limit: int, retry_after_s: int) -> QueueFullError:
    """The error of a request beyond the limit of those that wait."""
    error = QueueFullError(
        f"{limit} requests wait already, the limit.", hint="Send it again later."
    )
    error.retry_after_s = retry_after_s
    return error


def _ids(requests: Sequence[Request]) -> str:
    """The ids of requests for the log; answers to one HTTP request share its id."""
    return ", ".join(dict.fromkeys(request.request_id for request in requests))


def _died_twice_error() -> EngineDiedTwiceError:
    return EngineDiedTwiceError(
        "the engine ended while this request was under way, for the second time.",
        hint="Do not send it again unchanged; the log of the server says what ended the engine.",
    )


def _lost_error() -> EngineDeadError:
    return EngineDeadError(
        "the engine ended while this request was under way.",
        hint="It is started again: send the request again.",
    )
