"""The stream of updates of one request to its reader.

The engine runs ahead of its reader. So a stream changes the reader's `Request` when an update is
read, not when it arrives: text, log-probabilities and reasons of the request always belong to the
updates read so far, and tokens generated after a stop string never show.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercel.errors import TiercelError
from tiercel.request.request import Request, Status, TokenLogprobs, TokenUpdate

ANSWER_TOKENS: Final = 256
"""Tokens that an answer counts for before it is known how long it becomes, at most."""


class TokenStream:
    """An asynchronous iterator over the updates of one request, for one reader.

    It ends after the update with a finish reason, or immediately when its request is stopped; it
    raises the `TiercelError` that ended its request.

    Attributes:
        request: the reader's request; see the module.
        submitted_s: `perf_counter` when it was submitted.
        entered_s: `perf_counter` when its first step began; None while it waits.
        num_computed: tokens of its input that are computed.
        on_progress: callback with the number of prompt tokens computed, while the prompt is not
            finished.
    """

    def __init__(self, request: Request, submitted_s: float) -> None:
        self.request = request
        self.submitted_s = submitted_s
        self.entered_s: float | None = None
        self.num_computed = 0
        self._num_input = request.num_input_tokens
        self._num_answer = min(ANSWER_TOKENS, request.max_tokens)
        self.on_progress: Callable[[int], None] | None = None
        self._ready: deque[TokenUpdate | TiercelError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenUpdate:
        request = self.request
        while not self._ready and request.status is not Status.FINISHED:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if request.status is Status.FINISHED:
            raise StopAsyncIteration
        item = self._ready.popleft()
        if isinstance(item, TiercelError):
            request.status = Status.FINISHED
            request.finish_reason, request.stop_reason = "error", item.code
            raise item
        request.status = Status.RUNNING if item.finish_reason is None else Status.FINISHED
        request.output_token_ids += item.new_token_ids
        request.logprobs += item.logprobs
        request.finish_reason, request.stop_reason = item.finish_reason, item.stop_reason
        return item

    def enter(self, started_s: float, num_cached: int) -> None:
        """Note that the request has left the queue."""
        self.entered_s = started_s
        self.request.num_cached = self.num_computed = num_cached

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that are still to be computed, as far as is known: input, and answer."""
        answer = self._num_answer - len(self.request.output_token_ids)
        return self._num_input - self.num_computed + (answer if answer > 1 else 1)

    def advance(self, num_computed: int) -> None:
        """Report how many tokens of the prompt are computed."""
        self.num_computed = num_computed
        if self.on_progress is not None:
            self.on_progress(num_computed)

    def add_prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        """Add log-probabilities of the prompt; they come before the first update."""
        self.request.prompt_logprobs += entries

    def set_embedding(self, embedding: npt.NDArray[np.float32]) -> None:
        """Set the vector of a request with `pooling`; it comes before the only update."""
        self.request.embedding = embedding

    def set_scores(self, scores: npt.NDArray[np.float32]) -> None:
        """Set the values of a request with `score`; they come before the only update."""
        self.request.scores = scores

    def set_item_tokens(self, entries: Sequence[TokenLogprobs]) -> None:
        """Set the tokens sampled after items; they come before the only update."""
        self.request.item_tokens = list(entries)

    def push(self, item: TokenUpdate | TiercelError) -> None:
        """Hand an update, or the error that ends the request, to the reader.

        A step may yield several tokens. The reader gets one after the other, as from as many steps,
        so that it may stop between any two.
        """
        self.num_computed = self._num_input
        if isinstance(item, TokenUpdate) and len(item.new_token_ids) > 1:
            self._ready.extend(_one_by_one(item))
        else:
            self._ready.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _one_by_one(update: TokenUpdate) -> Iterator[TokenUpdate]:
    last = len(update.new_token_ids) - 1
    for i, token_id in enumerate(update.new_token_ids):
        logprobs = update.logprobs[i : i + 1]
        if i < last:
            yield TokenUpdate((token_id,), logprobs, None, None)
        else:
            yield TokenUpdate((token_id,), logprobs, update.finish_reason, update.stop_reason)


def stop(request: Request, stop_string: str) -> None:
    """End the reader's request at a stop string; updates still under way are dropped."""
    # Its last token may have ended it too: the string decides, because the text is cut there.
    request.status = Status.FINISHED
    request.finish_reason, request.stop_reason = "stop", stop_string
