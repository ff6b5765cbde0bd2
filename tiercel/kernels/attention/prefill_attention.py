"""Prefill attention on the device: plain causal, chunked and multi-item, over the paged cache.

A request has a prefix of P tokens (a plain one: all its tokens), whose keys are in pages. Items may
follow the prefix; their keys are in this step's projections. Token i sees key k iff k <= i and
(k < P or k >= item_start[i]).

Tiles: see prefill_attention_tiles.py. A tile walks its own items and then the pages it sees. The
keys between them are skipped, and only steps that a bound cuts are masked.

Two kernels read one table. cuda/prefill_attention.cu: Hopper, head_dim 128, 16 bits, no window
and no soft-cap. prefill_attention_triton.py: everything else. Floor of both: 4 * head_dim
operations for every visible pair of a token's head and a key, at the rate of a matrix product.

Where tiles were cut into parts, both write float32 results of parts and the base-2 logarithms of
their sums, which a kernel of that file merges.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor

from tiercel.kernels.attention.prefill_attention_tiles import (
    PrefillAttentionConfig,
    PrefillAttentionPlan,
)
from tiercel.kernels.attention.prefill_attention_triton import (
    merge_parts_kernel,
    prefill_attention_kernel,
)
from tiercel.kernels.runtime import rtc

LOG2_E = 1.4426950408889634

# Shapes that the CUDA kernel is built for; see the top of its file.
CUDA_CAPABILITY = (9, 0)
CUDA_HEAD_DIM = 128
CUDA_GROUPS = (1, 2, 4, 8)
CUDA_BLOCK_SIZES = (16, 32, 64, 128)
_CUDA_ROWS, _CUDA_THREADS, _CUDA_SMEM_BYTES = 128, 384, 230_400
_MERGE_ROWS = 8  # of a program of the merge
_ITEM_STEP = 64  # WN of the kernel: keys of an item step
_RESCALE_LOG2 = 8.0  # a maximum that grew by less keeps the scale: sums stay below 2**8 times it
# Exponentials before the new maximum is known, redone where it grew: from 2048 keys on 2% faster,
# at 512 4% slower (H200, attention_study section 3).
_FAST_FROM_KEYS = 2048

# head_dim up to -> rows, keys, warps, stages of 16-bit types. Chosen by their spills
# (sm_90, Triton 3.6): none up to 128, where 4 warps spill 336 bytes; 48 bytes at 256. Not swept
# on a device yet: benchmarks/prefill_attention.py --suite sweep.
_TRITON_TILES = (
    (64, (128, 64, 4, 3)),
    (128, (128, 64, 8, 2)),
    (256, (128, 64, 8, 2)),
    (512, (64, 32, 8, 1)),
)
MAX_HEAD_DIM = 512
_TRITON_FLOAT32 = (32, 16, 4, 1)  # no tensor cores; 32 keys spill 8 KB at head_dim 256


def select_prefill_attention(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    window: int,
    softcap: float,
    longest: int,
    capability: tuple[int, int],
) -> PrefillAttentionConfig:
    """Choose the kernel. Pure: equal in every process, readable by a test.

    Args:
        dtype: of queries and cache.
        head_dim: elements of a head, at most MAX_HEAD_DIM.
        group: query heads of a key/value head.
        block_size: tokens of a page.
        window: 0 for none, or for one that no sequence reaches.
        softcap: 0 for none.
        longest: the most page keys of a request.
        capability: of the device, (major, minor).
    """
    is_built = (
        capability == CUDA_CAPABILITY
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim == CUDA_HEAD_DIM
        and group in CUDA_GROUPS
        and block_size in CUDA_BLOCK_SIZES
    )
    if is_built and not window and not softcap:
        variant: Literal["plain", "fast"] = "fast" if longest >= _FAST_FROM_KEYS else "plain"
        return PrefillAttentionConfig(variant, _CUDA_ROWS, 128, 12, 5)
    if dtype == torch.float32:
        rows, keys, warps, stages = _TRITON_FLOAT32
    else:
        rows, keys, warps, stages = next(t for limit, t in _TRITON_TILES if head_dim <= limit)
    rows = max(rows, triton.next_power_of_2(group))  # a tile holds at least one token
    return PrefillAttentionConfig("triton", rows, keys, warps, stages)


@dataclass(frozen=True, slots=True)
class PartBuffers:
    """Memory for the results of parts, which are merged.

    Attributes:
        results: (num_part_rows, heads, head_dim) float32.
        sums: (num_part_rows, heads) float32.
        lse: (T, heads) float32, or None where it is not requested.
    """

    results: Tensor
    sums: Tensor
    lse: Tensor | None


def launch_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    out: Tensor,
    plan: PrefillAttentionPlan,
    scale: float,
    window: int,
    softcap: float = 0.0,
    buffers: PartBuffers | None = None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        q: (T, heads, head_dim), heads adjacent, tokens at multiples of 16 bytes.
        k_cache: (num_blocks, block_size, kv_heads, head_dim) contiguous; slots that no token sees
            may hold NaN.
        v_cache: like k_cache.
        block_tables: (R, max_blocks) int32, unit inner stride.
        k_new: (T, kv_heads, head_dim), laid out like q; read where the plan has items.
        v_new: like k_new.
        out: (T, heads, head_dim) contiguous.
        plan: of this step.
        scale: > 0, multiplies the scores.
        window: 0 for none.
        softcap: 0 for none; of the Triton kernel.
        buffers: where the plan has parts.
    """
    tensors = (q, k_cache, v_cache, block_tables, k_new, v_new)
    if plan.config.variant != "triton":
        _launch_cuda(*tensors, out, plan, scale, buffers)
    else:
        _launch_triton(*tensors, out, plan, scale, window, softcap, buffers)
    if buffers is not None:
        _, heads, head_dim = q.shape
        rows, dims = len(q) * heads, max(16, triton.next_power_of_2(head_dim))
        merge_parts_kernel[(triton.cdiv(rows, _MERGE_ROWS),)](
            buffers.results,
            buffers.sums,
            plan.parts,
            out,
            buffers.lse,
            rows,
            heads,
            plan.part_stride,
            HEAD_DIM=head_dim,
            DIMS=dims,
            BLOCK=_MERGE_ROWS,
            num_warps=4,
        )


