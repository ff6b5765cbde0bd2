"""Prefill attention on the device: plain causal, chunked and multi-item, over the paged cache.

A request has a prefix of P tokens (a plain one: all its tokens), whose keys lie in pages, and may
have items behind it, whose keys lie in this step's projections. Token i sees key k iff k <= i and
(k < P or k >= item_start[i]).

Tiles: see attention_tiles.py. A tile walks its own items and then the pages it sees; what lies
between is skipped, and only steps that a bound cuts are masked.

Two kernels read one table. cuda/multi_item_attention.cu: Hopper, head_dim 128, 16 bits, no
window. The Triton kernel below: everything else. Floor of both: 4 * head_dim operations for every
visible pair of a token's head and a key, at the rate of a matrix product.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels import rtc
from tiercel.kernels.attention_tiles import MultiItemAttentionPlan

LOG2_E = 1.4426950408889634

# What the CUDA kernel is built for; see the top of its file.
CUDA_CAPABILITY = (9, 0)
CUDA_HEAD_DIM = 128
CUDA_GROUPS = (1, 2, 4, 8)
CUDA_BLOCK_SIZES = (16, 32, 64, 128)
_CUDA_ROWS, _CUDA_THREADS, _CUDA_SMEM_BYTES = 128, 384, 230_400
_ITEM_STEP = 64  # WN of the kernel: keys of an item step
_RESCALE_LOG2 = 8.0  # a maximum that grew by less keeps the scale: sums stay below 2**8 times it
# Exponentials before the new maximum is known, redone where it grew: from 2048 keys on 2% ahead,
# at 512 4% behind (H200, attention_study section 3).
_FAST_FROM_KEYS = 2048

# head_dim up to -> rows, keys, warps, stages of 16-bit types. Chosen by what ptxas makes of them
# (sm_90, Triton 3.6): no spill up to 128, where 4 warps spill 336 bytes; 48 bytes at 256. Not swept
# on a device yet: benchmarks/multi_item_attention.py --sweep.
_TRITON_TILES = (
    (64, (128, 64, 4, 3)),
    (128, (128, 64, 8, 2)),
    (256, (128, 64, 8, 2)),
    (512, (64, 32, 8, 1)),
)
MAX_HEAD_DIM = 512
_TRITON_FLOAT32 = (32, 16, 4, 1)  # no tensor cores; 32 keys spill 8 KB at head_dim 256


@dataclass(frozen=True, slots=True)
class MultiItemAttentionConfig:
    """Which kernel, and the Triton kernel's launch.

    Attributes:
        variant: "plain" or "fast" of the CUDA kernel, or "triton".
        block_m: packed rows of a tile, tokens times heads of a group.
        block_n: keys of a step.
        num_warps: of a program.
        num_stages: steps in flight.
    """

    variant: Literal["plain", "fast", "triton"]
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def select_multi_item_attention(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    window: int,
    longest: int,
    capability: tuple[int, int],
) -> MultiItemAttentionConfig:
    """Choose the kernel. Pure: equal in every process, readable by a test.

    Args:
        dtype: of queries and cache.
        head_dim: elements of a head.
        group: query heads of a key/value head.
        block_size: tokens of a page.
        window: 0 for none, or for one that no sequence reaches.
        longest: the most page keys of a request.
        capability: of the device, (major, minor).

    Raises:
        ArgumentError: head_dim is above 512.
    """
    if head_dim > MAX_HEAD_DIM:
        raise ArgumentError(
            f"multi_item_attention: head_dim {head_dim} does not fit a tile.",
            hint=f"The limit on a GPU is {MAX_HEAD_DIM}.",
        )
    is_built = (
        capability == CUDA_CAPABILITY
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim == CUDA_HEAD_DIM
        and group in CUDA_GROUPS
        and block_size in CUDA_BLOCK_SIZES
    )
    if is_built and not window:
        variant: Literal["plain", "fast"] = "fast" if longest >= _FAST_FROM_KEYS else "plain"
        return MultiItemAttentionConfig(variant, _CUDA_ROWS, 128, 12, 5)
    if dtype == torch.float32:
        rows, keys, warps, stages = _TRITON_FLOAT32
    else:
        rows, keys, warps, stages = next(t for limit, t in _TRITON_TILES if head_dim <= limit)
    rows = max(rows, triton.next_power_of_2(group))  # a tile holds at least one token
    return MultiItemAttentionConfig("triton", rows, keys, warps, stages)


@triton.jit
def _page_offsets(
    table_ptr,  # (max_blocks,) of one request
    first,  # a multiple of BLOCK_N
    end,  # keys of the request, > first
    slot_stride,  # elements from one slot of the cache to the next
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where keys first .. first + BLOCK_N - 1 begin, in int64; keys from `end` on: as end - 1."""
    if PAGE % BLOCK_N == 0:  # one page per step: its number is one load
        block = tl.load(table_ptr + first // PAGE).to(tl.int64)
        slots = block * PAGE + (first % PAGE + tl.arange(0, BLOCK_N))
    else:
        keys = tl.minimum(first + tl.arange(0, BLOCK_N), end - 1)
        slots = tl.load(table_ptr + keys // PAGE).to(tl.int64) * PAGE + keys % PAGE
    return slots * slot_stride


@triton.jit
def _load_keys(
    ptr,  # keys or values of one head
    offsets,  # (BLOCK_N,) int64
    is_key,  # (BLOCK_N,)
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """(BLOCK_N, DIMS) of keys or values; masked: zeros outside, whatever lies there."""
    dims = tl.arange(0, DIMS)
    places = ptr + offsets[:, None] + dims[None, :]
    if IS_MASKED or DIMS != HEAD_DIM:
        loaded = tl.load(places, mask=is_key[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    else:
        loaded = tl.load(places)
    return loaded


@triton.jit
def _attend(q, k, v, is_seen, acc, m, total, scale_log2, IS_MASKED: tl.constexpr):
    """One step of the online softmax in base 2; m starts finite, so unseeing rows stay at zero."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if IS_MASKED:
        scores = tl.where(is_seen, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, axis=1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - m_new[:, None])
    decay = tl.exp2(m - m_new)
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, m_new, total


@triton.jit
def _attend_pages(
    q,  # (BLOCK_M, DIMS)
    acc,
    m,
    total,
    k_ptr,  # the cache's keys of one head
    v_ptr,
    table_ptr,  # (max_blocks,) of the request
    index,  # (BLOCK_M,) of the row's token; rises
    position,  # (BLOCK_M,) of the row's token in its own sequence
    is_row,  # (BLOCK_M,)
    first_index,  # of the tile
    end,  # behind the tile's last token
    prefix,
    slot_stride,
    scale_log2,
    window,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Keys of the prefix: [begin, full) is seen by every row, [full, stop) is masked."""
    stop = tl.minimum(prefix, end)
    begin = 0
    full = tl.minimum(prefix, first_index + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        lowest = tl.min(tl.where(is_row, position, 2147483647), axis=0) - window + 1
        begin = tl.maximum(lowest, 0) // BLOCK_N * BLOCK_N
        full = begin
    cols = tl.arange(0, BLOCK_N)
    for first in range(begin, full, BLOCK_N):
        places = _page_offsets(table_ptr, first, stop, slot_stride, PAGE, BLOCK_N)
        k = _load_keys(k_ptr, places, cols < stop, HEAD_DIM, DIMS, False)
        v = _load_keys(v_ptr, places, cols < stop, HEAD_DIM, DIMS, False)
        acc, m, total = _attend(q, k, v, is_row, acc, m, total, scale_log2, False)
    bound = tl.minimum(prefix, index + 1)
    for first in range(full, stop, BLOCK_N):
        keys = first + cols
        is_seen = keys[None, :] < bound[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > (position - window)[:, None])
        places = _page_offsets(table_ptr, first, stop, slot_stride, PAGE, BLOCK_N)
        k = _load_keys(k_ptr, places, keys < stop, HEAD_DIM, DIMS, True)
        v = _load_keys(v_ptr, places, keys < stop, HEAD_DIM, DIMS, True)
        acc, m, total = _attend(q, k, v, is_seen, acc, m, total, scale_log2, True)
    return acc, m, total


@triton.jit
def _attend_items(
    q,  # (BLOCK_M, DIMS)
    acc,
    m,
    total,
    k_ptr,  # keys of one head at the row of key `low`
    v_ptr,
    index,  # (BLOCK_M,) of the row's token
    start,  # (BLOCK_M,) of the row's item
    low,  # index of the tile's first item key
    end,  # behind the tile's last token
    k_stride,
    v_stride,
    scale_log2,
    window,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Keys of the tile's items, [low, end), always masked."""
    for first in range(low, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        is_seen = (keys[None, :] <= index[:, None]) & (keys[None, :] >= start[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > (index - window)[:, None])
        rows = (keys - low).to(tl.int64)
        k = _load_keys(k_ptr, rows * k_stride, keys < end, HEAD_DIM, DIMS, True)
        v = _load_keys(v_ptr, rows * v_stride, keys < end, HEAD_DIM, DIMS, True)
        acc, m, total = _attend(q, k, v, is_seen, acc, m, total, scale_log2, True)
    return acc, m, total


# Not specialised: a kernel for each divisibility of a length would be compiled between two steps.
# fmt: off
@triton.jit(do_not_specialize=["table_stride", "num_tiles", "kv_heads", "window"])
def multi_item_attention_kernel(
    q_ptr,  # (T, heads, HEAD_DIM)
    k_cache_ptr,  # (num_blocks, PAGE, kv_heads, HEAD_DIM)
    v_cache_ptr,  # like k_cache
    k_new_ptr,  # (T, kv_heads, HEAD_DIM)
    v_new_ptr,  # like k_new
    out_ptr,  # (T, heads, HEAD_DIM) contiguous
    item_start_ptr,  # (T,) int32
    tiles_ptr,  # (num_tiles, 8) int32
    tables_ptr,  # (R, max_blocks) int32
    q_stride, k_stride, v_stride,  # elements from one token to the next, of q, k_new and v_new
    table_stride,
    num_tiles,
    kv_heads,
    scale_log2,  # scale * log2(e), > 0
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # power of two, >= HEAD_DIM
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    HAS_ITEMS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Attend one tile of one key/value head."""
    program = tl.program_id(0)
    if HEADS_FIRST:
        tile, kv_head = program // kv_heads, program % kv_heads
    else:
        tile, kv_head = program % num_tiles, program // num_tiles
    tile_ptr = tiles_ptr + tile * 8
    q_row = tl.load(tile_ptr).to(tl.int64)  # 64-bit: rows * stride passes 2**31
    num_tokens, first_index = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    request, prefix = tl.load(tile_ptr + 3).to(tl.int64), tl.load(tile_ptr + 4)
    end = first_index + num_tokens

    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIMS)
    tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = tokens < num_tokens
    is_place = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q_places = (q_row + tokens) * q_stride + heads * HEAD_DIM
    q = tl.load(q_ptr + q_places[:, None] + dims[None, :], mask=is_place, other=0.0)
    index = first_index + tokens
    start, position = index, index  # an item's positions go on behind the prefix
    if HAS_ITEMS:
        start = tl.load(item_start_ptr + q_row + tokens, mask=is_row, other=0)
        position = tl.where(index >= prefix, prefix + index - start, index)

    acc = tl.zeros((BLOCK_M, DIMS), dtype=tl.float32)
    m = tl.full((BLOCK_M,), -1e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    dim = kv_head * HEAD_DIM
    acc, m, total = _attend_pages(
        q, acc, m, total, k_cache_ptr + dim, v_cache_ptr + dim, tables_ptr + request * table_stride,
        index, position, is_row, first_index, end, prefix, kv_heads * HEAD_DIM, scale_log2, window,
        HEAD_DIM, DIMS, PAGE, BLOCK_N, HAS_WINDOW,
    )
    if HAS_ITEMS:
        low, new_row = tl.load(tile_ptr + 5), tl.load(tile_ptr + 6).to(tl.int64)
        acc, m, total = _attend_items(
            q, acc, m, total, k_new_ptr + new_row * k_stride + dim,
            v_new_ptr + new_row * v_stride + dim, index, start, low, end, k_stride, v_stride,
            scale_log2, window, HEAD_DIM, DIMS, BLOCK_N, HAS_WINDOW,
        )

    out = acc / tl.where(total > 0, total, 1.0)[:, None]  # a row that saw nothing stays zero
    out_places = ((q_row + tokens) * (kv_heads * GROUP) + heads) * HEAD_DIM
    places = out_ptr + out_places[:, None] + dims[None, :]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=is_place)
# fmt: on


def launch_multi_item_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    out: Tensor,
    plan: MultiItemAttentionPlan,
    scale: float,
    window: int,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        q: (T, heads, head_dim), heads adjacent, tokens at multiples of 16 bytes.
        k_cache: (num_blocks, block_size, kv_heads, head_dim) contiguous. The CUDA kernel multiplies
            slots that no token sees by 0: they must be finite.
        v_cache: like k_cache.
        block_tables: (R, max_blocks) int32, unit inner stride.
        k_new: (T, kv_heads, head_dim), laid out like q; read where the plan has items.
        v_new: like k_new.
        out: (T, heads, head_dim) contiguous.
        plan: of this step.
        scale: > 0, multiplies the scores.
        window: 0 for none.
    """
    if plan.config.variant != "triton":
        _launch_cuda(q, k_cache, v_cache, block_tables, k_new, v_new, out, plan, scale)
        return
    heads, kv_heads, head_dim = q.shape[1], k_cache.shape[2], q.shape[2]
    multi_item_attention_kernel[(len(plan.tiles) * kv_heads,)](
        q,
        k_cache,
        v_cache,
        k_new,
        v_new,
        out,
        plan.item_start,
        plan.tiles,
        block_tables,
        q.stride(0),
        k_new.stride(0),
        v_new.stride(0),
        block_tables.stride(0),
        len(plan.tiles),
        kv_heads,
        scale * LOG2_E,
        window,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        PAGE=k_cache.shape[1],
        BLOCK_M=plan.config.block_m,
        BLOCK_N=plan.config.block_n,
        HEADS_FIRST=plan.heads_first,
        HAS_ITEMS=plan.has_items,
        HAS_WINDOW=window > 0,
        num_warps=plan.config.num_warps,
        num_stages=plan.config.num_stages,
    )


def cuda_source(
    config: MultiItemAttentionConfig, dtype: torch.dtype, group: int, block_size: int
) -> rtc.KernelSource:
    """The CUDA kernel as built for one shape of model."""
    macros = (
        ("GROUP", group),
        ("PAGE", block_size),
        ("IS_BF16", int(dtype == torch.bfloat16)),
        ("FAST_LOOP", int(config.variant == "fast")),
    )
    return rtc.KernelSource("multi_item_attention", macros, ("hopper",))


def _launch_cuda(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    out: Tensor,
    plan: MultiItemAttentionPlan,
    scale: float,
) -> None:
    num_tokens, heads, dim = q.shape
    num_blocks, page, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    source = cuda_source(plan.config, q.dtype, group, page)
    kernel = rtc.load_kernel(source, q.device, _CUDA_SMEM_BYTES)
    tokens = _CUDA_ROWS // 2 // group  # of a warpgroup
    slots, steps = (dim, kv_heads, num_blocks * page), (dim, kv_heads * dim)
    rows = (dim, kv_heads, k_new.shape[0])
    maps = [
        rtc.make_tensor_map(q, (dim, heads, num_tokens), (dim, q.stride(0)), (64, group, tokens)),
        rtc.make_tensor_map(k_cache, slots, steps, (64, 1, page)),
        rtc.make_tensor_map(v_cache, slots, steps, (64, 1, page)),
        rtc.make_tensor_map(k_new, rows, (dim, k_new.stride(0)), (64, 1, _ITEM_STEP)),
        rtc.make_tensor_map(v_new, rows, (dim, v_new.stride(0)), (64, 1, _ITEM_STEP)),
    ]
    tensors = (out, plan.item_start, plan.tiles, block_tables, plan.counter)
    num_tiles = len(plan.tiles)
    numbers = (num_tiles, kv_heads, block_tables.stride(0), int(plan.heads_first))
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    scale_log2 = scale * LOG2_E
    arguments = [
        *maps,
        *(rtc.pointer(tensor) for tensor in tensors),
        *(ctypes.c_int(number) for number in numbers),
        ctypes.c_float(scale_log2),
        ctypes.c_float(_RESCALE_LOG2 / scale_log2),
    ]
    rtc.launch(kernel, min(processors, num_tiles * kv_heads), _CUDA_THREADS, arguments)
