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

from tiercel.kernels.runtime import rtc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercel.kernels.attention.sparse_attention import KeyPart

CAPABILITY: Final = (9, 0)  # clusters
HEAD_DIM, ROTARY, HEADS = 512, 64, 16  # of vectors; heads of a cluster
ALIGNMENT: Final = 16  # bytes, of rows
MOST_TOKENS: Final = 16
# A token's lists can hold so many. Between 192 and 8,320 keys of one token, at which this kernel
# takes less and more time than the general one, they meet about here.
MOST_KEYS: Final = 2304
# CTAs of a cluster, keys of a turn, CTAs of an SM. The same for all tokens and lists, so that a
# token has the same bits alone and among `MOST_TOKENS`.
LAUNCH: Final = (8, 48, 2)
NO_PART: Final = 3  # kind of a part that is not there
_THREADS: Final = 256
_WARPS: Final = 8
_OUT = HEAD_DIM + 8  # floats of a row of sums


_POINTERS: Final = ("cache", "scales", "list", "ends", "tables", "rows")
_STRIDES: Final = ("block", "entry", "scale_block", "scale_entry")  # bytes
_NUMBERS: Final = ("num_keys", "list_stride", "table_stride", "per_block")


class _Part(ctypes.Structure):
    """`Part` of the kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("cache", "scales", "list", "ends", "tables", "rows")
        ),
        *((name, ctypes.c_int64) for name in ("block", "entry", "scale_block", "scale_entry")),
        *(
            (name, ctypes.c_int)
            for name in ("num_keys", "list_stride", "table_stride", "per_block")
        ),
    )


def decode_source(
    config: tuple[int, int, int], kinds: tuple[int, int], are_long: tuple[bool, bool]
) -> rtc.KernelSource:
    """The kernel as built for one kind of call.

    config: as `LAUNCH`. kinds: how the parts list keys, `NO_PART` for a
    second part that is not there. are_long: whether lists are int64.
    """
    cluster, tile, ctas = config
    macros = (
        ("IS_BF16", 1),
        ("TILE", tile),
        ("CLUSTER", cluster),
        ("CTAS", ctas),
        ("KIND0", kinds[0]),
        ("KIND1", kinds[1]),
        ("LONG0", int(are_long[0])),
        ("LONG1", int(are_long[1])),
    )
    return rtc.KernelSource("sparse_attention_decode", macros)


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
    if q.stride(2) != 1 or (q.data_ptr() | 2 * q.stride(0) | 2 * q.stride(1)) % ALIGNMENT:
        return "rows of q are not aligned"
    return next(filter(None, map(_part_refusal, parts)), "")


def _part_refusal(part: KeyPart) -> str:
    rows = (part.cache.data_ptr(), *part.cache.stride()[:2])
    if part.scales is None or any(number % ALIGNMENT for number in rows):
        return "vectors are not encoded in aligned rows"
    lists = (part.ends, part.tables, part.seq_ids)
    wanted = (torch.int64, torch.int32, torch.int64)
    if any(x is not None and x.dtype != d for x, d in zip(lists, wanted, strict=True)):
        return f"ends, tables and rows are {[None if x is None else x.dtype for x in lists]}"
    return ""


def _part(part: KeyPart | None) -> _Part:
    if part is None:
        return _Part()
    tensors = (part.cache, part.scales, part.listed, part.ends, part.tables, part.seq_ids)
    return _Part(
        *(None if x is None else x.data_ptr() for x in tensors),
        *part.strides(),
        *part.numbers(),
        part.cache.shape[1],
    )


@functools.cache
def _source(
    config: tuple[int, int, int], kinds: tuple[int, ...], are_long: tuple[bool, ...]
) -> rtc.KernelSource:
    missing = 2 - len(kinds)
    first, second = (*kinds, *(NO_PART,) * missing), (*are_long, *(False,) * missing)
    return decode_source(config, (first[0], first[1]), (second[0], second[1]))


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
    kinds = tuple(part.kind() for part in parts)
    are_long = tuple(part.listed is not None and part.listed.dtype == torch.int64 for part in parts)
    kernel = rtc.load_kernel(_source(config, kinds, are_long), q.device, smem_bytes(config[1]))
    rtc.launch(
        kernel,
        num_heads // HEADS * config[0],
        _THREADS,
        [
            *map(rtc.pointer, (out, q)),
            ctypes.c_void_p(None) if sink is None else rtc.pointer(sink),
            *(_part(part) for part in (*parts, *(None,) * (2 - len(parts)))),
            *(ctypes.c_int64(2 * stride) for stride in q.stride()[:2]),
            ctypes.c_int(num_heads),
            ctypes.c_float(scale * math.log2(math.e)),
        ],
        grid_y=num_tokens,
        is_dependent=rtc.is_dependent(q.device),
    )
