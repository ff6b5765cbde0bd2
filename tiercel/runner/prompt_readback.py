"""What is asked of a prompt's own places: logits, log-probabilities, a pooled vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiercel.models.model import Model
from tiercel.request.request import Request
from tiercel.runner.host_copies import HostCopies
from tiercel.runner.row_state import to_device
from tiercel.runner.sampler_output import TopLogprobs, top_logprobs
from tiercel.scheduler.plan import ScheduledRow

# Rows of logits computed at once where prompt places are read: 50 MB each at 49,152 tokens of
# vocabulary.
LOGITS_SLICE = 256


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """What was read of some prompt places of a request.

    `read` is logits (places, vocab_size), log-probabilities, or the sum of hidden states
    (hidden_size,) to pool.
    """

    request: Request
    read: Tensor | TopLogprobs

    def copied(self, copies: HostCopies) -> PromptPiece:
        """The same on its way to the host."""
        if isinstance(self.read, Tensor):
            return PromptPiece(self.request, copies.add(self.read))
        return PromptPiece(self.request, self.read.copied(copies))

    def deliver(self) -> None:
        """Give it to the request; it has arrived on the host."""
        request = self.request
        if not isinstance(self.read, Tensor):
            counts = [request.params.prompt_logprobs or 0] * len(self.read.token_ids)
            request.prompt_logprobs += self.read.entries(counts)
        elif request.pooling is None:
            request.prompt_logits.append(self.read.numpy())
        elif request.embedding is None:
            request.embedding = self.read.numpy()
        else:
            request.embedding = self.read.numpy() + request.embedding


def read_prompt(model: Model, part: ScheduledRow, hidden: Tensor, place: int) -> list[PromptPiece]:
    """Read the prompt places of a chunk.

    Args:
        model: whose head and last norm to use.
        part: the chunk.
        hidden: (T, hidden_size) of the step.
        place: where the chunk begins in it.
    """
    request = part.request
    last = min(part.start + part.num_query, len(request.prompt_token_ids))
    if request.pooling is not None:
        return _pool(model, part, hidden, place)
    pieces = []
    for start in range(part.start, last, LOGITS_SLICE):
        stop = min(start + LOGITS_SLICE, last)
        logits = model.logits(hidden, _lines(hidden, place, start - part.start, stop - part.start))
        if request.wants_logits:
            pieces.append(PromptPiece(request, logits))
            continue
        following = request.prompt_token_ids[start + 1 : stop + 1]  # none after the last place
        token_ids = to_device(np.array(following, np.int32), hidden.device)
        most = request.params.prompt_logprobs or 0
        pieces.append(PromptPiece(request, top_logprobs(logits[: len(following)], token_ids, most)))
    return pieces


def _lines(hidden: Tensor, place: int, start: int, stop: int) -> Tensor:
    return torch.arange(place + start, place + stop, device=hidden.device, dtype=torch.int32)


def _pool(model: Model, part: ScheduledRow, hidden: Tensor, place: int) -> list[PromptPiece]:
    request = part.request
    if request.pooling == "mean":
        states = model.hidden_states(hidden, _lines(hidden, place, 0, part.num_query))
        return [PromptPiece(request, states.sum(dim=0))]
    if not part.samples:
        return []
    line = _lines(hidden, place, part.num_query - 1, part.num_query)
    return [PromptPiece(request, model.hidden_states(hidden, line)[0])]
