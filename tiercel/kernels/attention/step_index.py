"""The indices that all layers of DeepSeek-V4 share in a step, in one launch.

Programs (chunk, 0) write rows and positions of BLOCK tokens; programs (chunk, 1 + kind) write what
a kind of compression needs. A token that completes an entry finds its place by counting those of
all tokens before it, which each program does by itself; the program of the last chunk fills the
rest with -1.

All results are pieces of two buffers, each padded to 16 bytes: launches of the layers are compiled
for the alignment of their tensors, which so never depends on the number of tokens.

Floor: launch latency. A decode step writes some 60 bytes a token, and 16 a term of an entry.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BLOCK = 32  # tokens of a program: with 64 the terms of HCA spill
PREFIX = 1024  # tokens before them, counted in a turn
REQUESTS = 128  # whose ends are compared in a turn
FILL = 16  # rows without entry, filled in a turn
PADDING = 4  # elements


def padded(size: int) -> int:
    """Elements of a piece of a buffer."""
    return -(-size // PADDING) * PADDING


def long_sizes(num_tokens: int, counts: Sequence[int], num_terms: Sequence[int]) -> list[int]:
    """Sizes of the int64 pieces: rows, positions, ends; then the kinds'.

    Of each kind: phases, entries, their slots, terms of this step and of the cache.
    """
    sizes = [num_tokens] * 3
    for count, terms in zip(counts, num_terms, strict=True):
        sizes += [num_tokens, count, count, count * terms, count * terms]
    return sizes


@triton.jit
def _padded(size, PADDING: tl.constexpr):
    return (size + PADDING - 1) // PADDING * PADDING


@triton.jit
def _requests(token, cu_seqlens_ptr, num_reqs, REQUESTS: tl.constexpr):
    """The request of each token: as many as end at the token or before, at most the last."""
    found = tl.zeros(token.shape, tl.int32)
    for first in range(0, num_reqs, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        ends = tl.load(cu_seqlens_ptr + 1 + request, mask=request < num_reqs, other=2147483647)
        found += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    return tl.minimum(found, num_reqs - 1)


@triton.jit
def _completing(positions_ptr, slots_ptr, token, num_tokens, RATIO: tl.constexpr):
    """Positions and slots of tokens, and which of them complete an entry."""
    mask = token < num_tokens
    position = tl.load(positions_ptr + token, mask=mask, other=0).to(tl.int32)
    slot = tl.load(slots_ptr + token, mask=mask, other=-1)
    return position, slot, (slot >= 0) & (position >= 0) & ((position + 1) % RATIO == 0)


@triton.jit
def _index_kind(
    longs_ptr,  # the pieces of this kind
    visible_ptr,
    positions_ptr,
    cu_seqlens_ptr,
    rows_ptr,
    slots_ptr,  # of the entries
    tables_ptr,  # of the inputs
    num_tokens,
    num_reqs,
    capacity,
    table_stride,
    RATIO: tl.constexpr,
    TERMS: tl.constexpr,
    STORED: tl.constexpr,  # rows of a block
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,  # power of two, no less than TERMS
    PREFIX: tl.constexpr,
    REQUESTS: tl.constexpr,
    FILL: tl.constexpr,
    PADDING: tl.constexpr,
):
    """One chunk of tokens for one kind of compression."""
    first = tl.program_id(0) * BLOCK
    before = first * 0
    for begin in range(0, first, PREFIX):
        earlier = begin + tl.arange(0, PREFIX)
        _, _, is_counted = _completing(positions_ptr, slots_ptr, earlier, first, RATIO)
        before += tl.sum(is_counted.to(tl.int32), axis=0)
    token = first + tl.arange(0, BLOCK)
    position, slot, is_last = _completing(positions_ptr, slots_ptr, token, num_tokens, RATIO)
    order = before + tl.cumsum(is_last.to(tl.int32), axis=0) - 1
    is_entry = is_last & (order < capacity)
    mask = token < num_tokens
    entries_ptr = longs_ptr + _padded(num_tokens, PADDING)
    entry_slots_ptr = entries_ptr + _padded(capacity, PADDING)
    fresh_ptr = entry_slots_ptr + _padded(capacity, PADDING)
    stored_ptr = fresh_ptr + _padded(capacity * TERMS, PADDING)
    tl.store(longs_ptr + token, (position % RATIO).to(tl.int64), mask=mask)
    tl.store(visible_ptr + token, (position + 1) // RATIO, mask=mask)
    tl.store(entries_ptr + order, (position // RATIO).to(tl.int64), mask=is_entry)
    tl.store(entry_slots_ptr + order, slot, mask=is_entry)

    request = _requests(token, cu_seqlens_ptr, num_reqs, REQUESTS)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(cu_seqlens_ptr + request)
    term = tl.arange(0, BLOCK_TERMS)
    back = TERMS - 1 - term
    place = position[:, None] - back[None, :]
    fresh = token[:, None] - back[None, :]
    is_written = is_entry[:, None] & (term < TERMS)[None, :]
    is_term = is_written & (place >= 0)
    is_fresh = fresh >= start[:, None]
    place = tl.maximum(place, 0)
    block_ptr = tables_ptr + row[:, None] * table_stride + place // BLOCK_SIZE
    block = tl.load(block_ptr, mask=is_term & (fresh < start[:, None]), other=0).to(tl.int64)
    stored = block * STORED + place % BLOCK_SIZE % STORED
    at = order[:, None] * TERMS + term[None, :]
    tl.store(fresh_ptr + at, tl.where(is_term & is_fresh, fresh, -1).to(tl.int64), mask=is_written)
    is_stored = is_term & (fresh < start[:, None])
    tl.store(stored_ptr + at, tl.where(is_stored, stored, -1), mask=is_written)

    if first + BLOCK >= num_tokens:
        total = before + tl.sum(is_last.to(tl.int32), axis=0)
        for begin_row in range(total, capacity, FILL):
            empty = begin_row + tl.arange(0, FILL)
            none = tl.full((FILL,), -1, tl.int64)
            tl.store(entries_ptr + empty, none, mask=empty < capacity)
            tl.store(entry_slots_ptr + empty, none, mask=empty < capacity)
            hole = empty[:, None] * TERMS + term[None, :]
            is_empty = (empty < capacity)[:, None] & (term < TERMS)[None, :]
            nothing = tl.full((FILL, BLOCK_TERMS), -1, tl.int64)
            tl.store(fresh_ptr + hole, nothing, mask=is_empty)
            tl.store(stored_ptr + hole, nothing, mask=is_empty)


# Not specialised: a kernel for each divisibility of a count would be compiled between two steps.
@triton.jit(
    do_not_specialize=[
        *("num_tokens", "num_reqs", "slot_stride", "group_stride", "table_stride", "int_stride"),
    ]
)
def step_index_kernel(
    positions_ptr,  # (tokens,) int32
    cu_seqlens_ptr,  # (reqs + 1,) int32
    rows_ptr,  # (reqs,) int32
    slots_ptr,  # (groups, tokens) int64
    tables_ptr,  # (groups, rows, columns) int32
    longs_ptr,  # int64, the pieces of `long_sizes`
    ints_ptr,  # (kinds, int_stride) int32: entries that each token sees
    num_tokens,
    num_reqs,
    slot_stride,
    group_stride,
    table_stride,
    int_stride,
    RATIOS: tl.constexpr,  # of each kind
    TERMS: tl.constexpr,
    STORED: tl.constexpr,
    ENTRIES: tl.constexpr,  # groups of the entries
    INPUTS: tl.constexpr,  # groups of the inputs
    BLOCK_TERMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFIX: tl.constexpr,
    REQUESTS: tl.constexpr,
    FILL: tl.constexpr,
    PADDING: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Rows and positions of a chunk of tokens, or what one kind of compression needs."""
    wait_for_inputs(IS_DEPENDENT)
    if tl.program_id(1) == 0:
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = token < num_tokens
        request = _requests(token, cu_seqlens_ptr, num_reqs, REQUESTS)
        row = tl.load(rows_ptr + request).to(tl.int64)
        position = tl.load(positions_ptr + token, mask=mask, other=0).to(tl.int64)
        size = _padded(num_tokens, PADDING)
        tl.store(longs_ptr + token, row, mask=mask)
        tl.store(longs_ptr + size + token, position, mask=mask)
        tl.store(longs_ptr + 2 * size + token, position + 1, mask=mask)
    base = 3 * _padded(num_tokens, PADDING)
    for kind in tl.static_range(len(RATIOS)):
        capacity = num_tokens // RATIOS[kind] + num_reqs
        if tl.program_id(1) == kind + 1:
            _index_kind(
                *(longs_ptr + base, ints_ptr + kind * int_stride),
                *(positions_ptr, cu_seqlens_ptr, rows_ptr),
                slots_ptr + ENTRIES[kind] * slot_stride,
                tables_ptr + INPUTS[kind] * group_stride,
                *(num_tokens, num_reqs, capacity, table_stride),
                *(RATIOS[kind], TERMS[kind], STORED[kind], BLOCK_SIZE, BLOCK, BLOCK_TERMS[kind]),
                *(PREFIX, REQUESTS, FILL, PADDING),
            )
        base += _padded(num_tokens, PADDING) + 2 * _padded(capacity, PADDING)
        base += 2 * _padded(capacity * TERMS[kind], PADDING)


