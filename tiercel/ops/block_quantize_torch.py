"""Block formats of DeepSeek-V4 with PyTorch operators on any device: numbers, groups, bytes.

    E2M1   s|ee|m, 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    E4M3   s|eeee|mmm, 8 bits: up to 448, no infinity
    E8M0   a power of two, 2^(byte - 127); byte 255 is NaN

No function reads a value on the host, so all of them can be captured in a CUDA graph. Scale bytes
are formed from the bits of a float32: a logarithm would round.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tiercel.quant_types import INDEX_GROUP, KV_GROUP, SCALE_PAD

E4M3_MAX = 448.0
E4M3_LEAST = 2.0**-9
E2M1_MAX = 6.0
# amax below this is raised to it, as in the published inference code of DeepSeek-V4.
FP8_LEAST_AMAX = 1e-4
FP4_LEAST_AMAX = 6 * 2.0**-126
# Halfway between neighbours. A tie goes to the even code: up at the thresholds marked True.
_E2M1_STEPS = (
    (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True),
    (5.0, False),
)  # fmt: skip


def e2m1_codes(x: Tensor) -> Tensor:
    """Nearest E2M1 codes of float32 values, uint8 0..15; beyond 6 saturates, NaN gives 0."""
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for step, is_up in _E2M1_STEPS:
        code += (magnitude >= step) if is_up else (magnitude > step)
    return code


def e2m1_values(codes: Tensor) -> Tensor:
    """Values of E2M1 codes, float32: the code's bits moved into a float16, times 2^14."""
    bits = codes.to(torch.int16)
    return (((bits & 7) << 9) | ((bits & 8) << 12)).view(torch.float16).float() * 2.0**14


def e2m1_doublings(largest: Tensor) -> Tensor:
    """How often all values of a group can be doubled exactly, by its largest magnitude code.

    0.5 becomes 4 in three steps, 1 and 1.5 become 4 and 6 in two, 2 and 3 in one.
    """
    return largest.new_tensor((0, 3, 2, 2, 1, 1, 0, 0), dtype=torch.int32)[largest.int()]


