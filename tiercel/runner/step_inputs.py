"""Builds the `Batch` of every step: here alone rows and lengths become a model's input.

    BatchBuilder        plain, verify, packed and scratch steps, eager or while a graph is recorded
    PaddedInputs        steps with prompts, padded to a size, at addresses that graphs read
    make_draft_batch    the next position of each row, for a head that drafts
    make_timing_batch   equal requests at the end of long contexts, for profiling

Token ids, positions, slots and lengths come from the device's rows (`ops/prepare_step.py`); items
to score come from the host (`packed_items.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from tiercel.batch import Batch, BatchLengths, PackedItems
from tiercel.ops.prepare_step import SlotLayout, StepDrafts, entry_slots, prepare_step
from tiercel.runner.packed_items import PackedStep
from tiercel.runner.row_state import Rows, to_device

MAX_PADDED_REQS: Final = 257  # requests of a padded step, with the padding


class Shares(Struct, frozen=True):
    """What each of several ranks with rows of their own brings to a pass over all layers.

    Attributes:
        tokens: of each rank, at most.
        rows: of each rank that go on to draft.
        width: positions of each row, where a pass over answers is padded.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    width: int = 1


class BatchBuilder:
    """Builds batches over the rows of one engine.

    Attributes:
        shares: what ranks bring to the next passes; None: all the same as this one.
    """

    def __init__(self, rows: Rows, layout: SlotLayout, num_ranks: int = 1) -> None:
        """Set up.

        Args:
            rows: of this rank.
            layout: of the cache groups.
            num_ranks: ranks that have rows of their own.
        """
        self.shares: Shares | None = None
        self._rows = rows
        self._layout = layout
        self._num_ranks = num_ranks

    def most_rows(self, count: int) -> int:
        """The rows to which all ranks pad a pass over answers of `count` rows of this rank."""
        return count if self.shares is None else max(self.shares.rows)

    def draft_batch(
        self, max_seq_len: int, rows: Tensor, token_ids: Tensor, positions: Tensor, ends: Tensor
    ) -> Batch:
        """One position of each row, see `make_draft_batch`, on all ranks."""
        tables = self._rows.block_tables
        batch = make_draft_batch(
            tables, self._layout, max_seq_len, rows, token_ids, positions, ends
        )
        if self._num_ranks == 1:
            return batch
        counts = (batch.num_tokens,) * self._num_ranks if self.shares is None else self.shares.rows
        return replace(batch, rank_tokens=counts)

    def _rank_tokens(self, total: int) -> tuple[int, ...]:
        if self._num_ranks == 1:
            return ()
        return (total,) * self._num_ranks if self.shares is None else self.shares.tokens

    def build(
        self,
        rows: Tensor,
        starts: Tensor,
        logits_rows: Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int] | None,
        *,
        drafts: StepDrafts | None = None,
        packed: PackedStep | None = None,
        max_seq_len: int | None = None,
    ) -> Batch:
        """Enqueue what makes the inputs of a step.

        Args:
            rows: (R,) int32, the engine row of each request.
            starts: (R + 1,) int32, `cu_seqlens_q` of all tokens, items too.
            logits_rows: (L,) int32.
            query_lens: new tokens of each request.
            context_lens: its length with them, or a bound; None reads it back, on a CPU.
            drafts: of rows that verify some.
            packed: items of the step.
            max_seq_len: bound of the lengths; None for the largest of `context_lens`.
        """
        state, total = self._rows, sum(query_lens)
        inputs = prepare_step(
            state.token_ids,
            state.num_computed,
            state.block_tables,
            rows,
            starts if packed is None else to_device(packed.cached_starts, state.device),
            total if packed is None else int(packed.cached_starts[-1]),
            self._layout,
            drafts,
        )
        if packed is not None:
            inputs = packed.merged(inputs)
        if context_lens is None:
            context_lens = inputs.seq_lens.tolist()
        return Batch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            cu_seqlens_q=starts,
            seq_lens=inputs.seq_lens,
            rows=rows,
            logits_rows=logits_rows,
            slot_mapping=inputs.slot_mapping,
            block_tables=state.block_tables,
            query_lens=tuple(query_lens),
            context_lens=tuple(context_lens),
            num_tokens=total,
            num_reqs=len(query_lens),
            max_query_len=max(query_lens),
            max_seq_len=max(context_lens) if max_seq_len is None else max_seq_len,
            items=None if packed is None else packed.items,
            rank_tokens=self._rank_tokens(total),
        )


