"""Attention of DeepSeek-V4 over listed latent vectors: K and V are the same vector of all heads.

A program takes one token, up to 64 heads and a range of key tiles. It loads and decodes a tile of
keys once, for the scores and for the sum; a token's keys may be split over programs at fixed tiles,
whose partial results a second kernel merges in float32. Products are exact in the dtype of q where
keys rest encoded or in bfloat16; sums are float32.

Floor: the listed entries are read once, 584 bytes each, and 4 FLOPs per head, channel and key.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from tiercel.kernels.block.block_numbers import e8m0_values
from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BLOCK_N = 64  # keys of a tile
BLOCK_H = 64  # heads of a program, at most
GROUP = 64  # channels of an encoded vector with one scale
_MOST_SPLITS: Final = ((16, 32), (64, 2))  # up to some tokens; more are not split
_WARPS: Final = 8
SLOTS, CHOSEN, RUN = range(3)  # how a token's keys are listed
_SLOTS: Final = tl.constexpr(SLOTS)
_RUN: Final = tl.constexpr(RUN)


@triton.jit
def _places(
    tile,
    token,
    count,
    start,
    sequence,
    list_ptr,
    tables_ptr,
    list_stride,
    table_stride,
    KIND: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Block, index within the block, and existence of the keys of a tile."""
    place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_key = place < count
    if KIND == _RUN:
        entry = start + place
    else:
        entry = tl.load(list_ptr + token * list_stride + place, mask=is_key, other=-1)
        is_key = is_key & (entry >= 0)
        entry = tl.where(is_key, entry, 0)
    block = (entry // PER_BLOCK).to(tl.int64)
    if KIND != _SLOTS:
        row_ptr = tables_ptr + sequence * table_stride
        block = tl.load(row_ptr + block, mask=is_key, other=0).to(tl.int64)
    return block, (entry % PER_BLOCK).to(tl.int64), is_key


@triton.jit
def _decode_half(
    row_ptr, scale_ptr, is_key, FIRST: tl.constexpr, D: tl.constexpr, DOT: tl.constexpr
):
    """Half of the channels of encoded vectors from `FIRST` on: (keys, D / 2)."""
    N: tl.constexpr = row_ptr.shape[0]
    GROUPS: tl.constexpr = D // 2 // 64
    group = FIRST // 64 + tl.arange(0, GROUPS)
    channel = tl.arange(0, 64)
    is_nope = group < D // 64 - 1  # the last group is bfloat16
    mask = is_key[:, None] & is_nope[None, :]
    factor = e8m0_values(tl.load(scale_ptr[:, None] + group[None, :], mask=mask, other=127))
    offset = group[:, None] * 64 + channel[None, :]
    data = tl.load(row_ptr[:, None, None] + offset[None, :, :], mask=mask[:, :, None], other=0)
    values = data.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor[:, :, None]
    values = values.to(DOT)
    if FIRST > 0:
        # Byte and channel agree up to here, so a bfloat16 is as far behind as its channel is.
        ahead = tl.maximum(group - (D // 64 - 1), 0)[:, None] * 64 + channel[None, :]
        rotary_ptr = (row_ptr + (D - 64)).to(tl.pointer_type(tl.bfloat16))
        is_rotary = is_key[:, None] & (group == D // 64 - 1)[None, :]
        rotary = tl.load(
            rotary_ptr[:, None, None] + ahead[None, :, :], mask=is_rotary[:, :, None], other=0.0
        )
        values = tl.where(is_nope[None, :, None], values, rotary.to(DOT))
    return tl.reshape(values, (N, D // 2))


@triton.jit
def _extent(token, num_keys, ends_ptr, seq_ids_ptr, KIND: tl.constexpr):
    """Places of a token's list, its first entry of a run, and its row of the tables."""
    count = num_keys
    start = 0
    sequence = 0
    if KIND != _SLOTS:
        sequence = tl.load(seq_ids_ptr + token).to(tl.int64)
    if KIND == _RUN:
        end = tl.load(ends_ptr + token).to(tl.int32)
        start = tl.maximum(end - num_keys, 0)
        count = tl.minimum(end, num_keys)
    return count, start, sequence


@triton.jit
def _attend_part(
    q_low,  # (heads, D / 2), the lower channels
    q_high,
    acc_low,  # (heads, D / 2) float32
    acc_high,
    maximum,  # (heads,) float32, base 2
    total,  # (heads,) float32
    token,
    first,  # tile
    last,
    scale_log2,
    cache_ptr,
    scales_ptr,
    list_ptr,
    tables_ptr,
    count,
    start,
    sequence,
    list_stride,
    table_stride,
    KIND: tl.constexpr,
    STRIDES: tl.constexpr,  # of cache and scales: of blocks and entries
    PER_BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):
    """Add the keys of some tiles of a part, by an online softmax."""
    channel = tl.arange(0, D // 2)
    for tile in tl.range(first, last, num_stages=1):
        block, index, is_key = _places(
            *(tile, token, count, start, sequence, list_ptr, tables_ptr),
            *(list_stride, table_stride, KIND, PER_BLOCK, BLOCK_N),
        )
        row_ptr = cache_ptr + block * STRIDES[0] + index * STRIDES[1]
        if scales_ptr is not None:
            scale_ptr = scales_ptr + block * STRIDES[2] + index * STRIDES[3]
            low = _decode_half(row_ptr, scale_ptr, is_key, 0, D, DOT)
            high = _decode_half(row_ptr, scale_ptr, is_key, D // 2, D, DOT)
        else:
            half_ptr = row_ptr[:, None] + channel[None, :]
            low = tl.load(half_ptr, mask=is_key[:, None], other=0.0).to(DOT)
            high = tl.load(half_ptr + D // 2, mask=is_key[:, None], other=0.0).to(DOT)
        scores = tl.dot(q_low, tl.trans(low), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(high), scores, input_precision="ieee") * scale_log2
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, axis=1))
        shift = tl.where(new == float("-inf"), 0.0, new)  # no key so far
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(weights, axis=1)
        weights = weights.to(DOT)
        acc_low = tl.dot(weights, low, acc_low * decay[:, None], input_precision="ieee")
        acc_high = tl.dot(weights, high, acc_high * decay[:, None], input_precision="ieee")
        maximum = new
    return acc_low, acc_high, maximum, total


@triton.jit
def _begin(low_ptr, high_ptr, is_head, DOT: tl.constexpr):
    """Both halves of the queries, and sums over no key."""
    q_low = tl.load(low_ptr, mask=is_head[:, None], other=0.0).to(DOT)
    q_high = tl.load(high_ptr, mask=is_head[:, None], other=0.0).to(DOT)
    acc_low = tl.zeros(low_ptr.shape, tl.float32)
    acc_high = tl.zeros(low_ptr.shape, tl.float32)
    maximum = tl.full(is_head.shape, float("-inf"), tl.float32)
    total = tl.zeros(is_head.shape, tl.float32)
    return q_low, q_high, acc_low, acc_high, maximum, total


@triton.jit
def _finish(
    out_ptr,
    stats_ptr,
    sink_ptr,
    acc_low,
    acc_high,
    maximum,
    total,
    row,  # token, or token and split
    head,
    channel,
    H: tl.constexpr,
    D: tl.constexpr,
):
    """Write the result, or what is merged later."""
    is_head = head < H
    if stats_ptr is not None:
        tl.store(stats_ptr + row * 2 * H + head, maximum, mask=is_head)
        tl.store(stats_ptr + row * 2 * H + H + head, total, mask=is_head)
    else:
        factor = 1.0
        if sink_ptr is not None:
            sink = tl.load(sink_ptr + head, mask=is_head, other=0.0) * 1.4426950408889634
            top = tl.maximum(maximum, sink)
            top = tl.where(top == float("-inf"), 0.0, top)
            factor = tl.exp2(maximum - top)
            total = total * factor + tl.exp2(sink - top)
        factor = factor / tl.where(total == 0.0, 1.0, total)  # without keys the sums are 0
        acc_low *= factor[:, None]
        acc_high *= factor[:, None]
    place = (row * H + head[:, None]) * D + channel[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + place, acc_low.to(dtype), mask=is_head[:, None])
    tl.store(out_ptr + place + D // 2, acc_high.to(dtype), mask=is_head[:, None])


# Not specialised: a kernel for each divisibility of a count would be compiled between two steps.
@triton.jit(
    do_not_specialize=[
        *("scale_log2", "num_splits", "num_keys", "list_stride", "table_stride"),
        *("num_keys2", "list_stride2", "table_stride2"),
    ]
)
def sparse_attention_kernel(
    out_ptr,  # (T, H, D) contiguous, or (T, splits, H, D) float32 with stats
    stats_ptr,  # (T, splits, 2, H) float32: maximum of base 2, total; None without splits
    q_ptr,  # (T, H, D)
    sink_ptr,  # (H,) float32 or None; of a kernel without splits
    cache_ptr,  # (blocks, entries, D), or encoded, of the first part
    scales_ptr,  # (blocks, entries, scale bytes) or None
    list_ptr,  # (T, num_keys) slots or entries, or None
    ends_ptr,  # (T,) or None
    tables_ptr,  # (sequences, columns) or None
    seq_ids_ptr,  # (T,) or None
    cache2_ptr,  # of the second part
    scales2_ptr,
    list2_ptr,
    ends2_ptr,
    tables2_ptr,
    seq_ids2_ptr,
    scale_log2,
    num_splits,
    num_keys,
    list_stride,
    table_stride,
    num_keys2,
    list_stride2,
    table_stride2,
    Q_STRIDES: tl.constexpr,  # of tokens, heads and channels
    KINDS: tl.constexpr,  # of the parts' lists
    STRIDES: tl.constexpr,
    STRIDES2: tl.constexpr,
    PER_BLOCK: tl.constexpr,  # entries of a block, of each part
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Attend with some heads of one token to some tiles of its keys."""
    wait_for_inputs(IS_DEPENDENT)
    split = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    token = tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, D // 2)
    low_ptr = q_ptr + token * Q_STRIDES[0] + head[:, None] * Q_STRIDES[1]
    low_ptr += channel[None, :] * Q_STRIDES[2]
    high_ptr = low_ptr + D // 2 * Q_STRIDES[2]
    q_low, q_high, acc_low, acc_high, maximum, total = _begin(low_ptr, high_ptr, head < H, DOT)
    # From the token's own keys: how many a list could hold must not change where it is split.
    count, start, sequence = _extent(token, num_keys, ends_ptr, seq_ids_ptr, KINDS[0])
    num_tiles = tl.cdiv(count, BLOCK_N)
    all_tiles = num_tiles
    if cache2_ptr is not None:
        count2, start2, sequence2 = _extent(token, num_keys2, ends2_ptr, seq_ids2_ptr, KINDS[1])
        all_tiles += tl.cdiv(count2, BLOCK_N)
    split_tiles = tl.cdiv(all_tiles, num_splits)
    first = split * split_tiles
    last = tl.minimum(first + split_tiles, all_tiles)
    acc_low, acc_high, maximum, total = _attend_part(
        *(q_low, q_high, acc_low, acc_high, maximum, total),
        *(token, first, tl.minimum(last, num_tiles), scale_log2),
        *(cache_ptr, scales_ptr, list_ptr, tables_ptr),
        *(count, start, sequence, list_stride, table_stride),
        *(KINDS[0], STRIDES, PER_BLOCK[0], D, BLOCK_N, DOT),
    )
    if cache2_ptr is not None:
        acc_low, acc_high, maximum, total = _attend_part(
            *(q_low, q_high, acc_low, acc_high, maximum, total),
            *(token, tl.maximum(first - num_tiles, 0), last - num_tiles, scale_log2),
            *(cache2_ptr, scales2_ptr, list2_ptr, tables2_ptr),
            *(count2, start2, sequence2, list_stride2, table_stride2),
            *(KINDS[1], STRIDES2, PER_BLOCK[1], D, BLOCK_N, DOT),
        )
    _finish(
        *(out_ptr, stats_ptr, sink_ptr, acc_low, acc_high, maximum, total),
        *(token * num_splits + split, head, channel, H, D),
    )


@triton.jit(do_not_specialize=["num_splits"])
def sparse_attention_merge_kernel(
    out_ptr,  # (T, H, D) contiguous
    partial_ptr,  # (T, splits, H, D) float32
    stats_ptr,  # (T, splits, 2, H) float32
    sink_ptr,  # (H,) float32 or None
    num_splits,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,  # power of two, no less; the same for any list
    IS_DEPENDENT: tl.constexpr,
):
    """Join the splits of one head of one token."""
    wait_for_inputs(IS_DEPENDENT)
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, SPLITS)
    is_split = split < num_splits
    stats = (token * num_splits + split) * 2 * H + head
    maxima = tl.load(stats_ptr + stats, mask=is_split, other=float("-inf"))
    totals = tl.load(stats_ptr + stats + H, mask=is_split, other=0.0)
    top = tl.max(maxima, axis=0)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * tl.exp2(maxima - top), axis=0)
    if sink_ptr is not None:
        total += tl.exp2(sink - top)
    channel = tl.arange(0, D)
    acc = tl.zeros((D,), tl.float32)
    for i in tl.range(0, num_splits, loop_unroll_factor=4):
        row = token * num_splits + i
        weight = tl.exp2(tl.load(stats_ptr + row * 2 * H + head) - top)
        acc += weight * tl.load(partial_ptr + (row * H + head) * D + channel)
    acc /= tl.where(total == 0.0, 1.0, total)  # without keys the sum is 0
    out = (token * H + head) * D + channel
    tl.store(out_ptr + out, acc.to(out_ptr.dtype.element_ty))


def num_splits(num_tokens: int, num_keys: tuple[int, ...]) -> int:
    """Programs that share a token's keys. Pure.

    As many as tiles, or a bound of a class of tokens. So a token's tiles are split by its own keys
    alone, whatever its lists could hold, and graphs that pad to 16 or 64 tokens change no bit.
    """
    tiles = sum(-(-count // BLOCK_N) for count in num_keys)
    most = next((most for tokens, most in _MOST_SPLITS if num_tokens <= tokens), 1)
    return max(1, min(tiles, most))


@functools.cache
def _launch(
    shape: tuple[int, int],
    q_strides: tuple[int, ...],
    kinds: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    per_block: tuple[int, ...],
    dot: object,
) -> TritonLaunch:
    num_heads, head_dim = shape
    constants = {
        "Q_STRIDES": q_strides,
        "KINDS": kinds,
        "STRIDES": strides[0],
        "STRIDES2": strides[-1],
        "PER_BLOCK": per_block,
        "H": num_heads,
        "D": head_dim,
        "BLOCK_H": min(BLOCK_H, max(16, triton.next_power_of_2(num_heads))),
        "BLOCK_N": BLOCK_N,
        "DOT": dot,
    }
    return TritonLaunch(sparse_attention_kernel, _WARPS, constants)


@functools.cache
def _launch_merge(num_heads: int, head_dim: int) -> TritonLaunch:
    constants = {"H": num_heads, "D": head_dim, "SPLITS": _MOST_SPLITS[0][1]}
    return TritonLaunch(sparse_attention_merge_kernel, 4, constants)


@dataclass(frozen=True, slots=True)
class KeyPart:
    """Keys of one cache, and how a token lists them.

    Attributes:
        cache: (blocks, entries, d) float, or (blocks, entries, d + 64) uint8; channels are dense.
        scales: (blocks, entries, scale bytes) uint8 of encoded keys, or None.
        num_keys: most keys of a token.
        listed: (T, num_keys) slots, or entries where there are tables; None for the last entries
            before `ends`.
        ends: (T,), or None.
        tables: (sequences, columns) blocks of each sequence, or None.
        seq_ids: (T,), rows of the tables, or None.
    """

    cache: Tensor
    scales: Tensor | None
    num_keys: int
    listed: Tensor | None
    ends: Tensor | None = None
    tables: Tensor | None = None
    seq_ids: Tensor | None = None

    def kind(self) -> int:
        """How keys are listed: by slots, chosen entries or a run of entries."""
        if self.tables is None:
            return SLOTS
        return RUN if self.listed is None else CHOSEN

    def tensors(self) -> list[Tensor | None]:
        """Pointers of the kernel."""
        return [self.cache, self.scales, self.listed, self.ends, self.tables, self.seq_ids]

    def numbers(self) -> list[int]:
        """Scalars of the kernel: keys, strides of list and table."""
        lists = (self.listed, self.tables)
        return [self.num_keys, *(0 if x is None else x.stride(0) for x in lists)]

    def strides(self) -> tuple[int, ...]:
        """Strides of blocks and entries, of cache and scales."""
        scales = (0, 0) if self.scales is None else self.scales.stride()[:2]
        return (*self.cache.stride()[:2], *scales)


def _dot_type(q: Tensor) -> object:
    """The type of products: that of q; the interpreter has no bfloat16 products."""
    if not q.is_cuda:
        return tl.float32
    return tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16


def launch_sparse_attention(
    q: Tensor,
    parts: Sequence[KeyPart],
    sink: Tensor | None,
    scale: float,
    out: Tensor,
    partial: Tensor | None,
    stats: Tensor | None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    partial: (T, splits, heads, d) float32 and stats (T, splits, 2, heads) float32, None for one.
    """
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens == 0:
        return
    tensors, numbers = [], []
    for part in parts:
        tensors += part.tensors()
        numbers += part.numbers()
    if len(parts) == 1:
        tensors += [None] * 6
        numbers += [0] * 3
    splits = 1 if partial is None else partial.shape[1]
    launch = _launch(
        (num_heads, head_dim),
        q.stride(),
        tuple(part.kind() for part in parts),
        tuple(part.strides() for part in parts),
        tuple(part.cache.shape[1] for part in parts),
        _dot_type(q),
    )
    grid = (splits, -(-num_heads // BLOCK_H), num_tokens)
    first = [out, None, q, sink] if partial is None else [partial, stats, q, None]
    launch(grid, first + tensors, [scale * math.log2(math.e), splits, *numbers])
    if partial is not None:
        merge = _launch_merge(num_heads, head_dim)
        merge((num_heads, num_tokens, 1), [out, partial, stats, sink], [splits])
