"""Parts of a token's keys as the CUDA kernels of attention over listed vectors take them.

Layout of `Part`: cuda/attention/sparse_attention_keys.cuh.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercel.kernels.attention.sparse_attention import KeyPart

ALIGNMENT: Final = 16  # bytes, of rows
_SCALE_ALIGNMENT: Final = 8
_NO_PART: Final = 3  # kind of a part that is not there


class Part(ctypes.Structure):
    """`Part` of the kernels."""

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
        ("magic", ctypes.c_uint32),
        ("shift", ctypes.c_uint32),
        ("has_long_ends", ctypes.c_int),
    )


def part_arguments(parts: Sequence[KeyPart]) -> tuple[Part, Part]:
    """One or two parts; a second one that is not there is all zeros."""
    first, second = (*map(_argument, parts), Part())[:2]
    return first, second


def _argument(part: KeyPart) -> Part:
    tensors = (part.cache, part.scales, part.listed, part.ends, part.tables, part.seq_ids)
    return Part(
        *(None if x is None else x.data_ptr() for x in tensors),
        *part.strides(),
        *part.numbers(),
        part.cache.shape[1],
        *division(part.cache.shape[1]),
        int(part.ends is not None and part.ends.dtype == torch.int64),
    )


def division(divisor: int) -> tuple[int, int]:
    """Factor and shift: n // divisor is the high word of n * factor >> shift, for n < 2**31.

    The factor is 0 for a divisor of 1.
    """
    bits = (divisor - 1).bit_length()
    return ((1 << 31 + bits) // divisor + 1, bits - 1) if divisor > 1 else (0, 0)


def list_kinds(parts: Sequence[KeyPart]) -> tuple[tuple[int, bool], ...]:
    """How parts list their keys, and whether lists are int64."""
    return tuple(
        (part.kind(), part.listed is not None and part.listed.dtype == torch.int64)
        for part in parts
    )


def list_macros(kinds: tuple[tuple[int, bool], ...]) -> tuple[tuple[str, int], ...]:
    """Macros of a kernel for one or two parts of `list_kinds`."""
    (kind0, long0), (kind1, long1) = (*kinds, (_NO_PART, False))[:2]
    return ("KIND0", kind0), ("KIND1", kind1), ("LONG0", int(long0)), ("LONG1", int(long1))


def rows_refusal(q: Tensor, parts: Sequence[KeyPart]) -> str:
    """Why the kernels do not read queries and parts; "" if they do."""
    if q.stride(2) != 1 or (q.data_ptr() | 2 * q.stride(0) | 2 * q.stride(1)) % ALIGNMENT:
        return "rows of q are not aligned"
    return next(filter(None, map(_part_refusal, parts)), "")


def _part_refusal(part: KeyPart) -> str:
    if part.scales is None or _is_between(part.cache, ALIGNMENT):
        return "vectors are not encoded in aligned rows"
    if _is_between(part.scales, _SCALE_ALIGNMENT):
        return "scales are not in aligned rows"
    lists = (part.tables, part.seq_ids)
    wanted = (torch.int32, torch.int64)
    if any(x is not None and x.dtype != d for x, d in zip(lists, wanted, strict=True)):
        return f"tables and rows are {[None if x is None else x.dtype for x in lists]}"
    return ""


def _is_between(rows: Tensor, alignment: int) -> bool:
    """Whether some row of bytes is not at a multiple of `alignment`."""
    return any(number % alignment for number in (rows.data_ptr(), *rows.stride()[:2]))
