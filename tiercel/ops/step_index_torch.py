"""The indices of a step of DeepSeek-V4 with PyTorch operators on any device, some 40 of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.ops.kv_compress_torch import Terms, find_completing, make_terms
from tiercel.ops.sparse_attention_torch import PagedEntries


@dataclass(frozen=True, slots=True)
class CompressKind:
    """One way of compressing, and where its groups are.

    Attributes:
        ratio: tokens per entry.
        has_overlap: whether an entry also takes the tokens of the entry before (CSA).
        entries: cache group of the entries.
        inputs: cache group of the compressor's inputs.
        rows_per_block: input rows that a block keeps.
    """

    ratio: int
    has_overlap: bool
    entries: int
    inputs: int
    rows_per_block: int

    @property
    def num_terms(self) -> int:
        """Tokens whose inputs an entry takes."""
        return self.ratio * (2 if self.has_overlap else 1)

    def has_free_rows(self, max_query_len: int, block_size: int) -> bool:
        """Whether no input of a step takes the row of one that an entry of the step reads.

        An entry reads up to `num_terms - 1` tokens before the step; a row is taken again
        `rows_per_block` tokens later, but only within a block.
        """
        most = self.rows_per_block - self.num_terms + 1
        return self.rows_per_block == block_size or max_query_len <= most


@dataclass(frozen=True, slots=True)
class CompressStep:
    """The entries of one kind in a step of T tokens, of which at most N complete one.

    Attributes:
        phase: (T,) int64, position modulo the ratio.
        terms: of N entries.
        entry_slots: (N,) int64, where they are written; -1 for a row without entry.
        input_slots: (T,) int64, where the compressor's inputs are written.
        block_tables: (S, columns) int32 of the entries, by engine row.
        visible: (T,) int32, entries that each token sees.
        max_entries: bound of `visible`.
        has_free_rows: whether no input takes the row of one that an entry of the step reads.
    """

    phase: Tensor
    terms: Terms
    entry_slots: Tensor
    input_slots: Tensor
    block_tables: Tensor
    visible: Tensor
    max_entries: int
    has_free_rows: bool


@dataclass(frozen=True, slots=True)
class StepIndex:
    """Indices of a step that all layers read.

    Attributes:
        rows: (T,) int64, each token's row of the block tables.
        positions: (T,) int64.
        window: the positions that each token sees, as entries of the window's group.
        kv_slots: (T,) int64, where each token's own vector is written.
        compressed: by ratio.
        max_query_len: bound of the new tokens of a request.
    """

    rows: Tensor
    positions: Tensor
    window: PagedEntries
    kv_slots: Tensor
    compressed: dict[int, CompressStep]
    max_query_len: int


def index_step(
    batch: Batch, block_size: int, window: int, window_group: int, kinds: Sequence[CompressKind]
) -> StepIndex:
    """See `step_index`."""
    device = batch.positions.device
    token = torch.arange(batch.num_tokens, dtype=torch.int32, device=device)
    seq_ids = torch.searchsorted(batch.cu_seqlens_q[1:].contiguous(), token, right=True)
    seq_ids = seq_ids.clamp(max=batch.num_reqs - 1)
    rows, positions = batch.rows.long()[seq_ids], batch.positions.long()
    tables = batch.block_tables[window_group]
    seen = PagedEntries(tables, rows, window, ends=positions + 1)
    compressed = {kind.ratio: _compress_step(batch, block_size, kind, seq_ids) for kind in kinds}
    slots = batch.slot_mapping[window_group]
    return StepIndex(rows, positions, seen, slots, compressed, batch.max_query_len)


def entry_capacity(batch: Batch, ratio: int) -> int:
    """The most entries that a step completes."""
    return batch.num_tokens // ratio + batch.num_reqs


def _compress_step(
    batch: Batch, block_size: int, kind: CompressKind, seq_ids: Tensor
) -> CompressStep:
    positions, ratio = batch.positions, kind.ratio
    slots = batch.slot_mapping[kind.entries]
    # A token without slot completes nothing: it is padding.
    real = torch.where(slots >= 0, positions, -1)
    tokens = find_completing(real, ratio, entry_capacity(batch, ratio))
    tables = batch.block_tables[kind.inputs].index_select(0, batch.rows)
    sizes = (ratio, kind.num_terms, block_size, kind.rows_per_block)
    terms = make_terms(tokens, positions, seq_ids, batch.cu_seqlens_q, tables, sizes)
    return CompressStep(
        phase=positions.long() % ratio,
        terms=terms,
        entry_slots=torch.where(tokens >= 0, slots[tokens.clamp(min=0)], -1),
        input_slots=batch.slot_mapping[kind.inputs],
        block_tables=batch.block_tables[kind.entries],
        visible=(positions + 1) // ratio,
        max_entries=batch.max_seq_len // ratio,
        has_free_rows=kind.has_free_rows(batch.max_query_len, block_size),
    )
