"""Every block format of GGML files, decoded with PyTorch operators on any device.

A row is whole blocks; a block is `block_weights` weights in `block_bytes` bytes. One function per
type turns (n, block_bytes) uint8 into (n, block_weights) float32; products are formed in the order
written here, each operator rounding once, so the result is bit-exact with the `gguf` package. A
number is a byte offset, d, dmin and m are fp16, l is a byte inside a group, >> and & act on bytes,
lo and hi are the two nibbles of a byte.

    F32, F16, BF16   one weight
    Q4_0    18  0 d, 2 qs[16]                     weight l = lo, l+16 = hi;  d * (q - 8)
    Q4_1    20  0 d, 2 m, 4 qs[16]                the same nibbles;  d * q + m
    Q5_0    22  0 d, 2 qh u32, 6 qs[16]           q = nibble + 16 * (bit i of qh);  d * (q - 16)
    Q5_1    24  0 d, 2 m, 4 qh u32, 8 qs[16]      q as Q5_0;  d * q + m
    Q8_0    34  0 d, 2 qs[32] int8                d * q
    IQ4_NL  18  0 d, 2 qs[16]                     nibbles as Q4_0;  d * V[q]
    Q2_K    84  0 scales[16], 16 qs[64], 80 d, 82 dmin
                half h, shift s, l: weight 128h + 32s + l has q = qs[32h + l] >> 2s & 3;
                group j of 16: d * (scales[j] & 15) * q - dmin * (scales[j] >> 4)
    Q3_K   110  0 hmask[32], 32 qs[64], 96 scales[12], 108 d
                q = (two bits as Q2_K) - 4 * (1 - (hmask[l] >> (4h + s) & 1));
                group j of 16: scale = nibble j of scales[0..7], all lo first, below
                scales[8 + j % 4] >> 2 * (j / 4) & 3;  d * (scale - 32) * q
    Q4_K   144  0 d, 2 dmin, 4 scales[12], 16 qs[128]
                group c of 32 bytes: lo = weights 64c..64c+31, hi = the next 32;
                sub-block j of 32: (d * sc) * q - (dmin * mn), of 6 bits from b = scales:
                j < 4:  sc = b[j] & 63, mn = b[j+4] & 63
                j >= 4: sc = b[j+4] & 15 | b[j-4] >> 6 << 4, mn = b[j+4] >> 4 | b[j] >> 6 << 4
    Q5_K   176  0 d, 2 dmin, 4 scales[12], 16 qh[32], 48 qs[128]
                as Q4_K with q = nibble + 16 * (qh[l] >> j & 1)
    Q6_K   210  0 ql[128], 128 qh[64], 192 sc[16] int8, 208 d
                half h, quarter i, l: weight 128h + 32i + l has its low four bits in
                ql[64h + 32(i % 2) + l] (lo for i < 2, else hi), its high two in
                qh[32h + l] >> 2i & 3;  (d * sc[index / 16]) * (q - 32)
    IQ4_XS 136  0 d, 2 scales_h u16, 4 scales_l[4], 8 qs[128]
                sub-block j of 32: 16 bytes of nibbles as Q4_0, s = nibble j of scales_l
                (lo, hi, lo, ...) | (scales_h >> 2j & 3) << 4;  d * (s - 32) * V[q]
    MXFP4   17  0 e, 1 qs[16]                     nibbles as Q4_0;  2^(e - 128) * (2 * E2M1[q])
    IQ2_XXS 66  0 d, 2 for each sub-block j of 32: index[4], u32 w
                group g of 8: magnitudes of entry index[g] of a table; signs (1 for -) from bits
                7g..7g+6 of w, the eighth makes their number even;  d * (0.5 + (w >> 28)) / 4 * q

This is the plain way: it makes float32 temporaries (bounded by chunks) and no claim on speed. d
stays fp16 bits until it is widened; fp16 subnormals are common in Q6_K files and must not be
flushed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tiercel.ops.block_quantize_torch import e2m1_values
from tiercel.quant_types import IQ2_XXS_GRID

# About 24 bytes of temporaries per weight at the worst (Q5_K): 48 MB.
CHUNK_WEIGHTS = 1 << 21
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def launch_dequantize(data: Tensor, type_name: str, out: Tensor) -> None:
    """Decode `data` (out, row_bytes) uint8 into `out` (out, in), rounding from float32 once.

    Rows of both may be strided; the op has checked shapes, types and devices.
    """
    decode, block_weights, block_bytes = DECODERS[type_name]
    blocks = data.unflatten(1, (-1, block_bytes))
    target = out.unflatten(1, (-1, block_weights))
    num_rows, num_blocks = blocks.shape[:2]
    if not num_rows or not num_blocks:
        return
    cols = min(num_blocks, max(1, CHUNK_WEIGHTS // block_weights))
    rows = max(1, CHUNK_WEIGHTS // (cols * block_weights))
    for row in range(0, num_rows, rows):
        for col in range(0, num_blocks, cols):
            chunk = blocks[row : row + rows, col : col + cols]
            weights = decode(chunk.reshape(-1, block_bytes))
            part = target[row : row + rows, col : col + cols]
            part.copy_(weights.view(part.shape))


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 field at byte `start`, widened: (n, 1) float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """(n, g, w) bytes to (n, g, 2, w): low nibbles, then high nibbles."""
    return torch.stack((packed & 15, packed >> 4), dim=2)


def _fields(packed: Tensor, num_fields: int, width: int) -> Tensor:
    """(n, g, w) bytes to (n, g, num_fields, w): fields of `width` bits, lowest first."""
    shifts = width * torch.arange(num_fields, dtype=torch.uint8, device=packed.device)
    return (packed[:, :, None, :] >> shifts[:, None]) & ((1 << width) - 1)


def _nibbles32(qs: Tensor) -> Tensor:
    """(n, 16) bytes to (n, 32): all low nibbles, then all high nibbles."""
    return torch.cat((qs & 15, qs >> 4), dim=1)


def _fives32(qh: Tensor, qs: Tensor) -> Tensor:
    """(n, 4) and (n, 16) bytes to (n, 32) five-bit integers."""
    shifts = torch.arange(8, dtype=torch.uint8, device=qh.device)
    bits = ((qh[:, :, None] >> shifts) & 1).flatten(1)
    return _nibbles32(qs) | bits << 4


@functools.cache  # a graph can be captured around a look-up, not around a copy to the device
def _iq4_table(device: torch.device) -> Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.float32, device=device)


def _iq4_values(q: Tensor) -> Tensor:
    """(...) four-bit integers to (...) float32 from the table V."""
    values: Tensor = _iq4_table(q.device)[q.long()]
    return values


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(n, 12) bytes of Q4_K or Q5_K to sc and mn, (n, 8) float32 each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return scales.float(), mins.float()


def decode_f32(blocks: Tensor) -> Tensor:
    """(n, 4) to (n, 1)."""
    return blocks.contiguous().view(torch.float32)


def decode_f16(blocks: Tensor) -> Tensor:
    """(n, 2) to (n, 1)."""
    return blocks.contiguous().view(torch.float16).float()


def decode_bf16(blocks: Tensor) -> Tensor:
    """(n, 2) to (n, 1)."""
    return blocks.contiguous().view(torch.bfloat16).float()


def decode_q4_0(blocks: Tensor) -> Tensor:
    """(n, 18) to (n, 32): d * (q - 8)."""
    return _half(blocks, 0) * (_nibbles32(blocks[:, 2:]).float() - 8)


def decode_q4_1(blocks: Tensor) -> Tensor:
    """(n, 20) to (n, 32): d * q + m."""
    return _half(blocks, 0) * _nibbles32(blocks[:, 4:]).float() + _half(blocks, 2)


def decode_q5_0(blocks: Tensor) -> Tensor:
    """(n, 22) to (n, 32): d * (q - 16)."""
    return _half(blocks, 0) * (_fives32(blocks[:, 2:6], blocks[:, 6:]).float() - 16)


def decode_q5_1(blocks: Tensor) -> Tensor:
    """(n, 24) to (n, 32): d * q + m."""
    q = _fives32(blocks[:, 4:8], blocks[:, 8:])
    return _half(blocks, 0) * q.float() + _half(blocks, 2)


def decode_q8_0(blocks: Tensor) -> Tensor:
    """(n, 34) to (n, 32): d * q."""
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).to(torch.float32)


def decode_iq4_nl(blocks: Tensor) -> Tensor:
    """(n, 18) to (n, 32): d * V[q]."""
    return _half(blocks, 0) * _iq4_values(_nibbles32(blocks[:, 2:]))


def decode_q2_k(blocks: Tensor) -> Tensor:
    """(n, 84) to (n, 256): d * (scales[j] & 15) * q - dmin * (scales[j] >> 4)."""
    packed = blocks[:, :16]
    scales = _half(blocks, 80) * (packed & 15).float()
    mins = _half(blocks, 82) * (packed >> 4).float()
    q = _fields(blocks[:, 16:80].unflatten(1, (2, 32)), 4, 2).reshape(-1, 16, 16)
    return (scales[:, :, None] * q.float() - mins[:, :, None]).flatten(1)


def decode_q3_k(blocks: Tensor) -> Tensor:
    """(n, 110) to (n, 256): d * (scale - 32) * q."""
    packed = blocks[:, 96:108]
    low = _nibbles32(packed[:, :8])
    high = _fields(packed[:, None, 8:], 4, 2).flatten(1)
    scales = _half(blocks, 108) * ((low | high << 4).float() - 32)
    q = _fields(blocks[:, 32:96].unflatten(1, (2, 32)), 4, 2).flatten(1)
    bits = _fields(blocks[:, None, :32], 8, 1).flatten(1)
    # The third bit is stored inverted: q | bit << 2 is four above the value.
    values = (q | bits << 2).float() - 4
    return (scales[:, :, None] * values.view(-1, 16, 16)).flatten(1)


def decode_q4_k(blocks: Tensor) -> Tensor:
    """(n, 144) to (n, 256): (d * sc) * q - (dmin * mn)."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    scales, mins = _half(blocks, 0) * scales, _half(blocks, 2) * mins
    q = _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).reshape(-1, 8, 32)
    return (scales[:, :, None] * q.float() - mins[:, :, None]).flatten(1)


