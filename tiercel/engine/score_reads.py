"""Reads the places that a `ScoreTask` asks for.

Only these rows reach the head, in slices, so that no more than one slice of logits exists. Where
labels are only compared among each other, only their rows of the head are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiercel.engine.copies import HostCopies
from tiercel.engine.plan import ScheduledRow
from tiercel.engine.prompt_reads import LOGITS_SLICE
from tiercel.engine.request import Request
from tiercel.engine.rows import to_device
from tiercel.engine.score import ScoreRead
from tiercel.models.decoder import Decoder

VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ScorePiece:
    """Some values of a request, (count,) float32, from the value number `first` on."""

    request: Request
    first: int
    values: Tensor

    def copied(self, copies: HostCopies) -> ScorePiece:
        """The same on its way to the host."""
        return ScorePiece(self.request, self.first, copies.add(self.values))

    def deliver(self) -> None:
        """Give it to the request; it has arrived on the host."""
        values = self.values.numpy().astype("<f4")
        # A step that was interrupted behind this point is repeated: its values replace these.
        kept = self.request.scores[: self.first * VALUE_BYTES]
        self.request.scores = kept + values.tobytes()
        self.request.is_unsound |= not bool(np.isfinite(values).all())


def read_scores(
    model: Decoder, part: ScheduledRow, hidden: Tensor, place: int, is_padding: Tensor
) -> list[ScorePiece]:
    """Read what a part of a step yields.

    Args:
        model: whose head and last norm to use.
        part: with scores.
        hidden: (T, hidden_size) of the step.
        place: where the part begins in it.
        is_padding: (vocab_size,) uint8, 1 for ids that are no tokens: they take no probability.
    """
    task = part.request.score
    assert task is not None, "only a task has scores"
    is_padding = is_padding.to(torch.bool)
    wanted = list(_places(part, place))
    first = task.num_values(part.items.start)
    pieces = []
    for start in range(0, len(wanted), LOGITS_SLICE):
        lines = wanted[start : start + LOGITS_SLICE]
        counts = [len(read.token_ids) for _, read in lines]
        own = np.repeat(np.arange(len(lines)), counts)
        ids = np.concatenate([read.token_ids for _, read in lines]).astype(np.int64)
        rows = np.array([line for line, _ in lines], np.int64)
        on_device = to_device(np.concatenate((own, ids, rows)), hidden.device)
        own_there, ids_there, rows_there = on_device.split((len(own), len(ids), len(rows)))
        if task.is_relative:
            count = len(lines[0][1].token_ids)
            values = model.token_logits(hidden, rows_there.int(), ids_there[:count]).flatten()
        else:
            logits = model.logits(hidden, rows_there.int())
            picked = logits[own_there, ids_there]
            total = logits.masked_fill_(is_padding, float("-inf")).logsumexp(dim=1)
            values = picked - total.index_select(0, own_there)
        pieces.append(ScorePiece(part.request, first, values))
        first += len(ids)
    return pieces


def _places(part: ScheduledRow, place: int) -> Iterator[tuple[int, ScoreRead]]:
    """Token places of the step to read, and what to read there."""
    task = part.request.score
    assert task is not None, "only a task has scores"
    last = place + part.num_query - 1
    if not task.items:
        for read in task.reads[0]:
            yield last - read.back, read
    for number in part.items:
        last += len(task.items[number])
        for read in task.reads[number % len(task.reads)]:
            yield last - read.back, read