class PaddedInputs:
    """Inputs of steps with prompts at fixed addresses: each size reads the beginning of them."""

    def __init__(self, rows: Rows, max_tokens: int, max_seq_len: int) -> None:
        """Allocate inputs of scratch tokens.

        Args:
            rows: of the engine.
            max_tokens: of the largest size.
            max_seq_len: of any step.
        """

        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=rows.device)

        num_groups = len(rows.block_tables)
        self._inputs = Batch(
            input_ids=zeros(max_tokens),
            positions=zeros(max_tokens),
            # Only models without plans read lengths.
            cu_seqlens_q=zeros(MAX_PADDED_REQS + 1),
            seq_lens=zeros(MAX_PADDED_REQS),
            rows=zeros(MAX_PADDED_REQS).fill_(rows.scratch),
            logits_rows=zeros(0),
            slot_mapping=torch.full(
                (num_groups, max_tokens), -1, dtype=torch.int64, device=rows.device
            ),
            block_tables=rows.block_tables,
            query_lens=(),
            context_lens=(),
            num_tokens=0,
            num_reqs=0,
            max_query_len=0,
            max_seq_len=max_seq_len,
        )

    def write(self, batch: Batch, size: int) -> None:
        """Copy a step's inputs to these addresses.

        Old ids, positions and rows may remain after them: they are valid, and the results of those
        tokens are unused.
        """
        inputs, count = self._inputs, batch.num_tokens
        inputs.input_ids[:count].copy_(batch.input_ids)
        inputs.positions[:count].copy_(batch.positions)
        inputs.rows[: batch.num_reqs].copy_(batch.rows)
        inputs.slot_mapping[:, :count].copy_(batch.slot_mapping)
        inputs.slot_mapping[:, count:size].fill_(-1)

    def write_lengths(self, batch: Batch, size: int) -> None:
        """Copy a step's lengths too, for models without plans.

        The padding is one more request, of length 0; requests after it are empty.
        """
        inputs, num_reqs = self._inputs, batch.num_reqs
        inputs.cu_seqlens_q[: num_reqs + 1].copy_(batch.cu_seqlens_q)
        inputs.cu_seqlens_q[num_reqs + 1 :].fill_(size)
        inputs.seq_lens[:num_reqs].copy_(batch.seq_lens)
        inputs.seq_lens[num_reqs:].fill_(0)

    def clear_lengths(self, size: int) -> None:
        """Give all tokens of a size to its first request, before anything was written."""
        self._inputs.cu_seqlens_q[1:].fill_(size)

    def batch(self, size: int, plans: Mapping[Hashable, object]) -> Batch:
        """The batch of a size: its inputs, under bounds that hold for any step.

        `query_lens` are such as a step could have, and no bounds: models without plans read the
        true lengths on the device.

        plans: attention metadata; the true lengths are in it.
        """
        inputs, num_reqs = self._inputs, max_padded_reqs(size)
        lengths = (*(1,) * (num_reqs - 1), size - num_reqs + 1)
        starts = np.concatenate([np.arange(1, length + 1, dtype=np.int32) for length in lengths])
        # The padding of a size may be longer than any request.
        longest = max(inputs.max_seq_len, *lengths)
        return replace(
            inputs,
            input_ids=inputs.input_ids[:size],
            positions=inputs.positions[:size],
            cu_seqlens_q=inputs.cu_seqlens_q[: num_reqs + 1],
            seq_lens=inputs.seq_lens[:num_reqs],
            rows=inputs.rows[:num_reqs],
            slot_mapping=inputs.slot_mapping[:, :size],
            query_lens=lengths,
            context_lens=(longest,) * num_reqs,
            num_tokens=size,
            num_reqs=num_reqs,
            max_query_len=size,
            max_seq_len=longest,
            items=PackedItems((0,) * num_reqs, torch.from_numpy(starts)),
            plans=plans,
        )


