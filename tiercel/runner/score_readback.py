"""Reads the positions that a `ScoreTask` names.

Only the hidden states of these positions reach the head, in slices, so that no more than one slice
of logits exists. Where labels are only compared among each other, only their rows of the head are
multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from tiercel.models.model import Model
from tiercel.request.request import Request
from tiercel.request.score_task import ScoreRead
from tiercel.runner.host_copies import HostCopies
from tiercel.runner.prompt_readback import LOGITS_SLICE
from tiercel.runner.row_state import to_device
from tiercel.runner.sampler import Sampler
from tiercel.runner.sampler_output import TopLogprobs, top_logprobs
from tiercel.scheduler.plan import ScheduledRow

# Logits rows sampled together: their noise takes twice their memory, in 64 bits.
ITEMS_SLICE = 64


class ScoreReadback(Struct, frozen=True):
    """Scores of a request, (count,) float32, from the value number `first` on."""

    request: Request
    first: int
    values: Tensor

    def to_host(self, copies: HostCopies) -> ScoreReadback:
        """The same values on the host, once `copies` have been waited for."""
        return ScoreReadback(self.request, self.first, copies.add(self.values))

    def deliver(self) -> None:
        """Give the values, which have arrived on the host, to the request."""
        values = self.values.numpy()
        # A step that was interrupted after this point is repeated: its values replace these.
        kept = self.request.scores[: self.first]
        self.request.scores = np.concatenate((kept, values))
        self.request.is_unsound |= not bool(np.isfinite(values).all())


class ItemTokensReadback(Struct, frozen=True):
    """The next tokens after some items of a request, from the item number `first` on.

    Attributes:
        request: the request.
        first: number of the first of these items.
        problems: (count,) uint8, problems of `ops/sample_tokens.py`.
        tokens: the sampled tokens with their log-probabilities.
    """

    request: Request
    first: int
    problems: Tensor
    tokens: TopLogprobs

    def to_host(self, copies: HostCopies) -> ItemTokensReadback:
        """The same values on the host, once `copies` have been waited for."""
        tokens = self.tokens.to_host(copies)
        return ItemTokensReadback(self.request, self.first, copies.add(self.problems), tokens)

    def deliver(self) -> None:
        """Give the tokens, which have arrived on the host, to the request."""
        counts = [self.request.params.logprobs or 0] * len(self.problems)
        # A step that was interrupted after this point is repeated: its tokens replace these.
        self.request.item_tokens[self.first :] = self.tokens.entries(counts)
        self.request.is_unsound |= bool(self.problems.any())


def read_scores(
    model: Model, part: ScheduledRow, hidden: Tensor, start: int, is_padding: Tensor
) -> list[ScoreReadback]:
    """Read the scores that a request's part of a step yields.

    Args:
        model: model whose head and last norm to use.
        part: part of the step, with scores.
        hidden: (T, hidden_size) of the step.
        start: the part's first row in `hidden`.
        is_padding: (vocab_size,) uint8, 1 for ids that are no tokens: they take no probability.
    """
    task = part.request.score
    assert task is not None, "only a task has scores"
    is_padding = is_padding.to(torch.bool)
    wanted = list(_rows_and_reads(part, start))
    first = task.num_values(part.items.start)
    readbacks = []
    for begin in range(0, len(wanted), LOGITS_SLICE):
        pairs = wanted[begin : begin + LOGITS_SLICE]
        counts = [len(read.token_ids) for _, read in pairs]
        own = np.repeat(np.arange(len(pairs)), counts)
        ids = np.concatenate([read.token_ids for _, read in pairs]).astype(np.int64)
        rows = np.array([row for row, _ in pairs], np.int64)
        on_device = to_device(np.concatenate((own, ids, rows)), hidden.device)
        own_there, ids_there, rows_there = on_device.split((len(own), len(ids), len(rows)))
        if task.is_relative:
            count = len(pairs[0][1].token_ids)
            values = model.token_logits(hidden, rows_there.int(), ids_there[:count]).flatten()
        else:
            logits = model.logits(hidden, rows_there.int())
            picked = logits[own_there, ids_there]
            total = logits.masked_fill_(is_padding, float("-inf")).logsumexp(dim=1)
            values = picked - total.index_select(0, own_there)
        readbacks.append(ScoreReadback(part.request, first, values))
        first += len(ids)
    return readbacks


def read_item_tokens(
    model: Model, part: ScheduledRow, hidden: Tensor, start: int, sampler: Sampler
) -> list[ItemTokensReadback]:
    """Sample the next token after each item of a request's part of a step.

    Args:
        model: model whose head and last norm to use.
        part: part of the step, with items of a task with `sample_keys`.
        hidden: (T, hidden_size) of the step.
        start: the part's first row in `hidden`.
        sampler: sampler of the engine.
    """
    request, task = part.request, part.request.score
    assert task is not None, "only a task has items"
    assert task.sample_keys is not None, "the caller has looked"
    lengths = np.array([len(task.items[number]) for number in part.items], np.int64)
    rows = start + part.num_query - 1 + np.cumsum(lengths)
    positions = len(request.prompt_token_ids) + lengths
    keys = np.array(task.sample_keys[part.items.start : part.items.stop], np.int64)
    readbacks = []
    for begin in range(0, len(rows), ITEMS_SLICE):
        own = slice(begin, begin + ITEMS_SLICE)
        count = len(rows[own])
        on_device = to_device(np.concatenate((rows[own], positions[own], keys[own])), hidden.device)
        rows_there, positions_there, keys_there = on_device.split(count)
        logits = model.logits(hidden, rows_there.int())
        token_ids, problems = sampler.sample(
            logits, request.params, keys_there, positions_there.int()
        )
        tokens = top_logprobs(logits, token_ids, request.params.logprobs or 0)
        readbacks.append(ItemTokensReadback(request, part.items.start + begin, problems, tokens))
    return readbacks


def _rows_and_reads(part: ScheduledRow, start: int) -> Iterator[tuple[int, ScoreRead]]:
    """Rows of the step's hidden states to read, and what to read of each."""
    task = part.request.score
    assert task is not None, "only a task has scores"
    last = start + part.num_query - 1
    if not task.items:
        for read in task.reads[0]:
            yield last - read.back, read
    for number in part.items:
        last += len(task.items[number])
        for read in task.reads[number % len(task.reads)]:
            yield last - read.back, read
