"""The one way by which every route generates: admit, submit, turn updates into pieces, end.

    GenerationRequest -> Generation, start() -> a task per answer -> pieces() or finished()

Prompts of one list that ask for one token each and share a start may run as one request of the
engine (`shared_answers.py`); their answers come from it as if each had run alone.

Adapters hold the wire format only. A task per answer takes the engine's updates as they come, so
times are measured on engine events and a stop string ends the engine's work at once, however slow
the client reads. Pieces wait for the reader in a bounded line: beyond `MAX_WAITING_PIECES` or
`MAX_WAITING_CHARS` a new piece is joined to the one before it.

A generation ends once, for one reason: all answers done, an error, or the reader has gone. It then
gives back what it holds in the engine, whatever the state of its requests.
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
    ended_early,
)
from tiercel.serve.generation.answer import Answer, ThinkingBound
from tiercel.serve.generation.answer_text import AnswerText, Parsers
from tiercel.serve.generation.pieces import Piece, PieceLine, Usage
from tiercel.serve.generation.prompt_meter import PromptMeter
from tiercel.serve.generation.shared_answers import SharedAnswers
from tiercel.serve.http.errors import overloaded
from tiercel.serve.http.logs import RequestLog
from tiercel.serve.http.metrics import FinishedRequest
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import Sender, ServerState

_LOG: Final = logging.getLogger(__name__)
MAX_LOOP_TOKENS: Final = 32 << 10  # longer lists of prompts are compared in a thread


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What an adapter asks for.

    Attributes:
        prompts: token ids of each; every one gets `params.n` answers.
        params: of all answers.
        make_parsers: new parsers for one answer.
        max_tokens: None for that of `params`; 0 reads the prompt and generates nothing.
        grammar: what the answers must match.
        thinking: how long they may think.
        priority: smaller goes first.
        pooling: ``mean`` or ``last``: the hidden states become a vector, and nothing is generated.
        param: the field that holds the prompts.
        sender: where the request comes from.
        returns_progress: whether a stream has pieces about the progress of its prompts.
    """

    prompts: tuple[list[int], ...]
    params: SamplingParams
    make_parsers: Callable[[], Parsers] = Parsers
    max_tokens: int | None = None
    grammar: GrammarSpec | None = None
    thinking: ThinkingBound | None = None
    priority: int = 0
    pooling: str | None = None
    param: str = "prompt"
    sender: Sender = field(default_factory=Sender)
    returns_progress: bool = False