def max_padded_reqs(size: int) -> int:
    """Requests of a padded size at most, with the padding: each has a token."""
    return min(size, MAX_PADDED_REQS)


def padded_lengths(
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    items: PackedItems | None,
    size: int,
) -> BatchLengths:
    """New tokens, lengths and items of a step, with a request for what is missing to `size`.

    The tokens of that request see nothing: each would begin after itself, and there is no prefix.
    """
    count = sum(query_lens)
    if items is None:
        items = PackedItems(context_lens, torch.zeros(count, dtype=torch.int32))
    missing = size - count
    if not missing:
        return BatchLengths(query_lens, context_lens, items)
    blind = torch.arange(1, missing + 1, dtype=torch.int32)
    padded = PackedItems((*items.prefix_len, 0), torch.cat((items.item_start, blind)))
    return BatchLengths((*query_lens, missing), (*context_lens, missing), padded)


def make_draft_batch(
    block_tables: Tensor,
    layout: SlotLayout,
    max_seq_len: int,
    rows: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    ends: Tensor,
) -> Batch:
    """One position of each row, for a head that drafts; it has no logits rows.

    Args:
        block_tables: (G, S, max_blocks) int32, the last row scratch.
        layout: of the cache groups.
        max_seq_len: bound of all lengths.
        rows: (R,) int32.
        token_ids: (R,) int32, the tokens that follow the positions.
        positions: (R,) int32.
        ends: (R,) positions of a row that it may write.
    """
    count = rows.shape[0]
    positions = positions.clamp(min=0)
    slots = entry_slots(block_tables, rows, positions, layout)
    is_real = (positions < ends) & (rows < block_tables.shape[1] - 1)
    is_cpu = rows.device.type == "cpu"
    lengths = positions + 1
    bounds = tuple(lengths.tolist()) if is_cpu else (max_seq_len,) * count
    return Batch(
        input_ids=token_ids,
        positions=positions,
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32, device=rows.device),
        seq_lens=lengths,
        rows=rows,
        logits_rows=rows[:0],
        slot_mapping=torch.where(is_real, slots, -1),
        block_tables=block_tables,
        query_lens=(1,) * count,
        context_lens=bounds,
        num_tokens=count,
        num_reqs=count,
        max_query_len=1,
        max_seq_len=max(bounds),
    )


def make_timing_batch(
    num_reqs: int, query_len: int, context_len: int, block_tables: Tensor
) -> Batch:
    """Equal requests, each with new tokens at the end of its context, which are written nowhere.

    block_tables: (G, num_reqs, max_blocks) int32.
    """
    num_groups, device = len(block_tables), block_tables.device
    tokens = num_reqs * query_len

    def ints(values: Sequence[int]) -> Tensor:
        return torch.as_tensor(values).to(device, torch.int32)

    ends = ints(range(0, tokens + 1, query_len))
    positions = ints(range(context_len - query_len, context_len))
    return Batch(
        input_ids=ints([0] * tokens),
        positions=positions.repeat(num_reqs),
        cu_seqlens_q=ends,
        seq_lens=ints([context_len] * num_reqs),
        rows=ints(range(num_reqs)),
        logits_rows=ends[1:] - 1,
        slot_mapping=torch.full((num_groups, tokens), -1, dtype=torch.int64, device=device),
        block_tables=block_tables,
        query_lens=(query_len,) * num_reqs,
        context_lens=(context_len,) * num_reqs,
        num_tokens=tokens,
        num_reqs=num_reqs,
        max_query_len=query_len,
        max_seq_len=context_len,
    )
