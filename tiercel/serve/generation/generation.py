"""The one path by which every route generates: check, submit, turn updates into deltas, end.

    GenerationRequest -> Generation, start() -> a task per completion
                      -> next_deltas() or wait_finished()

Prompts of one list that request one token each and share a prefix may run as one request of the
engine (`shared_prefix.py`); their completions come from it as if each had run alone.

The routes hold the wire format only. A task per completion takes the engine's updates as they come.
So times are measured on engine events, and a stop string ends the engine's work immediately,
however slowly the client reads. Deltas wait for the client in a bounded queue (`output_queue.py`).

A generation ends once, for one reason: all completions are done, an error, or the client has left.
It then releases what it holds in the engine, whatever the state of its requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Final

from tiercel.errors import InternalError, InvalidRequestError, TiercelError
from tiercel.grammar.spec import GrammarSpec
from tiercel.ipc.streams import TokenStream
from tiercel.params import SamplingParams
from tiercel.request.request import Request
from tiercel.request.shared_start import SharedStart, find_shared_starts
from tiercel.serve.generation.admission import (
    check_capacity,
    check_counts,
    check_queue,
    early_end_error,
)
from tiercel.serve.generation.completion import Completion
from tiercel.serve.generation.output_parser import OutputParser, Parsers
from tiercel.serve.generation.output_queue import CompletionDelta, OutputQueue
from tiercel.serve.generation.prompt_progress import PromptProgressTracker
from tiercel.serve.generation.shared_prefix import SharedPrefixStreams
from tiercel.serve.generation.thinking_budget import ThinkingBudget
from tiercel.serve.generation.usage import Usage
from tiercel.serve.http.errors import overload_error
from tiercel.serve.http.logs import RequestLog
from tiercel.serve.http.metrics import FinishedRequest
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import Sender, ServerState

_LOG: Final = logging.getLogger(__name__)
MAX_LOOP_TOKENS: Final = 32 << 10  # longer lists of prompts are compared in a thread


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a route requests.

    Attributes:
        prompts: token ids of each prompt; every prompt gets `params.n` completions.
        params: sampling parameters of all completions.
        make_parsers: factory of the parsers of one completion.
        max_tokens: limit of each completion; None: that of `params`; 0: prefill only.
        grammar: grammar that the completions must match.
        thinking: budget of their thinking.
        priority: scheduling priority; smaller goes first.
        pooling: ``mean`` or ``last`` to pool the hidden states and generate nothing; None: neither.
        param: request field that holds the prompts.
        sender: origin of the request.
        returns_progress: whether a stream reports the progress of its prompts.
    """

    prompts: tuple[list[int], ...]
    params: SamplingParams
    make_parsers: Callable[[], Parsers] = Parsers
    max_tokens: int | None = None
    grammar: GrammarSpec | None = None
    thinking: ThinkingBudget | None = None
    priority: int = 0
    pooling: str | None = None
    param: str = "prompt"
    sender: Sender = field(default_factory=Sender)
    returns_progress: bool = False


