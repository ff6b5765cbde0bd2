"""The one path by which every route scores: check, submit, wait, count.

A list of items is one request of the engine. Items that need separate prompts are submitted a few
at a time. When the client disconnects, the task that waits here is cancelled and the requests are
aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final, Protocol, TypeVar

from tiercel.errors import ArgumentError, InvalidRequestError
from tiercel.ipc.streams import TokenStream
from tiercel.request.request import Request
from tiercel.request.score_inputs import ScoreInputs, ScoreJob, Text
from tiercel.request.score_params import ScoreParams
from tiercel.request.score_task import skipped_tiles
from tiercel.serve.generation.admission import early_end_error
from tiercel.serve.http.errors import overload_error
from tiercel.serve.http.logs import RequestLog
from tiercel.serve.http.metrics import FinishedRequest
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState

Result = TypeVar("Result", covariant=True)
MAX_LOOP_CHARS: Final = 4 << 10  # longer lists are tokenized in a thread
MAX_CONCURRENT_REQUESTS: Final = 32  # of one list; other requests get their turn between them


async def make_job(
    state: ServerState,
    model: ServedModel,
    query: Text,
    items: str | Sequence[Text],
    params: ScoreParams,
) -> ScoreJob:
    """Check a list and make the engine's requests.

    Raises:
        InvalidRequestError, ArgumentError: see `ScoreInputs.job`; or the list is empty, or could
            never fit the cache.
    """
    if not items:
        raise ArgumentError("items is empty.", hint="Give at least one.", param="items")
    inputs = ScoreInputs(
        model.inputs,
        model.tokenizer,
        max_model_len=model.info.max_model_len,
        max_step_tokens=model.info.max_num_batched_tokens,
        max_num_seqs=model.info.max_num_seqs,
        packs_items=model.info.packs_items,
        limits=state.settings.limits,
    )
    if len(query) + sum(map(len, items)) <= MAX_LOOP_CHARS:
        job = inputs.job(query, items, params)
    else:
        job = await state.run_in_thread(inputs.job, query, items, params)
    check_capacity(model, job.requests, "query")
    return job


class Job(Protocol[Result]):
    """A job of `run_job`."""

    @property
    def requests(self) -> Sequence[Request]:
        """Requests to the engine."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the shared prompt, once, and of all items."""

    @property
    def num_items(self) -> int:
        """Number of items or questions."""

    def output(self) -> Result:
        """The result; all requests have ended."""


def check_capacity(model: ServedModel, requests: Sequence[Request], param: str) -> None:
    """Refuse prompts that could never run.

    Raises:
        InvalidRequestError: a prompt does not fit the cache.
    """
    longest = max((len(request.prompt_token_ids) for request in requests), default=0)
    if longest > model.info.capacity_tokens:
        raise InvalidRequestError(
            f"a prompt of {longest} tokens does not fit the cache of {model.info.capacity_tokens}.",
            hint="Shorten it.",
            param=param,
        )


async def run_job(state: ServerState, job: Job[Result], log: RequestLog) -> Result:
    """Run a job to its end; a cancelled job aborts its requests.

    Raises:
        QueueFullError, EngineDeadError, TiercelError: none was taken, or they ended early.
    """
    started_s = perf_counter()
    streams: list[TokenStream] = []
    has_ended = False
    try:
        for first in range(0, len(job.requests), MAX_CONCURRENT_REQUESTS):
            window = job.requests[first : first + MAX_CONCURRENT_REQUESTS]
            state.client.check_room(len(window))
            for request in window:
                request.request_id = log.request_id
            own = [state.client.submit(request) for request in window]
            streams += own
            with _time_limits(state, own, started_s):
                for stream in own:
                    await _read(stream)
        output = job.output()
        has_ended = True
    finally:
        for request in job.requests:
            state.client.abort(request)
        _report(state, job, log, streams, started_s, has_ended=has_ended)
    return output


async def _read(stream: TokenStream) -> None:
    async for update in stream:
        if update.finish_reason in ("error", "abort"):
            raise early_end_error(update)


@contextmanager
def _time_limits(
    state: ServerState, streams: Sequence[TokenStream], started_s: float
) -> Iterator[None]:
    """End streams that wait or run for longer than the limits."""
    limits, loop = state.settings.limits, asyncio.get_running_loop()

    def end_waiting() -> None:
        if all(stream.entered_s is None for stream in streams):
            text = f"The request waited longer than {limits.max_queue_seconds:g} seconds."
            for stream in streams:
                stream.push(overload_error("queue_timeout", text, 30))

    def end_overdue() -> None:
        text = f"The request took longer than {limits.max_request_seconds:g} seconds."
        for stream in streams:
            stream.push(overload_error("request_timeout", text, 1))

    timers = [loop.call_later(limits.max_queue_seconds, end_waiting)]
    if limits.max_request_seconds is not None:
        left = limits.max_request_seconds - (perf_counter() - started_s)
        timers.append(loop.call_later(max(0.0, left), end_overdue))
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _report(
    state: ServerState,
    job: Job[Any],
    log: RequestLog,
    streams: Sequence[TokenStream],
    started_s: float,
    *,
    has_ended: bool,
) -> None:
    entered = [stream.entered_s for stream in streams if stream.entered_s is not None]
    queue_s = min(entered) - started_s if entered else None
    reason = "length" if has_ended else "abort"
    state.metrics.count_finished(
        FinishedRequest(
            finish_reasons=(reason,),
            num_prompt_tokens=job.prompt_tokens,
            num_generation_tokens=(0,),
            n=1,
            max_tokens=0,
            total_s=perf_counter() - started_s,
            queue_s=queue_s,
            prefill_s=None,
            decode_s=None,
        )
    )
    if has_ended:
        tiles = (
            skipped_tiles(len(request.prompt_token_ids), [len(x) for x in request.score.items])
            for request in job.requests
            if request.score is not None and request.score.items
        )
        state.metrics.count_score_items(job.num_items, sum(tiles))
    log.prompt_tokens, log.completion_tokens = job.prompt_tokens, 0
    log.cached_tokens = _num_cached(job.requests)
    log.queue_ms = None if queue_s is None else 1000 * queue_s
    log.finish_reason = reason


def _num_cached(requests: Sequence[Request]) -> int:
    return sum(request.num_cached for request in requests)