class Generation:
    """The answers to one HTTP request."""

    def __init__(
        self, state: ServerState, model: ServedModel, wanted: GenerationRequest, *, is_stream: bool
    ) -> None:
        """Check and make the engine's requests; nothing is submitted yet.

        Args:
            state: of the server.
            model: that answers.
            wanted: what to generate.
            is_stream: whether pieces are read as they come; else only `finished` is.

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
        self.answers = [
            _make_answer(model, wanted, prompt_index, stream, is_stream=is_stream)
            for prompt_index in range(len(wanted.prompts))
            for stream in range(self._n)
        ]
        self._shared: list[SharedStart] = []
        self.started_s = perf_counter()
        self._streams: list[TokenStream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._is_stream = is_stream
        self._line = PieceLine(is_stream=is_stream)
        self._returns_progress = wanted.returns_progress and is_stream
        self._num_open = len(self.answers)
        self._failure: BaseException | None = None
        self._news = asyncio.Event()

    async def share_starts(self) -> None:
        """Find prompts that share a start; call before `start` for a list of prompts.

        In 16 bits nothing is packed: an item's attention sums in another order than a prompt of its
        own, which rounding turns into 0.03 nats (SmolLM2-135M, bfloat16, a CPU). The list then
        shares its start by the prefix cache, with the bits of one by one.
        """
        info, requests = self._model.info, [answer.request for answer in self.answers]
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
        self._shared = find() if is_short else await self._state.off_loop(find)

    def start(self) -> None:
        """Hand the requests to the engine, all or none.

        Raises:
            QueueFullError, EngineDeadError: none was taken.
        """
        num_apart = len(self.answers) - sum(len(shared.members) for shared in self._shared)
        self._state.client.check_room(num_apart + len(self._shared))
        self.started_s = perf_counter()
        try:
            groups = [SharedAnswers(s, self._submit(s.carrier)) for s in self._shared]
            members = {stream.request: stream for group in groups for stream in group.streams}
            streams = [
                members.get(answer.request) or self._submit(answer.request)
                for answer in self.answers
            ]
        except TiercelError:
            self.close()
            raise
        loop = asyncio.get_running_loop()
        for group in groups:
            self._add_task(group.distribute())
        for answer, stream in zip(self.answers, streams, strict=True):
            if self._returns_progress:
                answer.meter = PromptMeter(stream)
                stream.on_progress = partial(self._put_progress, answer.index, answer.meter)
            self._add_task(self._read(answer, stream))
        limits = self._state.settings.limits
        self._timers.append(loop.call_later(limits.max_queue_seconds, self._check_queue))
        if limits.max_request_seconds is not None:
            self._timers.append(loop.call_later(limits.max_request_seconds, self._end_overdue))

    async def pieces(self) -> list[Piece]:
        """What has come since the last call, at least one piece; empty when all is said.

        Raises:
            TiercelError: what ended the generation early; nothing follows.
        """
        while not self._line and self._failure is None and self._num_open:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None and not self._line:
            raise self._failure
        return self._line.take()

    async def finished(self) -> list[Piece]:
        """Wait for the end; one whole piece per answer, by index.

        Raises:
            TiercelError: as `pieces`.
        """
        while self._failure is None and self._num_open:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure
        return sorted(self._line.take(), key=lambda piece: piece.index)

    def close(self) -> None:
        """Give back everything; safe in any state, and again."""
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            self._state.client.abort(stream.request)

    def report(self, line: RequestLog) -> None:
        """Close, count the request and fill in its line of the log; call once, at its end."""
        self.close()
        now = perf_counter()
        usage = self.usage()
        entered = [s.entered_s for s in self._streams if s.entered_s is not None]
        first = [a.first_token_s for a in self.answers if a.first_token_s is not None]
        last = [a.last_token_s for a in self.answers if a.last_token_s is not None]
        early_end = "abort" if self._failure is None else "error"
        reasons = tuple(answer.finish_reason or early_end for answer in self.answers)
        queue_s = min(entered) - self.started_s if entered else None
        self._state.metrics.count_finished(
            FinishedRequest(
                finish_reasons=reasons,
                num_prompt_tokens=usage.prompt,
                num_generation_tokens=tuple(answer.text.num_tokens for answer in self.answers),
                n=self._n,
                max_tokens=self.answers[0].request.max_tokens,
                total_s=now - self.started_s,
                queue_s=queue_s,
                prefill_s=min(first) - min(entered) if first and entered else None,
                decode_s=max(last) - min(first) if first else None,
            )
        )
        line.prompt_tokens, line.cached_tokens = usage.prompt, usage.cached
        line.completion_tokens = usage.completion
        line.queue_ms = None if queue_s is None else 1000 * queue_s
        line.ttft_ms = 1000 * (min(first) - self.started_s) if first else None
        line.finish_reason = reasons[0]
        if self._state.settings.logs_prompts:
            self._log_texts()

    def _log_texts(self) -> None:
        decode = self._model.tokenizer.decode
        for answer in self.answers:
            request = answer.request
            fields = {
                "prompt": decode(request.prompt_token_ids, skip_special_tokens=False),
                "answer": decode(answer.running.output_token_ids, skip_special_tokens=False),
            }
            _LOG.info("prompt and answer", extra={"fields": fields})

    def usage(self) -> Usage:
        """Tokens so far."""
        firsts = [answer.request for answer in self.answers[:: self._n]]
        return Usage(
            prompt=sum(len(request.prompt_token_ids) for request in firsts),
            completion=sum(answer.text.num_tokens for answer in self.answers),
            cached=sum(request.num_cached for request in firsts),
            reasoning=sum(answer.text.num_reasoning_tokens for answer in self.answers),
        )

    @property
    def num_prompt_logprobs(self) -> int:
        """Tokens of prompts whose log-probabilities have come."""
        return sum(len(answer.request.prompt_logprobs) for answer in self.answers)

    def _submit(self, request: Request) -> TokenStream:
        stream = self._state.client.submit(request)
        self._streams.append(stream)
        return stream

    def _add_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._on_done)
        self._tasks.append(task)

    async def _read(self, answer: Answer, stream: TokenStream) -> None:
        async for update in stream:
            if update.finish_reason in ("error", "abort"):
                raise ended_early(update)
            now = perf_counter()
            piece = answer.take(update)
            if answer.meter is not None:
                piece.progress = answer.meter.finish(now)
            self._observe(answer, len(piece.token_ids), now)
            self._line.put(piece)
            if self._is_stream:
                self._news.set()
            if answer.is_cut:
                await self._read(answer, self._go_on(answer))
                return
            if answer.finish_reason is not None:
                if answer.text.matched is not None:
                    self._state.client.stop(answer.running, answer.text.matched)
                self._num_open -= 1
                return
        raise InternalError("a stream of tokens ended without a reason.")

    def _put_progress(self, index: int, meter: PromptMeter, num_computed: int) -> None:
        progress = meter.advance(num_computed, perf_counter())
        if progress is not None:
            self._line.put(Piece(index, progress=progress))
            self._news.set()

    def _go_on(self, answer: Answer) -> TokenStream:
        """Ask for the rest of an answer whose thinking was closed; its blocks are still cached."""
        self._state.client.abort(answer.running)
        return self._submit(answer.ask_for_rest(self._model.inputs))

    def _observe(self, answer: Answer, num_new: int, now: float) -> None:
        if not num_new:
            return
        metrics = self._state.metrics
        if answer.last_token_s is None:
            answer.first_token_s = now
            metrics.observe_first_token(now - self.started_s)
        else:
            metrics.observe_tokens(num_new, now - answer.last_token_s)
        answer.last_token_s = now

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._fail(error)
        elif not self._num_open:
            self._news.set()  # also for who waits for the end alone

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._news.set()
            self.close()

    def _check_queue(self) -> None:
        # Later answers of a long list wait for the earlier ones, not for others' requests.
        if all(stream.entered_s is None for stream in self._streams):
            seconds = self._state.settings.limits.max_queue_seconds
            text = f"No place became free in {seconds:g} seconds."
            self._fail(overloaded("queue_timeout", text, 30))

    def _end_overdue(self) -> None:
        seconds = self._state.settings.limits.max_request_seconds
        text = f"The request took longer than {seconds:g} seconds."
        self._fail(overloaded("request_timeout", text, 1))


def _make_answer(
    model: ServedModel,
    wanted: GenerationRequest,
    prompt_index: int,
    stream: int,
    *,
    is_stream: bool,
) -> Answer:
    params = wanted.params
    if stream and params.prompt_logprobs is not None and not is_stream:
        params = replace(params, prompt_logprobs=None)  # the first answer reads the prompt for all
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
    text = AnswerText(request, model.tokenizer, wanted.make_parsers())
    return Answer(prompt_index * wanted.params.n + stream, request, text, wanted.thinking)