def _launch_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    out: Tensor,
    plan: PrefillAttentionPlan,
    scale: float,
    window: int,
    softcap: float,
    buffers: PartBuffers | None,
) -> None:
    heads, kv_heads, head_dim = q.shape[1], k_cache.shape[2], q.shape[2]
    prefill_attention_kernel[(len(plan.tiles) * kv_heads,)](
        q,
        k_cache,
        v_cache,
        k_new,
        v_new,
        out if buffers is None else buffers.results,
        None if buffers is None else buffers.sums,
        plan.item_start,
        plan.tiles,
        plan.counter,
        block_tables,
        q.stride(0),
        k_new.stride(0),
        v_new.stride(0),
        block_tables.stride(0),
        kv_heads,
        (softcap or scale) * LOG2_E,
        scale / softcap if softcap else None,
        window,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        PAGE=k_cache.shape[1],
        BLOCK_M=plan.config.block_m,
        BLOCK_N=plan.config.block_n,
        HAS_ITEMS=plan.has_items,
        HAS_WINDOW=window > 0,
        IS_PART=buffers is not None,
        num_warps=plan.config.num_warps,
        num_stages=plan.config.num_stages,
    )


def cuda_source(
    config: PrefillAttentionConfig,
    dtype: torch.dtype,
    group: int,
    block_size: int,
    *,
    is_part: bool = False,
) -> rtc.KernelSource:
    """The CUDA kernel as built for one shape of model; `is_part`: for results of parts."""
    macros = (
        ("GROUP_HEADS", group),
        ("PAGE", block_size),
        ("IS_BF16", int(dtype == torch.bfloat16)),
        ("FAST_LOOP", int(config.variant == "fast")),
        ("IS_PART", int(is_part)),
    )
    return rtc.KernelSource("prefill_attention", macros)


def _launch_cuda(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    out: Tensor,
    plan: PrefillAttentionPlan,
    scale: float,
    buffers: PartBuffers | None,
) -> None:
    num_tokens, heads, dim = q.shape
    num_blocks, page, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    source = cuda_source(plan.config, q.dtype, group, page, is_part=buffers is not None)
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
    results = (out, out) if buffers is None else (buffers.results, buffers.sums)
    tensors = (*results, plan.item_start, plan.tiles, block_tables, plan.counter)
    numbers = (kv_heads, block_tables.stride(0))
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    scale_log2 = scale * LOG2_E
    arguments = [
        *maps,
        *(rtc.pointer(tensor) for tensor in tensors),
        *(ctypes.c_int(number) for number in numbers),
        ctypes.c_float(scale_log2),
        ctypes.c_float(_RESCALE_LOG2 / scale_log2),
    ]
    rtc.launch(kernel, min(processors, len(plan.tiles) * kv_heads), _CUDA_THREADS, arguments)
