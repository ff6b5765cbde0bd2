"""What DeepSeek-V4's layers share in a step: sequences, window slots, entries that complete.

All of it is made on the device from a `Batch`, once a step, with sizes that follow from the host's
bounds: nothing waits for the device, and a graph can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.ops.kv_compress import completing_tokens, compress_terms
from tiercel.ops.kv_compress_torch import Terms
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


@dataclass(frozen=True, slots=True)
class CompressStep:
    """The entries of one kind in a step of T tokens, of which at most N complete one.

    Attributes:
        phase: (T,) int64, position modulo the ratio.
        terms: of N entries.
        entry_slots: (N,) int64, where they are written; -1 for a row without entry.
        input_slots: (T,) int64, where the compressor's inputs are written.
        block_tables: (R, columns) int32 of the entries.
        visible: (T,) int32, entries that each token sees.
        max_entries: bound of `visible`.
    """

    phase: Tensor
    terms: Terms
    entry_slots: Tensor
    input_slots: Tensor
    block_tables: Tensor
    visible: Tensor
    max_entries: int


@dataclass(frozen=True, slots=True)
class StepIndex:
    """Indices of a step that all layers read.

    Attributes:
        seq_ids: (T,) int64, the request of each token.
        positions: (T,) int64.
        window: the positions that each token sees, as entries of the window's group.
        kv_slots: (T,) int64, where each token's own vector is written.
        compressed: by ratio.
    """

    seq_ids: Tensor
    positions: Tensor
    window: PagedEntries
    kv_slots: Tensor
    compressed: dict[int, CompressStep]


def index_step(
    batch: Batch, block_size: int, window: int, window_group: int, kinds: Sequence[CompressKind]
) -> StepIndex:
    """Make the indices of a step.

    Args:
        batch: the step.
        block_size: tokens of a block.
        window: positions that a token sees, itself included.
        window_group: cache group of the window's vectors.
        kinds: of compressed layers.
    """
    device = batch.positions.device
    token = torch.arange(batch.num_tokens, dtype=torch.int32, device=device)
    seq_ids = torch.searchsorted(batch.cu_seqlens_q[1:].contiguous(), token, right=True)
    seq_ids = seq_ids.clamp(max=batch.num_reqs - 1)
    positions = batch.positions.long()
    tables = _tables(batch, window_group)
    seen = PagedEntries(tables, seq_ids, window, ends=positions + 1)
    compressed = {kind.ratio: _compress_step(batch, block_size, kind, seq_ids) for kind in kinds}
    return StepIndex(seq_ids, positions, seen, batch.slot_mapping[window_group], compressed)


def _tables(batch: Batch, group: int) -> Tensor:
    """(R, columns) int32 block tables of a group, by request."""
    return batch.block_tables[group].index_select(0, batch.rows)


def _compress_step(
    batch: Batch, block_size: int, kind: CompressKind, seq_ids: Tensor
) -> CompressStep:
    positions, ratio = batch.positions, kind.ratio
    slots = batch.slot_mapping[kind.entries]
    capacity = batch.num_tokens // ratio + batch.num_reqs
    # A token without slot completes nothing: it is padding.
    real = torch.where(slots >= 0, positions, -1)
    tokens = completing_tokens(real, ratio=ratio, capacity=capacity)
    terms = compress_terms(
        tokens,
        positions,
        seq_ids,
        batch.cu_seqlens_q,
        _tables(batch, kind.inputs),
        ratio=ratio,
        has_overlap=kind.has_overlap,
        block_size=block_size,
        rows_per_block=kind.rows_per_block,
    )
    return CompressStep(
        phase=positions.long() % ratio,
        terms=terms,
        entry_slots=torch.where(tokens >= 0, slots[tokens.clamp(min=0)], -1),
        input_slots=batch.slot_mapping[kind.inputs],
        block_tables=_tables(batch, kind.entries),
        visible=(positions + 1) // ratio,
        max_entries=batch.max_seq_len // ratio,
    )
