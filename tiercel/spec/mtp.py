"""Drafts from a head of the model that predicts the token after next.

At place p the head takes the model's hidden state there and the token at p + 1, and has keys and
values of its own for p. So behind each step it follows all the step's places whose next token is
known by then: those of accepted drafts, and whole chunks of prompts, the last place included, since
its next token has just been drawn. What stands behind them in its cache is written again, like that
of the model. Further drafts come from the head's own states, a place further each.

Drafts of rows that draw use the noise with which the row will draw at the same place: then most of
what the head is sure of is right, and no probabilities need to be kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.models.model import DraftHead
from tiercel.ops.sample_tokens import SampleRows, sample_tokens
from tiercel.spec.texts import DraftTexts, StepStates

# Builds the batch of one position of each row, from rows, the tokens that follow, positions, and
# the positions up to which each row may write; `make_draft_batch` of the runner does.
MakeDraftBatch = Callable[[Tensor, Tensor, Tensor, Tensor], Batch]


class MtpProposer:
    """Drafts up to `count` tokens with a model's head."""

    reads_states = True

    def __init__(
        self,
        texts: DraftTexts,
        head: DraftHead,
        is_banned: Tensor,
        count: int,
        make_batch: MakeDraftBatch,
    ) -> None:
        self._texts = texts
        self._head = head
        self._is_banned = is_banned
        self._count = count
        self._make_batch = make_batch
        # Where each row's next draft will stand: drafts are drawn like tokens behind its text.
        self._places = torch.zeros_like(texts.sampling.num_tokens)

    def enter(self, rows: list[int], longest: int) -> None:
        """Nothing to note."""

    def follow(self, states: StepStates) -> None:
        """Pass the places of a step through the head."""
        self._follow(states)

    def propose(self, rows: Tensor, states: StepStates | None) -> None:
        """Follow the step and draft."""
        assert states is not None, "the head needs them"
        texts, text = self._texts, self._texts.sampling
        hidden = self._follow(states)
        # The last place that was followed: it has the last token but one.
        last = text.num_tokens.index_select(0, rows) - 2
        first = _pick(states.batch.cu_seqlens_q[:-1], states.drawn)
        line = first + last - states.batch.positions.index_select(0, first)
        h = hidden.index_select(0, line.clamp(0, len(hidden) - 1))
        self._places.copy_(text.num_tokens)
        drawing = SampleRows(text.token_ids, self._places, text.temperature, text.key)
        places = rows.long()
        # Blocks are reserved for the drafts of rows that draft, up to the end of their answers.
        end = torch.where(texts.drafts.draft_limit > 0, texts.num_prompt + texts.max_new, 0)
        end = end.index_select(0, rows)
        for number in range(1, self._count + 1):
            logits = self._head.logits(h)
            ids, _ = sample_tokens(logits, rows, drawing, self._is_banned)
            texts.drafts.draft_ids[:, number].index_copy_(0, places, ids)
            if number < self._count:
                last = last + 1
                batch = self._make_batch(rows, ids, last, end)
                h = self._head.forward(batch, h)
        wanted = texts.drafts.num_wanted.index_select(0, rows).clamp(max=self._count)
        left = texts.num_prompt + texts.max_new - text.num_tokens - 1
        counts = torch.minimum(wanted, left.index_select(0, rows)).clamp_(min=0)
        texts.drafts.draft_ids[:, 0].index_copy_(0, places, counts)

    def _follow(self, states: StepStates) -> Tensor:
        """States of the head at the places of a step; where no token follows yet, anything."""
        batch, text = states.batch, self._texts.sampling
        if states.width is not None:
            rows = batch.rows.repeat_interleave(states.width)
        else:
            numbers = np.repeat(np.arange(batch.num_reqs), batch.query_lens)
            rows = batch.rows.index_select(0, _on_device(numbers, batch.rows.device))
        following = batch.positions + 1
        is_known = following < text.num_tokens.index_select(0, rows)
        column = following.clamp(max=text.token_ids.shape[1] - 1)
        ids = torch.where(is_known, text.token_ids[rows.long(), column.long()], 0)
        slots = torch.where(is_known, batch.slot_mapping, -1)
        return self._head.forward(replace(batch, input_ids=ids, slot_mapping=slots), states.hidden)


def _pick(starts: Tensor, drawn: tuple[int, ...] | None) -> Tensor:
    if drawn is None:
        return starts
    return starts.index_select(0, _on_device(np.array(drawn, np.int64), starts.device))


def _on_device(values: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
