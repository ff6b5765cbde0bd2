"""Products by PyTorch: by cuBLAS on a GPU, and on a CPU weights as 4-bit planes.

The planes are those of PyTorch's weight-only matmul.

That operator holds w = (q - 8) * scale + zero with q of 4 bits and one scale and zero per 32
inputs, the group of every type here: so 4-bit types are one plane, exactly. A 5- or 8-bit type is
two planes along the input, q = 16 * high + low, multiplied by the activations twice side by side: x
@ w = [x, x] @ [high, low]. Only scale and zero are rounded (to bfloat16), so a weight keeps about 8
significant bits.

Measured on 2 cores with AVX512 (torch 2.13): one row through 1536 x 576 takes 0.028 ms in bfloat16
planes, 0.12 ms dense bfloat16, 0.26 ms dense float32; with float32 or float16 scales the operator
is 30 times slower (2.0 and 0.8 ms), so planes are used in bfloat16 only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

GROUP = 32
# Rows widened to int32 together; a multiple of the 64 that the operator interleaves.
PACK_ROWS = 4096


class Int4Planes(Struct, frozen=True):
    """A matrix (out, in) as `count` planes side by side.

    Attributes:
        packed: the operator's own layout of (out, count * in) 4-bit codes.
        scale_zero: (count * in / 32, out, 2) bfloat16.
        count: 1, or 2 for types above 4 bits.
        shape: (out, in).
    """

    packed: Tensor
    scale_zero: Tensor
    count: int
    shape: tuple[int, int]


class _Codes(Struct, frozen=True):
    """Weights scale * q + zero: q (out, in) uint8; scale, zero (out, in / 32) float32."""

    q: Tensor
    scale: Tensor
    zero: Tensor
    bits: int


def _nibbles(qs: Tensor) -> Tensor:
    """(..., 16) bytes to (..., 32) codes: low nibbles, then high nibbles."""
    return torch.cat((qs & 15, qs >> 4), dim=-1)


def _half(data: Tensor, start: int) -> Tensor:
    """The fp16 field at byte `start` of each block, as float32."""
    return data[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _fifth_bits(qh: Tensor) -> Tensor:
    """(..., 4) bytes to (..., 32) bits, little-endian."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((qh.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def _read_32(name: str, data: Tensor) -> _Codes:
    """Blocks of 32 weights: data (out, blocks, block_bytes)."""
    scale = _half(data, 0)
    if name == "Q4_0":
        return _Codes(_nibbles(data[..., 2:]).flatten(1), scale, -8 * scale, 4)
    if name == "Q4_1":
        return _Codes(_nibbles(data[..., 4:]).flatten(1), scale, _half(data, 2), 4)
    if name == "Q5_0":
        q = _nibbles(data[..., 6:]) + 16 * _fifth_bits(data[..., 2:6])
        return _Codes(q.flatten(1), scale, -16 * scale, 5)
    if name == "Q5_1":
        q = _nibbles(data[..., 8:]) + 16 * _fifth_bits(data[..., 4:8])
        return _Codes(q.flatten(1), scale, _half(data, 2), 5)
    q = data[..., 2:] ^ 128  # Q8_0: int8 as unsigned, 128 higher
    return _Codes(q.flatten(1), scale, -128 * scale, 8)


def _read_256(name: str, data: Tensor) -> _Codes:
    """Q4_K and Q5_K: data (out, blocks, block_bytes), eight groups of 32 in a block."""
    b = data[..., 4:16]
    scale = torch.cat((b[..., :4] & 63, (b[..., 8:] & 15) | (b[..., :4] >> 6 << 4)), -1).float()
    minimum = torch.cat((b[..., 4:8] & 63, (b[..., 8:] >> 4) | (b[..., 4:8] >> 6 << 4)), -1).float()
    qs = data[..., 16 if name == "Q4_K" else 48 :].unflatten(-1, (4, 32))
    q = torch.stack((qs & 15, qs >> 4), dim=-2).flatten(-3)  # (out, blocks, 256)
    if name == "Q5_K":
        shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
        q = q + 16 * ((data[..., 16:48].unsqueeze(-2) >> shifts) & 1).flatten(-2)
    scale = (scale * _half(data, 0).unsqueeze(-1)).flatten(1)
    zero = (minimum * -_half(data, 2).unsqueeze(-1)).flatten(1)
    return _Codes(q.flatten(1), scale, zero, 4 if name == "Q4_K" else 5)


READERS = dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), _read_32)
READERS |= dict.fromkeys(("Q4_K", "Q5_K"), _read_256)
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176}
PLANES = {"Q4_0": 1, "Q4_1": 1, "Q4_K": 1, "Q5_0": 2, "Q5_1": 2, "Q5_K": 2, "Q8_0": 2}


def pack_planes(parts: Sequence[tuple[str, Tensor]]) -> Int4Planes:
    """Repack matrices on the CPU, output rows end to end.

    Args:
        parts: name and data of each: a type of `PLANES`, all of one count; (out, row_bytes) uint8
            as the file stores it, out a multiple of 16.
    """
    planes = [_plane_codes(name, data) for name, data in parts]
    # The operator interleaves up to 64 rows, so codes are joined, not its results.
    q = torch.cat([codes.q for codes in planes])
    convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    packed = torch.cat([convert(rows.int(), 1) for rows in q.split(PACK_ROWS)])
    pairs = [torch.stack((codes.scale, codes.zero), dim=-1) for codes in planes]
    scale_zero = torch.cat(pairs).transpose(0, 1).contiguous().bfloat16()
    count = PLANES[parts[0][0]]
    return Int4Planes(packed, scale_zero, count, (q.shape[0], q.shape[1] // count))


def _plane_codes(name: str, data: Tensor) -> _Codes:
    """A matrix as 4-bit codes of the operator, planes side by side: w = (q - 8) * scale + zero."""
    codes = READERS[name](name, data.unflatten(1, (-1, BLOCK_BYTES[name])))
    if PLANES[name] == 1:
        return _Codes(codes.q, codes.scale, codes.zero + 8 * codes.scale, 4)
    # high is stored so that its own offset (q - 8) takes up as much of the zero as it can.
    offset = 8 if codes.bits == 5 and name != "Q5_0" else (0 if codes.bits == 8 else 7)
    high = (codes.q >> 4) + offset
    low_zero = codes.zero + 8 * codes.scale - 16 * (offset - 8) * codes.scale
    return _Codes(
        torch.cat((high, codes.q & 15), dim=1),
        torch.cat((16 * codes.scale, codes.scale), dim=1),
        torch.cat((torch.zeros_like(low_zero), low_zero), dim=1),
        4,
    )


def dense_matmul(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write x @ weight^T by cuBLAS, on a resident 16-bit or 32-bit copy of the weights.

    Args:
        x: (rows, in).
        weight: (out, in), dtype of x.
        out: (rows, out), dtype of x, or float32: then nothing is rounded after the accumulation.
    """
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


def int4_matmul(x: Tensor, planes: Int4Planes) -> Tensor:
    """X (rows, in) bfloat16 contiguous -> (rows, out) bfloat16."""
    if planes.count == 2:
        x = torch.cat((x, x), dim=1)
    out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x, planes.packed, GROUP, planes.scale_zero
    )
    return out
