"""The inputs of a step on the device: one program per request walks its new tokens.

It ends before any other kernel of the step begins (no dependent launch follows it): attention reads
lengths and tables before it waits for the kernel ahead of it.

Floor: launch latency. A decode step reads and writes some 40 bytes a request; a chunk of 8,192
tokens moves 160 KB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

PLACES = 1024  # tokens of one turn


# Not specialised: a kernel for each divisibility of a count would be compiled between two steps.
@triton.jit(
    do_not_specialize=[
        "token_stride", "table_stride", "group_stride", "num_tokens", "scratch", "draft_stride",
    ]
)  # fmt: skip
def prepare_step_kernel(
    token_ids_ptr,  # (rows, token_stride) int32
    num_computed_ptr,  # (rows,) int32
    tables_ptr,  # (groups, rows, table_stride) int32
    rows_ptr,  # (reqs,) int32
    cu_seqlens_ptr,  # (reqs + 1,) int32
    input_ids_ptr,  # (tokens,) int32
    positions_ptr,  # (tokens,) int32
    seq_lens_ptr,  # (reqs,) int32
    slots_ptr,  # (groups, tokens) int64
    token_stride,
    table_stride,
    group_stride,  # rows * table_stride
    num_tokens,
    scratch,  # the last row
    drafts_ptr,  # (rows, draft_stride) int32, draft tokens from column 1 on; read if HAS_DRAFTS
    num_drafts_ptr,  # (reqs,) int32; read if HAS_DRAFTS
    draft_stride,
    BLOCK_SIZE: tl.constexpr,
    TOKENS_PER_ENTRY: tl.constexpr,  # of each group
    ENTRIES_PER_BLOCK: tl.constexpr,  # of each group
    PLACES: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
):
    """Positions, tokens and slots of one request."""
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request).to(tl.int64)  # rows * token_stride passes 2**31
    first = tl.load(cu_seqlens_ptr + request)
    count = tl.load(cu_seqlens_ptr + request + 1) - first
    is_real = row != scratch
    start = tl.where(is_real, tl.load(num_computed_ptr + row), 0)
    readable = tl.where(is_real, count, 0)
    if HAS_DRAFTS:
        used = 1 + tl.load(num_drafts_ptr + request)
        readable = tl.where(is_real, tl.minimum(count, used), 0)
    for begin in range(0, count, PLACES):
        place = begin + tl.arange(0, PLACES)
        mask = place < count
        position = start + place
        is_read = place < readable
        is_token = is_read & (place == 0) if HAS_DRAFTS else is_read
        ids = tl.load(token_ids_ptr + row * token_stride + position, mask=is_token, other=0)
        if HAS_DRAFTS:
            draft_ptr = drafts_ptr + row * draft_stride + place
            ids += tl.load(draft_ptr, mask=is_read & (place > 0), other=0)
        tl.store(input_ids_ptr + first + place, ids, mask=mask)
        tl.store(positions_ptr + first + place, position, mask=mask)
        for group in tl.static_range(len(TOKENS_PER_ENTRY)):
            per_entry, entries = TOKENS_PER_ENTRY[group], ENTRIES_PER_BLOCK[group]
            table_ptr = tables_ptr + group * group_stride + row * table_stride
            block = tl.load(table_ptr + position // BLOCK_SIZE, mask=is_read, other=0)
            offset = position % BLOCK_SIZE
            slot = block.to(tl.int64) * entries + offset // per_entry % entries
            slot = tl.where(is_read, slot, -1)
            if per_entry > 1:  # the last token of an entry writes it
                slot = tl.where((offset + 1) % per_entry == 0, slot, -1)
            if per_entry * entries < BLOCK_SIZE:  # a later token takes the slot, if it is real
                turn = per_entry * entries
                is_taken = (offset + turn < BLOCK_SIZE) & (place + turn < readable)
                slot = tl.where(is_taken, -1, slot)
            tl.store(slots_ptr + group * num_tokens + first + place, slot, mask=mask)
    tl.store(seq_lens_ptr + request, start + count)
    tl.store(num_computed_ptr + row, start + count, mask=is_real)


def launch_prepare_step(
    token_ids: Tensor,
    num_computed: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    cu_seqlens_q: Tensor,
    layout: tuple[int, tuple[int, ...], tuple[int, ...]],
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    draft_ids: Tensor | None = None,
    num_drafts: Tensor | None = None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    layout: block size, tokens per entry and entries per block of each group.
    """
    _, num_rows, max_blocks = block_tables.shape
    block_size, tokens_per_entry, entries_per_block = layout
    if rows.shape[0] == 0:
        return
    prepare_step_kernel[(rows.shape[0],)](
        token_ids,
        num_computed,
        block_tables,
        rows,
        cu_seqlens_q,
        input_ids,
        positions,
        seq_lens,
        slot_mapping,
        token_ids.shape[1],
        max_blocks,
        num_rows * max_blocks,
        slot_mapping.shape[1],
        num_rows - 1,
        rows if draft_ids is None else draft_ids,
        rows if num_drafts is None else num_drafts,
        0 if draft_ids is None else draft_ids.shape[1],
        BLOCK_SIZE=block_size,
        TOKENS_PER_ENTRY=tokens_per_entry,
        ENTRIES_PER_BLOCK=entries_per_block,
        PLACES=PLACES,
        HAS_DRAFTS=draft_ids is not None,
        num_warps=4,
    )
