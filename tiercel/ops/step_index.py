"""What DeepSeek-V4's layers share in a step: rows, window slots, entries that complete.

All of it is made on the device from a `Batch`, once a step, with sizes that follow from the host's
bounds: nothing waits for the device, and a graph can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tiercel import env
from tiercel.batch import Batch
from tiercel.errors import ArgumentError
from tiercel.ops import step_index_torch as torch_ops
from tiercel.ops.kv_compress_torch import Terms
from tiercel.ops.sparse_attention_torch import PagedEntries
from tiercel.ops.step_index_torch import CompressKind, CompressStep, StepIndex, entry_capacity


def step_index(
    batch: Batch, block_size: int, window: int, window_group: int, kinds: Sequence[CompressKind]
) -> StepIndex:
    """Make the indices of a step.

    Args:
        batch: the step, without items.
        block_size: tokens of a block.
        window: positions that a token sees, itself included.
        window_group: cache group of the window's vectors.
        kinds: of compressed layers.

    Returns:
        New tensors, and views of those of the batch.

    Raises:
        ArgumentError: the blocks of a kind are not whole entries, or keep too few inputs.

    Source: the inference code published with DeepSeek-V4 for the terms of an entry.
    """
    for kind in kinds:
        if block_size % kind.ratio or block_size % kind.rows_per_block:
            raise ArgumentError(
                f"step_index: ratio={kind.ratio}, block_size={block_size}, "
                f"rows_per_block={kind.rows_per_block}.",
                hint="A block is whole entries, and its rows divide its tokens.",
            )
        if kind.rows_per_block < kind.num_terms:
            raise ArgumentError(
                f"step_index: rows_per_block={kind.rows_per_block}, an entry takes "
                f"{kind.num_terms} tokens.",
                hint=f"Keep at least {kind.num_terms} rows.",
            )
    if index_refusal(batch):
        return torch_ops.index_step(batch, block_size, window, window_group, kinds)
    return _launch(batch, block_size, window, window_group, kinds)


def index_refusal(batch: Batch) -> str:
    """Why the kernel does not make the indices of a step; "" if it does."""
    planes = (batch.positions, batch.cu_seqlens_q, batch.rows)
    paged = (batch.slot_mapping, batch.block_tables)
    reasons = (
        (not batch.positions.is_cuda, "the step is not on a GPU"),
        (not env.has_compress_kernel(), "TIERCEL_COMPRESS_KERNEL=0"),
        (batch.num_tokens == 0, "there are no tokens"),
        (any(plane.stride(-1) != 1 for plane in (*planes, *paged)), "indices with strides"),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def _launch(
    batch: Batch, block_size: int, window: int, window_group: int, kinds: Sequence[CompressKind]
) -> StepIndex:
    from tiercel.kernels.attention import step_index as kernel

    device, num_tokens = batch.positions.device, batch.num_tokens
    counts = [entry_capacity(batch, kind.ratio) for kind in kinds]
    sizes = kernel.long_sizes(num_tokens, counts, [kind.num_terms for kind in kinds])
    longs = torch.empty(sum(map(kernel.padded, sizes)), dtype=torch.int64, device=device)
    ints = torch.empty((len(kinds), kernel.padded(num_tokens)), dtype=torch.int32, device=device)
    kernel.launch_step_index(
        batch.positions,
        batch.cu_seqlens_q,
        batch.rows,
        batch.slot_mapping,
        batch.block_tables,
        longs,
        ints,
        block_size,
        [
            (kind.ratio, kind.num_terms, kind.rows_per_block, kind.entries, kind.inputs)
            for kind in kinds
        ],
    )
    parts = _cut(longs, sizes, kernel.padded)
    rows, positions, ends = parts[:3]
    tables, slots = batch.block_tables, batch.slot_mapping
    compressed = {}
    for i, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        phase, entries, entry_slots, fresh, stored = parts[3 + 5 * i : 8 + 5 * i]
        shape = (count, kind.num_terms)
        compressed[kind.ratio] = CompressStep(
            phase=phase,
            terms=Terms(entries, fresh.view(shape), stored.view(shape)),
            entry_slots=entry_slots,
            input_slots=slots[kind.inputs],
            block_tables=tables[kind.entries],
            visible=ints[i, :num_tokens],
            max_entries=batch.max_seq_len // kind.ratio,
            has_free_rows=kind.has_free_rows(batch.max_query_len, block_size),
        )
    seen = PagedEntries(tables[window_group], rows, window, ends=ends)
    own = slots[window_group]
    return StepIndex(rows, positions, seen, own, compressed, batch.max_query_len)


def _cut(buffer: Tensor, sizes: Sequence[int], padded: Callable[[int], int]) -> list[Tensor]:
    """Pieces of a buffer, which begin where the padding of the one before ends."""
    pieces, first = [], 0
    for size in sizes:
        pieces.append(buffer[first : first + size])
        first += padded(size)
    return pieces