class Generation:
    """The completions of one HTTP request."""

    def __init__(
        self, state: ServerState, model: ServedModel, wanted: GenerationRequest, *, is_stream: bool
    ) -> None:
        """Check, and make the engine's requests; nothing is submitted yet.

        Args:
            state: state of the server.
            model: the served model.
            wanted: what to generate.
            is_stream: whether the caller reads `next_deltas`; else it reads `wait_finished`.

        Raises:
            ContextLengthError, InvalidRequestError: a prompt or a parameter does not fit the model,
                or could never fit its cache.
        """
        self._state = state
        self._model = model
        self._n = wanted.params.n
        limits = state.settings.limits
        check_counts(len(wanted.prompts), self._n, limits, wanted.param)
        check_queue(model, len(wanted.prompts) * self._n, limits)
        check_capacity(model, wanted.prompts, self._n, wanted.params.max_tokens)
        self.completions = [
            _make_completion(model, wanted, prompt_index, stream, is_stream=is_stream)
            for prompt_index in range(len(wanted.prompts))
            for stream in range(self._n)
        ]
        self._shared: list[SharedStart] = []
        self.started_s = perf_counter()
        self._streams: list[TokenStream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._is_stream = is_stream
        self._queue = OutputQueue(is_stream=is_stream)
        self._returns_progress = wanted.returns_progress and is_stream
        self._num_open = len(self.completions)
        self._failure: BaseException | None = None
        self._has_news = asyncio.Event()

    async def share_prefixes(self) -> None:
        """Find prompts that share a prefix; call before `start` for a list of prompts.

        With 16-bit activations nothing is packed: the attention of a packed item sums in another
        order than that of a prompt of its own, and rounding makes that 0.03 nats (SmolLM2-135M,
        bfloat16, a CPU). The list then shares its prefix through the prefix cache, with the same
        bits as one prompt at a time.
        """
        info = self._model.info
        requests = [completion.request for completion in self.completions]
        if info.dtype != "float32":
            return
        find = partial(
            find_shared_starts,
            self._model.inputs,
            requests,
            longest_item=info.longest_packed_item,
        )
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        is_short = num_tokens <= MAX_LOOP_TOKENS
        self._shared = find() if is_short else await self._state.run_in_thread(find)

    def start(self) -> None:
        """Submit the requests to the engine, all or none.

        Raises:
            QueueFullError, EngineDeadError: none was taken.
        """
        num_apart = len(self.completions) - sum(len(shared.members) for shared in self._shared)
        self._state.client.check_room(num_apart + len(self._shared))
        self.started_s = perf_counter()
        try:
            groups = [SharedPrefixStreams(s, self._submit(s.carrier)) for s in self._shared]
            members = {stream.request: stream for group in groups for stream in group.streams}
            streams = [
                members.get(completion.request) or self._submit(completion.request)
                for completion in self.completions
            ]
        except TiercelError:
            self.close()
            raise
        loop = asyncio.get_running_loop()
        for group in groups:
            self._add_task(group.distribute())
        for completion, stream in zip(self.completions, streams, strict=True):
            if self._returns_progress:
                completion.progress_tracker = PromptProgressTracker(stream)
                stream.on_progress = partial(
                    self._put_progress, completion.index, completion.progress_tracker
                )
            self._add_task(self._read(completion, stream))
        limits = self._state.settings.limits
        self._timers.append(loop.call_later(limits.max_queue_seconds, self._check_queue))
        if limits.max_request_seconds is not None:
            self._timers.append(loop.call_later(limits.max_request_seconds, self._end_overdue))

    async def next_deltas(self) -> list[CompletionDelta]:
        """The deltas since the last call, at least one; empty when the generation is complete.

        Raises:
            TiercelError: the generation ended early; nothing follows.
        """
        while not self._queue and self._failure is None and self._num_open:
            self._has_news.clear()
            await self._has_news.wait()
        if self._failure is not None and not self._queue:
            raise self._failure
        return self._queue.take()

    async def wait_finished(self) -> list[CompletionDelta]:
        """Wait for the end; return one delta per completion, which is whole, by index.

        Raises:
            TiercelError: as `next_deltas`.
        """
        while self._failure is None and self._num_open:
            self._has_news.clear()
            await self._has_news.wait()
        if self._failure is not None:
            raise self._failure
        return sorted(self._queue.take(), key=lambda delta: delta.index)

    def close(self) -> None:
        """Release everything; safe in any state and more than once."""
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            self._state.client.abort(stream.request)

    def report(self, log: RequestLog) -> None:
        """Close, count the request and fill in its log line; call once, at the end."""
        self.close()
        now = perf_counter()
        usage = self.usage()
        entered = [s.entered_s for s in self._streams if s.entered_s is not None]
        first = [c.first_token_s for c in self.completions if c.first_token_s is not None]
        last = [c.last_token_s for c in self.completions if c.last_token_s is not None]
        early_end = "abort" if self._failure is None else "error"
        reasons = tuple(c.finish_reason or early_end for c in self.completions)
        queue_s = min(entered) - self.started_s if entered else None
        self._state.metrics.count_finished(
            FinishedRequest(
                finish_reasons=reasons,
                num_prompt_tokens=usage.prompt,
                num_generation_tokens=tuple(c.output.num_tokens for c in self.completions),
                n=self._n,
                max_tokens=self.completions[0].request.max_tokens,
                total_s=now - self.started_s,
                queue_s=queue_s,
                prefill_s=min(first) - min(entered) if first and entered else None,
                decode_s=max(last) - min(first) if first else None,
            )
        )
        log.prompt_tokens, log.cached_tokens = usage.prompt, usage.cached
        log.completion_tokens = usage.completion
        log.queue_ms = None if queue_s is None else 1000 * queue_s
        log.ttft_ms = 1000 * (min(first) - self.started_s) if first else None
        log.finish_reason = reasons[0]
        if self._state.settings.logs_prompts:
            self._log_prompts()

    def _log_prompts(self) -> None:
        decode = self._model.tokenizer.decode
        for completion in self.completions:
            request = completion.request
            fields = {
                "prompt": decode(request.prompt_token_ids, skip_special_tokens=False),
                "answer": decode(completion.running.output_token_ids, skip_special_tokens=False),
            }
            _LOG.info("prompt and answer", extra={"fields": fields})

    def usage(self) -> Usage:
        """Token counts so far."""
        firsts = [completion.request for completion in self.completions[:: self._n]]
        return Usage(
            prompt=sum(len(request.prompt_token_ids) for request in firsts),
            completion=sum(c.output.num_tokens for c in self.completions),
            cached=sum(request.num_cached for request in firsts),
            reasoning=sum(c.output.num_reasoning_tokens for c in self.completions),
        )

    @property
    def num_prompt_logprobs(self) -> int:
        """Prompt tokens whose log-probabilities have arrived."""
        return sum(len(completion.request.prompt_logprobs) for completion in self.completions)

    def _submit(self, request: Request) -> TokenStream:
        stream = self._state.client.submit(request)
        self._streams.append(stream)
        return stream

    def _add_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._on_done)
        self._tasks.append(task)

    async def _read(self, completion: Completion, stream: TokenStream) -> None:
        async for update in stream:
            if update.finish_reason in ("error", "abort"):
                raise early_end_error(update)
            now = perf_counter()
            delta = completion.take(update)
            if completion.progress_tracker is not None:
                delta.progress = completion.progress_tracker.finish(now)
            self._observe(completion, len(delta.token_ids), now)
            self._queue.put(delta)
            if self._is_stream:
                self._has_news.set()
            if completion.needs_rest:
                await self._read(completion, self._continue(completion))
                return
            if completion.finish_reason is not None:
                if completion.output.matched is not None:
                    self._state.client.stop(completion.running, completion.output.matched)
                self._num_open -= 1
                return
        raise InternalError("a stream of tokens ended without a reason.")

    def _put_progress(self, index: int, tracker: PromptProgressTracker, num_computed: int) -> None:
        progress = tracker.advance(num_computed, perf_counter())
        if progress is not None:
            self._queue.put(CompletionDelta(index, progress=progress))
            self._has_news.set()

    def _continue(self, completion: Completion) -> TokenStream:
        """Request the rest after the thinking was closed; its blocks are still cached."""
        self._state.client.abort(completion.running)
        return self._submit(completion.make_rest(self._model.inputs))

    def _observe(self, completion: Completion, num_new: int, now: float) -> None:
        if not num_new:
            return
        metrics = self._state.metrics
        if completion.last_token_s is None:
            completion.first_token_s = now
            metrics.observe_first_token(now - self.started_s)
        else:
            metrics.observe_tokens(num_new, now - completion.last_token_s)
        completion.last_token_s = now

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._fail(error)
        elif not self._num_open:
            self._has_news.set()  # also for a caller that waits for the end alone

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._has_news.set()
            self.close()

    def _check_queue(self) -> None:
        # Later prompts of a long list wait for the earlier ones, not for other requests.
        if all(stream.entered_s is None for stream in self._streams):
            seconds = self._state.settings.limits.max_queue_seconds
            text = f"The request waited longer than {seconds:g} seconds."
            self._fail(overload_error("queue_timeout", text, 30))

    def _end_overdue(self) -> None:
        seconds = self._state.settings.limits.max_request_seconds
        text = f"The request took longer than {seconds:g} seconds."
        self._fail(overload_error("request_timeout", text, 1))


def _make_completion(
    model: ServedModel,
    wanted: GenerationRequest,
    prompt_index: int,
    stream: int,
    *,
    is_stream: bool,
) -> Completion:
    params = wanted.params
    if stream and params.prompt_logprobs is not None and not is_stream:
        # The first completion of a prompt reads the prompt for all.
        params = replace(params, prompt_logprobs=None)
    ids = wanted.prompts[prompt_index]
    try:
        request = model.inputs.request(
            ids, params, stream, max_tokens=wanted.max_tokens, grammar=wanted.grammar
        )
    except InvalidRequestError as error:
        error.param = wanted.param if error.param == "prompt" else error.param
        raise
    request.request_id, request.client = wanted.sender.request_id, wanted.sender.client
    request.priority = wanted.priority
    request.pooling = wanted.pooling
    output = OutputParser(request, model.tokenizer, wanted.make_parsers())
    index = prompt_index * wanted.params.n + stream
    return Completion(index, request, output, wanted.thinking)
