"""Attention of DeepSeek-V4 by wgmma: cuda/attention/sparse_attention_tiles.cu, for Hopper.

A CTA takes a token and 64 heads, and decodes each of the token's keys once, in tiles of 64. For few
tokens a cluster of CTAs shares the tiles of a token, and adds up its sums in shared memory: no
workspace, no second launch, and a token's result depends on its own keys and on the size of the
cluster alone.

Floor: the listed vectors are read once, 584 bytes each, and 4 FLOPs per head, channel and key. A
tile takes the tensor cores of an SM 2,048 cycles.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tiercel.kernels.attention.sparse_attention_parts import (
    Part,
    list_kinds,
    list_macros,
    part_arguments,
    rows_refusal,
)
from tiercel.kernels.runtime import rtc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercel.kernels.attention.sparse_attention import KeyPart

CAPABILITY: Final = (9, 0)  # wgmma
HEAD_DIM, HEADS, KEYS = 512, 64, 64  # of vectors; heads and keys of a tile
_CHUNK: Final = 64 * 128  # bytes of 64 rows of 64 channels
_NOTE: Final = 544
# Up to so many tokens -> CTAs of a cluster, which share a token's keys: 64 tokens of Flash take
# 25.2 us in clusters of 2 and 37.0 alone, 128 tokens 49.5 and 39.6 (H200,
# results/sparse_attention_tiles_h200.json).
_CLUSTERS: Final = ((64, 2),)
_THREADS: Final = 512
_RESCALE_LOG2: Final = 8.0  # a maximum that grew by less keeps the scale of sums
SMEM_BYTES: Final = (8 + 9 * 2 + 2) * _CHUNK + 2 * _NOTE + 512 + 168


class _Work(ctypes.Structure):
    """`Work` of the kernel."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("part0", Part),
        ("part1", Part),
        ("heads", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("items", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
        ("most_growth", ctypes.c_float),
    )


def select_sparse_attention_tiles(num_tokens: int) -> int:
    """CTAs of a cluster, which share a token's keys. Pure."""
    return next((ctas for tokens, ctas in _CLUSTERS if num_tokens <= tokens), 1)


@functools.cache
def tiles_source(cluster: int, kinds: tuple[tuple[int, bool], ...]) -> rtc.KernelSource:
    """The kernel as built for one kind of call; kinds: as `list_kinds` gives them."""
    macros = (("IS_BF16", 1), ("CLUSTER", cluster), *list_macros(kinds))
    return rtc.KernelSource("sparse_attention_tiles", macros)


def tiles_refusal(q: Tensor, parts: Sequence[KeyPart]) -> str:
    """Why the kernel does not take arguments that the general one takes; "" if it does."""
    if q.is_cuda and torch.cuda.get_device_capability(q.device) != CAPABILITY:
        return "the GPU is not of the Hopper kind"
    if q.dtype != torch.bfloat16 or q.shape[2] != HEAD_DIM:
        return f"q is {tuple(q.shape)} {q.dtype}"
    return rows_refusal(q, parts)


def launch_sparse_attention_tiles(
    q: Tensor,
    parts: Sequence[KeyPart],
    sink: Tensor | None,
    scale: float,
    out: Tensor,
    cluster: int | None = None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    cluster: None for that of `select_sparse_attention_tiles`.
    """
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 0:
        return
    cluster = cluster or select_sparse_attention_tiles(num_tokens)
    kernel = rtc.load_kernel(tiles_source(cluster, list_kinds(parts)), q.device, SMEM_BYTES)
    groups = -(-num_heads // HEADS)
    items = num_tokens * groups
    scale_log2 = scale * math.log2(math.e)
    work = _Work(
        out.data_ptr(),
        None if sink is None else sink.data_ptr(),
        *part_arguments(parts),
        num_heads,
        groups,
        items,
        scale_log2,
        _RESCALE_LOG2 / scale_log2,
    )
    sizes = (HEAD_DIM, num_heads, num_tokens)
    q_map = rtc.make_tensor_map(q, sizes, (q.stride(1), q.stride(0)), (64, HEADS, 1))
    grid = items * cluster
    if cluster == 1:
        grid = min(grid, torch.cuda.get_device_properties(q.device).multi_processor_count)
    rtc.launch(kernel, grid, _THREADS, [q_map, work], is_dependent=rtc.is_dependent(q.device))