def mxfp4_exponents(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents of E8M0 bytes, int32, and whether their group holds a value other than zero."""
    parts = q.unflatten(-1, (scale.shape[-1], 16))
    # A largest byte takes 7 ms of a 2048 x 4096 matrix on 2 cores, `any` 39 ms.
    return scale.int() - 127, (parts & 0x77).amax(-1) != 0


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes a byte, (..., n) to (..., n / 2): the even element in bits 0 to 3."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Codes of packed bytes, (..., n) to (..., 2 n)."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def e8m0_ceil(x: Tensor) -> Tensor:
    """E8M0 bytes of the least powers of two that are >= x, float32 >= 0; not finite gives 255."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits + 0x7FFFFF) >> 23  # any mantissa bit carries into the exponent
    return torch.where(x.isfinite(), exponent, 255).to(torch.uint8)


def e8m0_values(scale: Tensor) -> Tensor:
    """Powers of two of E8M0 bytes, float32."""
    bits = scale.to(torch.int32) << 23
    bits = torch.where(scale == 0, 1 << 22, bits)  # 2^-127 is subnormal
    return torch.where(scale == 255, 0x7FC00000, bits).view(torch.float32)


def e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 of float32 values up to 448, or a rounding error beyond; NaN stays."""
    return x.to(torch.float8_e4m3fn)


def quotient(x: Tensor, divisor: float) -> Tensor:
    """Quotient, rounded once: by a Python number a GPU would multiply by its reciprocal."""
    return x / x.new_full((), divisor)


def scale_values(scale: Tensor) -> Tensor:
    """A plane of scales as float32: uint8 is E8M0, any float type is taken as it is."""
    return e8m0_values(scale) if scale.dtype == torch.uint8 else scale.float()


def spread(scale: Tensor, block: int, dim: int, size: int) -> Tensor:
    """Repeat each entry of `dim` (negative) `block` times and cut to `size`."""
    if dim == -2:
        shape = (*scale.shape[:-1], block, scale.shape[-1])
        return scale.unsqueeze(-2).expand(shape).flatten(-3, -2)[..., :size, :]
    return scale.unsqueeze(-1).expand(*scale.shape, block).flatten(-2)[..., :size]


def groups(x: Tensor, size: int) -> Tensor:
    """Split the last dimension, (..., n) to (..., ceil(n / size), size), zero padded."""
    num_groups = -(-x.shape[-1] // size)
    padded = torch.nn.functional.pad(x, (0, num_groups * size - x.shape[-1]))
    return padded.view(*x.shape[:-1], num_groups, size)


def quantize_fp8(weight: Tensor, block: tuple[int, int], has_e8m0: bool) -> tuple[Tensor, Tensor]:
    """E4M3 weights and one scale a block; both keep the leading dimensions."""
    out, cols = weight.shape[-2:]
    tiles = groups(weight.float(), block[1]).transpose(-3, -1)  # (..., block, col groups, out)
    tiles = groups(tiles, block[0])  # (..., block, col groups, row groups, block)
    amax = tiles.abs().amax(dim=(-4, -1)).transpose(-2, -1).clamp(min=FP8_LEAST_AMAX)
    scale = quotient(amax, E4M3_MAX)
    scale = (e8m0_ceil(scale) if has_e8m0 else scale).contiguous()
    full = spread(spread(scale_values(scale), block[0], -2, out), block[1], -1, cols)
    return e4m3(weight.float() / full), scale


def dequantize_fp8(q: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """E4M3 times the scale of its block, float32."""
    out, cols = q.shape[-2:]
    values = scale_values(scale)
    return q.float() * spread(spread(values, block[0], -2, out), block[1], -1, cols)


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed E2M1 and an E8M0 byte per 32 columns."""
    parts = groups(weight.float(), 32)
    scale = e8m0_ceil(quotient(parts.abs().amax(-1).clamp(min=FP4_LEAST_AMAX), E2M1_MAX))
    codes = e2m1_codes(parts / e8m0_values(scale).unsqueeze(-1))
    return pack_nibbles(codes.flatten(-2)), scale


def quantize_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed E2M1, an E4M3 scale per 16 columns, and a float32 scale per matrix."""
    parts = groups(weight.float(), 16)
    amax = parts.abs().amax(-1)
    global_scale = quotient(amax.amax(dim=(-2, -1)), E2M1_MAX * E4M3_MAX)
    full = global_scale[..., None, None]
    ratio = torch.where(full > 0, amax / (E2M1_MAX * full), 0.0)
    scale = e4m3(ratio.clamp(min=E4M3_LEAST))
    step = (scale.float() * full).unsqueeze(-1)
    codes = e2m1_codes(torch.where(step > 0, parts / step, parts * 0.0))
    return pack_nibbles(codes.flatten(-2)), scale, global_scale


def dequantize_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Packed E2M1 times the scale of its group, float32; the group follows from the shapes."""
    values = e2m1_values(unpack_nibbles(packed))
    size = values.shape[-1] // max(1, scale.shape[-1])
    parts = values.view(*scale.shape, size)
    return (parts * scale_values(scale).unsqueeze(-1)).flatten(-2)


def round_fp8(x: Tensor, size: int) -> Tensor:
    """Round to E4M3 with a power-of-two scale per `size` channels, and decode; float32."""
    q, scale = _group_e4m3(x, size)
    return (q.float() * e8m0_values(scale).unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]


def round_fp4(x: Tensor, size: int) -> Tensor:
    """Round to E2M1 with a power-of-two scale per `size` channels, and decode; float32."""
    codes, scale = _group_e2m1(x, size)
    values = e2m1_values(codes) * e8m0_values(scale).unsqueeze(-1)
    return values.flatten(-2)[..., : x.shape[-1]]


def _group_e4m3(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    parts = groups(x.float(), size)
    scale = e8m0_ceil(quotient(parts.abs().amax(-1).clamp(min=FP8_LEAST_AMAX), E4M3_MAX))
    return e4m3(parts / e8m0_values(scale).unsqueeze(-1)), scale


def _group_e2m1(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    parts = groups(x.float(), size)
    scale = e8m0_ceil(quotient(parts.abs().amax(-1).clamp(min=FP4_LEAST_AMAX), E2M1_MAX))
    return e2m1_codes(parts / e8m0_values(scale).unsqueeze(-1)), scale


def kv_entry_bytes(head_dim: int, rotary_dim: int) -> int:
    """Bytes of a cache entry: E4M3, bfloat16 and padded scale bytes."""
    num_scales = (head_dim - rotary_dim) // KV_GROUP
    return head_dim + rotary_dim + -(-num_scales // SCALE_PAD) * SCALE_PAD


def encode_kv(x: Tensor, rotary_dim: int) -> Tensor:
    """(..., head_dim) to (..., kv_entry_bytes) uint8."""
    nope = x.shape[-1] - rotary_dim
    q, scale = _group_e4m3(x[..., :nope], KV_GROUP)
    rotary = x[..., nope:].to(torch.bfloat16).contiguous().view(torch.uint8)
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[-1] % SCALE_PAD))
    return torch.cat((q.view(torch.uint8).flatten(-2), rotary, padded), dim=-1)


def decode_kv(entries: Tensor, scales: Tensor, rotary_dim: int) -> Tensor:
    """(..., nope + 2 * rotary) data bytes and (..., scale bytes) to (..., head_dim) float32."""
    nope = entries.shape[-1] - 2 * rotary_dim
    q = entries[..., :nope].contiguous().view(torch.float8_e4m3fn).float()
    scale = e8m0_values(scales[..., : nope // KV_GROUP])
    parts = q.unflatten(-1, (nope // KV_GROUP, KV_GROUP)) * scale.unsqueeze(-1)
    rotary = entries[..., nope:].contiguous().view(torch.bfloat16).float()
    return torch.cat((parts.flatten(-2), rotary), dim=-1)


def hadamard_rotate(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dimension times n^-0.5, float32, by butterflies."""
    size = x.shape[-1]
    y = x.float()
    span = 1
    while span < size:
        pairs = y.unflatten(-1, (size // (2 * span), 2, span))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        span *= 2
    return y * math.sqrt(1 / size)


def encode_index(x: Tensor) -> Tensor:
    """(..., n) rotated keys to (..., n / 2 + n / 32) uint8: packed E2M1, then E8M0 bytes."""
    codes, scale = _group_e2m1(x, INDEX_GROUP)
    return torch.cat((pack_nibbles(codes.flatten(-2)), scale), dim=-1)


def swizzle(scale: Tensor) -> Tensor:
    """(rows, cols) bytes to flat 512-byte tiles of 128 x 4, zero padded, tiles row-major."""
    rows, cols = scale.shape
    padded = torch.nn.functional.pad(scale, (0, -cols % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
