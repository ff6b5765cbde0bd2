"""Attention of DeepSeek-V4 for few tokens in one launch: cuda/attention/sparse_attention_decode.cu.

A cluster of CTAs takes one token and 16 heads, and shares the token's keys in units of 16; its CTAs
add up their sums in order through each other's shared memory. So there is no workspace and no
second launch, and a token's result depends on its own keys and on the size of the cluster alone.

Floor: the listed vectors are read once, 584 bytes each; a group of 16 heads reads them from the L2
again.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tiercel.kernels.attention.sparse_attention_parts import (
    list_kinds,
    list_macros,
    part_arguments,
    rows_refusal,
)
from tiercel.kernels.runtime import rtc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercel.kernels.attention.sparse_attention import KeyPart

CAPABILITY: Final = (9, 0)  # clusters
HEAD_DIM, ROTARY, HEADS = 512, 64, 16  # of vectors; heads of a cluster
MOST_TOKENS: Final = 16
# A token's lists can hold so many. Between 192 and 8,320 keys of one token, at which this kernel
# takes less and more time than the general one, they meet about here.
MOST_KEYS: Final = 2304
# CTAs of a cluster, keys of a turn, CTAs of an SM. The same for all tokens and lists, so that a
# token has the same bits alone and among `MOST_TOKENS`.
LAUNCH: Final = (8, 48, 2)
_THREADS: Final = 256
_WARPS: Final = 8
_OUT = HEAD_DIM + 8  # floats of a row of sums


@functools.cache
def decode_source(
    config: tuple[int, int, int], kinds: tuple[tuple[int, bool], ...]
) -> rtc.KernelSource:
    """The kernel as built for one kind of call.

    config: as `LAUNCH`. kinds: of the parts' lists, as `list_kinds` gives them.
    """
    cluster, tile, ctas = config
    macros = (("IS_BF16", 1), ("TILE", tile), ("CLUSTER", cluster), ("CTAS", ctas))
    return rtc.KernelSource("sparse_attention_decode", (*macros, *list_macros(kinds)))


def smem_bytes(tile: int) -> int:
    """Dynamic shared memory of a CTA, as the kernel lays it out."""
    partial = max(_WARPS * tile // 8 * 512, HEADS * _OUT * 4)
    return partial + tile // 8 * 256 + tile * 16 + 2 * _WARPS * HEADS * 4


def decode_refusal(q: Tensor, parts: Sequence[KeyPart]) -> str:
    """Why the kernel does not take arguments that the general one takes; "" if it does."""
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < CAPABILITY:
        return "the GPU has no clusters"
    num_keys = sum(part.num_keys for part in parts)
    if q.shape[0] > MOST_TOKENS or num_keys > MOST_KEYS:
        return f"{q.shape[0]} tokens, {num_keys} keys"
    if q.dtype != torch.bfloat16 or q.shape[2] != HEAD_DIM or q.shape[1] % HEADS:
        return f"q is {tuple(q.shape)} {q.dtype}"
    return rows_refusal(q, parts)


def launch_sparse_attention_decode(
    q: Tensor,
    parts: Sequence[KeyPart],
    sink: Tensor | None,
    scale: float,
    out: Tensor,
    config: tuple[int, int, int] = LAUNCH,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated."""
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 0:
        return
    source = decode_source(config, list_kinds(parts))
    kernel = rtc.load_kernel(source, q.device, smem_bytes(config[1]))
    rtc.launch(
        kernel,
        num_heads // HEADS * config[0],
        _THREADS,
        [
            *map(rtc.pointer, (out, q)),
            ctypes.c_void_p(None) if sink is None else rtc.pointer(sink),
            *part_arguments(parts),
            *(ctypes.c_int64(2 * stride) for stride in q.stride()[:2]),
            ctypes.c_int(num_heads),
            ctypes.c_float(scale * math.log2(math.e)),
        ],
        grid_y=num_tokens,
        is_dependent=rtc.is_dependent(q.device),
    )
