"""Reads a prompt's own positions: logits, log-probabilities, a pooled vector."""

from __future__ import annotations

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from tiercel.models.model import Model
from tiercel.request.request import Request
from tiercel.runner.host_copies import HostCopies
from tiercel.runner.row_state import to_device
from tiercel.runner.sampler_output import TopLogprobs, top_logprobs
from tiercel.scheduler.plan import ScheduledRow

# Logits rows computed together where prompt positions are read: 50 MB at 49,152 tokens of
# vocabulary.
LOGITS_SLICE = 256


class PromptReadback(Struct, frozen=True):
    """Values that were read at some prompt positions of a request.

    Attributes:
        request: the request.
        values: logits (positions, vocab_size), log-probabilities, or the sum of hidden states
            (hidden_size,) to pool.
    """

    request: Request
    values: Tensor | TopLogprobs

    def to_host(self, copies: HostCopies) -> PromptReadback:
        """The same values on the host, once `copies` have been waited for."""
        if isinstance(self.values, Tensor):
            return PromptReadback(self.request, copies.add(self.values))
        return PromptReadback(self.request, self.values.to_host(copies))

    def deliver(self) -> None:
        """Give the values, which have arrived on the host, to the request."""
        request = self.request
        if not isinstance(self.values, Tensor):
            counts = [request.params.prompt_logprobs or 0] * len(self.values.token_ids)
            request.prompt_logprobs += self.values.entries(counts)
        elif request.pooling is None:
            request.prompt_logits.append(self.values.numpy())
        elif request.embedding is None:
            request.embedding = self.values.numpy()
        else:
            request.embedding = self.values.numpy() + request.embedding


def read_prompt(
    model: Model, part: ScheduledRow, hidden: Tensor, start: int
) -> list[PromptReadback]:
    """Read the prompt positions of a chunk.

    Args:
        model: model whose head and last norm to use.
        part: the chunk.
        hidden: (T, hidden_size) of the step.
        start: the chunk's first row in `hidden`.
    """
    request = part.request
    last = min(part.start + part.num_query, len(request.prompt_token_ids))
    if request.pooling is not None:
        return _pool(model, part, hidden, start)
    readbacks = []
    for first in range(part.start, last, LOGITS_SLICE):
        stop = min(first + LOGITS_SLICE, last)
        rows = _row_range(hidden, start, first - part.start, stop - part.start)
        logits = model.logits(hidden, rows)
        if request.wants_logits:
            readbacks.append(PromptReadback(request, logits))
            continue
        following = request.prompt_token_ids[first + 1 : stop + 1]  # none after the last position
        token_ids = to_device(np.array(following, np.int32), hidden.device)
        most = request.params.prompt_logprobs or 0
        logprobs = top_logprobs(logits[: len(following)], token_ids, most)
        readbacks.append(PromptReadback(request, logprobs))
    return readbacks


def _row_range(hidden: Tensor, start: int, first: int, stop: int) -> Tensor:
    """Row numbers of `hidden`, [first, stop) of the chunk that begins at `start`."""
    return torch.arange(start + first, start + stop, device=hidden.device, dtype=torch.int32)


def _pool(model: Model, part: ScheduledRow, hidden: Tensor, start: int) -> list[PromptReadback]:
    request = part.request
    if request.pooling == "mean":
        states = model.hidden_states(hidden, _row_range(hidden, start, 0, part.num_query))
        return [PromptReadback(request, states.sum(dim=0))]
    if not part.samples:
        return []
    last = _row_range(hidden, start, part.num_query - 1, part.num_query)
    return [PromptReadback(request, model.hidden_states(hidden, last)[0])]
