"""Drafts from a head of the model that predicts the token after next (multi-token prediction).

At position p the head takes the model's state there and the token at p + 1, and it has keys and
values of its own for p. So after each step its cache is updated at all positions of the step whose
next token is known by then: those of accepted drafts, and whole chunks of prompts, the last
position included, since its next token has just been sampled. Later positions of its cache are
written again, like those of the model. Further drafts come from the head's own states, each one
position further.

Drafts of rows that sample use the noise with which the row will sample at the same position. Then
most drafts that the head is sure of are right, and no probabilities need to be kept.
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
from tiercel.ops.sample_tokens import sample_tokens
from tiercel.spec.drafter_state import DrafterState, ForwardOutput

# Builds the batch of one position of each row, from rows, the tokens that follow, positions, and
# the positions up to which each row may write; `make_draft_batch` of the runner does.
MakeDraftBatch = Callable[[Tensor, Tensor, Tensor, Tensor], Batch]


class MtpProposer:
    """Drafts up to `count` tokens with a model's head."""

    reads_output = True

    def __init__(
        self,
        state: DrafterState,
        head: DraftHead,
        is_banned: Tensor,
        count: int,
        make_batch: MakeDraftBatch,
    ) -> None:
        self._state = state
        self._head = head
        self._is_banned = is_banned
        self._count = count
        self._make_batch = make_batch
        # The position of each row's next draft: drafts are sampled like tokens after its text.
        self._positions = torch.zeros_like(state.sampling.num_tokens)

    def enter(self, rows: list[int], longest: int) -> None:
        """Do nothing: the head keeps nothing of a row but its cache."""

    def update_cache(self, output: ForwardOutput) -> None:
        """Pass the positions of a step through the head."""
        self._update_cache(output)

    def propose(self, rows: Tensor, output: ForwardOutput | None) -> None:
        """Update the head's cache by the step, and draft."""
        assert output is not None, "the head reads it"
        state, sampling = self._state, self._state.sampling
        hidden = self._update_cache(output)
        # The last position in the head's cache: that of the last token but one.
        last = sampling.num_tokens.index_select(0, rows) - 2
        first = _pick(output.batch.cu_seqlens_q[:-1], output.sampled)
        index = first + last - output.batch.positions.index_select(0, first)
        h = hidden.index_select(0, index.clamp(0, len(hidden) - 1))
        self._positions.copy_(sampling.num_tokens)
        sample_rows = replace(sampling, num_tokens=self._positions)
        row_index = rows.long()
        # Blocks are reserved for the drafts of rows that draft, up to the end of their answers.
        end = torch.where(state.drafts.draft_limit > 0, state.num_prompt + state.max_new, 0)
        end = end.index_select(0, rows)
        for number in range(1, self._count + 1):
            logits = self._head.logits(h)
            ids, _ = sample_tokens(logits, rows, sample_rows, self._is_banned)
            state.drafts.draft_ids[:, number].index_copy_(0, row_index, ids)
            if number < self._count:
                last = last + 1
                batch = self._make_batch(rows, ids, last, end)
                h = self._head.forward(batch, h)
        wanted = state.drafts.num_wanted.index_select(0, rows).clamp(max=self._count)
        left = state.num_prompt + state.max_new - sampling.num_tokens - 1
        counts = torch.minimum(wanted, left.index_select(0, rows)).clamp_(min=0)
        state.drafts.draft_ids[:, 0].index_copy_(0, row_index, counts)

    def _update_cache(self, output: ForwardOutput) -> Tensor:
        """The head's states at the positions of a step; undefined where no token follows yet."""
        batch, sampling = output.batch, self._state.sampling
        if output.width is not None:
            rows = batch.rows.repeat_interleave(output.width)
        else:
            numbers = np.repeat(np.arange(batch.num_reqs), batch.query_lens)
            rows = batch.rows.index_select(0, _on_device(numbers, batch.rows.device))
        following = batch.positions + 1
        is_known = following < sampling.num_tokens.index_select(0, rows)
        column = following.clamp(max=sampling.token_ids.shape[1] - 1)
        ids = torch.where(is_known, sampling.token_ids[rows.long(), column.long()], 0)
        slots = torch.where(is_known, batch.slot_mapping, -1)
        return self._head.forward(replace(batch, input_ids=ids, slot_mapping=slots), output.hidden)


def _pick(starts: Tensor, sampled: tuple[int, ...] | None) -> Tensor:
    if sampled is None:
        return starts
    return starts.index_select(0, _on_device(np.array(sampled, np.int64), starts.device))


def _on_device(values: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