Kind = tuple[int, int, int, int, int]  # ratio, terms, rows of a block, groups of entries and inputs


@functools.cache
def _launch(block_size: int, kinds: tuple[Kind, ...]) -> TritonLaunch:
    ratios, terms, stored, entries, inputs = zip(*kinds, strict=True) if kinds else ((),) * 5
    constants = {
        "RATIOS": ratios,
        "TERMS": terms,
        "STORED": stored,
        "ENTRIES": entries,
        "INPUTS": inputs,
        "BLOCK_TERMS": tuple(map(triton.next_power_of_2, terms)),
        "BLOCK_SIZE": block_size,
        "BLOCK": BLOCK,
        "PREFIX": PREFIX,
        "REQUESTS": REQUESTS,
        "FILL": FILL,
        "PADDING": PADDING,
    }
    return TritonLaunch(step_index_kernel, 4, constants)


def launch_step_index(
    positions: Tensor,
    cu_seqlens_q: Tensor,
    rows: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    longs: Tensor,
    ints: Tensor,
    block_size: int,
    kinds: Sequence[Kind],
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    longs: as many as the padded `long_sizes`. ints: (kinds, padded tokens).
    """
    num_tokens = positions.shape[0]
    strides = (slot_mapping.stride(0), *block_tables.stride()[:2], ints.stride(0))
    _launch(block_size, tuple(kinds))(
        (-(-num_tokens // BLOCK), 1 + len(kinds), 1),
        (positions, cu_seqlens_q, rows, slot_mapping, block_tables, longs, ints),
        (num_tokens, rows.shape[0], *strides),
    )