def decode_q5_k(blocks: Tensor) -> Tensor:
    """(n, 176) to (n, 256): (d * sc) * q - (dmin * mn)."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    scales, mins = _half(blocks, 0) * scales, _half(blocks, 2) * mins
    q = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).reshape(-1, 8, 32)
    q = q | _fields(blocks[:, None, 16:48], 8, 1)[:, 0] << 4
    return (scales[:, :, None] * q.float() - mins[:, :, None]).flatten(1)


def decode_q6_k(blocks: Tensor) -> Tensor:
    """(n, 210) to (n, 256): (d * sc) * (q - 32)."""
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).flatten(1)
    high = _fields(blocks[:, 128:192].unflatten(1, (2, 32)), 4, 2).flatten(1)
    q = (low | high << 4).view(-1, 16, 16)
    return (scales[:, :, None] * (q.float() - 32)).flatten(1)


def decode_iq4_xs(blocks: Tensor) -> Tensor:
    """(n, 136) to (n, 256): d * (s - 32) * V[q]."""
    low = _fields(blocks[:, 4:8, None], 2, 4).flatten(1)
    high = _fields(blocks[:, 2:4, None], 4, 2).flatten(1)
    scales = _half(blocks, 0) * ((low | high << 4).float() - 32)
    q = _nibbles(blocks[:, 8:].unflatten(1, (8, 16))).flatten(2)
    return (scales[:, :, None] * _iq4_values(q)).flatten(1)


def decode_mxfp4(blocks: Tensor) -> Tensor:
    """(n, 17) to (n, 32): 2^(e - 128) * (2 * E2M1[q]); byte 255 is no NaN here."""
    e = blocks[:, :1].to(torch.int32)
    bits = torch.where(
        e < 2, 0x200000 << e.clamp(max=1), (e - 1) << 23
    )  # 2^-128 and 2^-127 are subnormal
    q = 2 * e2m1_values(_nibbles32(blocks[:, 1:])) + 0.0  # the format has no -0
    return bits.view(torch.float32) * q


@functools.cache  # see _iq4_table
def _iq2_xxs_table(device: torch.device) -> Tensor:
    """(256, 8) float32 magnitudes."""
    packed = torch.frombuffer(bytearray(IQ2_XXS_GRID), dtype=torch.uint8)
    codes = (packed[:, None] >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3
    return torch.tensor([8.0, 25.0, 43.0])[codes.long()].view(256, 8).to(device)


def decode_iq2_xxs(blocks: Tensor) -> Tensor:
    """(n, 66) to (n, 256): d * (0.5 + s) * 0.25 * V[index] * sign."""
    parts = blocks[:, 2:].reshape(-1, 8, 8)
    words = parts[..., 4:].contiguous().view(torch.int32)  # (n, 8, 1)
    scales = _half(blocks, 0)[..., None] * (0.5 + (parts[..., 7:] >> 4).float()) * 0.25
    bits = torch.arange(7, dtype=torch.int32, device=blocks.device)
    low = (words[..., None] >> 7 * bits[:4, None]) >> bits & 1  # (n, 8, 4, 7)
    signs = 1.0 - 2.0 * torch.cat((low, low.sum(-1, keepdim=True) & 1), dim=-1)
    values = _iq2_xxs_table(blocks.device)[parts[..., :4].long()]
    return (scales[..., None] * values * signs).flatten(1)


# Type name: decoder, weights per block, bytes per block.
DECODERS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "F32": (decode_f32, 1, 4),
    "F16": (decode_f16, 1, 2),
    "BF16": (decode_bf16, 1, 2),
    "Q4_0": (decode_q4_0, 32, 18),
    "Q4_1": (decode_q4_1, 32, 20),
    "Q5_0": (decode_q5_0, 32, 22),
    "Q5_1": (decode_q5_1, 32, 24),
    "Q8_0": (decode_q8_0, 32, 34),
    "IQ4_NL": (decode_iq4_nl, 32, 18),
    "Q2_K": (decode_q2_k, 256, 84),
    "Q3_K": (decode_q3_k, 256, 110),
    "Q4_K": (decode_q4_k, 256, 144),
    "Q5_K": (decode_q5_k, 256, 176),
    "Q6_K": (decode_q6_k, 256, 210),
    "IQ4_XS": (decode_iq4_xs, 256, 136),
    "MXFP4": (decode_mxfp4, 32, 17),
    "IQ2_XXS": (decode_iq2_xxs, 256, 66),
}
