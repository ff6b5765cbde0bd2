"""Oracle of dequantize: the blocks of GGML files, one weight at a time, in the words of the format.

Each function answers "weight `i` of a block" for all blocks side by side: `block[at]` is byte `at`
of each of them. Floats are numpy's float32, so that every product and sum rounds to float32 exactly
once, as the definition has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercel.quant_types import IQ2_XXS_GRID

Integers = npt.NDArray[np.int64]  # (blocks,)
Block = Sequence[Integers]  # of each byte
Floats = npt.NDArray[np.float32]

V = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
GRID = np.frombuffer(IQ2_XXS_GRID, np.uint8).astype(np.int64)


def dequantize(data: npt.NDArray[np.uint8], type_name: str) -> Floats:
    """Decode rows of blocks.

    Args:
        data: (out, row_bytes) uint8.
        type_name: as in GGML, for instance "Q4_K".

    Returns:
        (out, in) float32.

    Source: the block formats of ggml (ggml-quants.c).
    """
    weight, block_weights, block_bytes = TYPES[type_name]
    block = [*data.reshape(-1, block_bytes).T.astype(np.int64)]
    with np.errstate(all="ignore"):
        weights = [weight(block, i) for i in range(block_weights)]
    return np.stack(weights, axis=1).reshape(len(data), -1)


def integer(block: Block, at: int, num_bytes: int) -> Integers:
    """The little-endian integer at byte `at`."""
    return sum((block[at + k] << 8 * k for k in range(num_bytes)), np.zeros_like(block[0]))


def float32(values: npt.NDArray[Any]) -> Floats:
    """Rounded once, if at all."""
    return values.astype(np.float32)


def half(block: Block, at: int) -> Floats:
    """The fp16 at byte `at`."""
    return integer(block, at, 2).astype(np.uint16).view(np.float16).astype(np.float32)


def nibble(block: Block, at: int, i: int) -> Integers:
    """Weight i of 32 whose low halves are weights 0..15 and high halves weights 16..31."""
    return block[at + i] & 15 if i < 16 else block[at + i - 16] >> 4


def bit(block: Block, at: int, i: int) -> Integers:
    """Bit i of a little-endian integer at byte `at`."""
    return block[at + i // 8] >> (i % 8) & 1


def signed(byte: Integers) -> Integers:
    """A byte as a signed number."""
    return byte - 256 * (byte > 127)


def f32(block: Block, _: int) -> Floats:
    """The four bytes as they are."""
    return integer(block, 0, 4).astype(np.uint32).view(np.float32)


def f16(block: Block, _: int) -> Floats:
    """The two bytes, widened."""
    return half(block, 0)


def bf16(block: Block, _: int) -> Floats:
    """The two bytes are the upper half of a float32."""
    return (integer(block, 0, 2) << 16).astype(np.uint32).view(np.float32)


def q4_0(block: Block, i: int) -> Floats:
    """0 d; 2 qs[16]."""
    return half(block, 0) * float32(nibble(block, 2, i) - 8)


def q4_1(block: Block, i: int) -> Floats:
    """0 d; 2 m; 4 qs[16]."""
    return half(block, 0) * float32(nibble(block, 4, i)) + half(block, 2)


def q5_0(block: Block, i: int) -> Floats:
    """0 d; 2 qh; 6 qs[16]."""
    q = nibble(block, 6, i) + 16 * bit(block, 2, i)
    return half(block, 0) * float32(q - 16)


def q5_1(block: Block, i: int) -> Floats:
    """0 d; 2 m; 4 qh; 8 qs[16]."""
    q = nibble(block, 8, i) + 16 * bit(block, 4, i)
    return half(block, 0) * float32(q) + half(block, 2)


def q8_0(block: Block, i: int) -> Floats:
    """0 d; 2 qs[32] int8."""
    return half(block, 0) * float32(signed(block[2 + i]))


def iq4_nl(block: Block, i: int) -> Floats:
    """0 d; 2 qs[16]."""
    return half(block, 0) * float32(V[nibble(block, 2, i)])


def two_bits(block: Block, at: int, i: int) -> Integers:
    """Weight i of 256 in 64 bytes: half, then shift, then byte."""
    h, s, l = i // 128, i % 128 // 32, i % 32  # noqa: E741 - the letters of the format
    return block[at + 32 * h + l] >> 2 * s & 3


def q2_k(block: Block, i: int) -> Floats:
    """0 scales[16]; 16 qs[64]; 80 d; 82 dmin."""
    scale = block[i // 16]
    q = float32(two_bits(block, 16, i))
    return half(block, 80) * float32(scale & 15) * q - half(block, 82) * float32(scale >> 4)


def q3_k(block: Block, i: int) -> Floats:
    """0 hmask[32]; 32 qs[64]; 96 scales[12]; 108 d."""
    j = i // 16
    low = block[96 + j] & 15 if j < 8 else block[96 + j - 8] >> 4
    scale = low + 16 * (block[96 + 8 + j % 4] >> 2 * (j // 4) & 3)
    is_set = block[i % 32] >> (4 * (i // 128) + i % 128 // 32) & 1
    q = two_bits(block, 32, i) - 4 * (1 - is_set)
    return half(block, 108) * float32(scale - 32) * float32(q)


def scale_and_min(b: Block, j: int) -> tuple[Integers, Integers]:
    """The 6-bit scale and minimum of sub-block j from twelve bytes."""
    if j < 4:
        return b[j] & 63, b[j + 4] & 63
    scale = (b[j + 4] & 15) | (b[j - 4] >> 6 << 4)
    return scale, (b[j + 4] >> 4) | (b[j] >> 6 << 4)


def grouped_nibble(block: Block, at: int, i: int) -> Integers:
    """Weight i of 256 in 128 bytes: 32 bytes hold 32 low, then 32 high nibbles."""
    byte = block[at + 32 * (i // 64) + i % 32]
    return byte & 15 if i % 64 < 32 else byte >> 4


def q4_k(block: Block, i: int) -> Floats:
    """0 d; 2 dmin; 4 scales[12]; 16 qs[128]."""
    scale, minimum = scale_and_min(block[4:16], i // 32)
    q = float32(grouped_nibble(block, 16, i))
    return (half(block, 0) * float32(scale)) * q - half(block, 2) * float32(minimum)


def q5_k(block: Block, i: int) -> Floats:
    """0 d; 2 dmin; 4 scales[12]; 16 qh[32]; 48 qs[128]."""
    scale, minimum = scale_and_min(block[4:16], i // 32)
    fifth = block[16 + i % 32] >> (i // 32) & 1
    q = float32(grouped_nibble(block, 48, i) + 16 * fifth)
    return (half(block, 0) * float32(scale)) * q - half(block, 2) * float32(minimum)


def q6_k(block: Block, i: int) -> Floats:
    """0 ql[128]; 128 qh[64]; 192 sc[16] int8; 208 d."""
    h, quarter, l = i // 128, i % 128 // 32, i % 32  # noqa: E741 - the letters of the format
    ql0, ql1 = block[64 * h + l], block[64 * h + 32 + l]
    low = (ql0 & 15, ql1 & 15, ql0 >> 4, ql1 >> 4)[quarter]
    q = low | (block[128 + 32 * h + l] >> 2 * quarter & 3) << 4
    scale = float32(signed(block[192 + i // 16]))
    return (half(block, 208) * scale) * float32(q - 32)


def iq4_xs(block: Block, i: int) -> Floats:
    """0 d; 2 scales_h u16; 4 scales_l[4]; 8 qs[128]."""
    j = i // 32
    scales_h = integer(block, 2, 2)
    scale = (block[4 + j // 2] >> 4 * (j % 2) & 15) | (scales_h >> 2 * j & 3) << 4
    value = V[nibble(block, 8 + 16 * j, i % 32)]
    return half(block, 0) * float32(scale - 32) * float32(value)


def mxfp4(block: Block, i: int) -> Floats:
    """0 e; 1 qs[16]: twice the value of E2M1 times half the scale, whose byte 255 is no NaN."""
    code = nibble(block, 1, i)
    doubled = np.array((0, 1, 2, 3, 4, 6, 8, 12))[code & 7]
    half_scale = float32(2.0 ** (block[0] - 128.0))
    return half_scale * float32(np.where(code >= 8, -doubled, doubled))


def iq2_xxs(block: Block, i: int) -> Floats:
    """0 d; 2 + 8 j: index[4], then 28 bits of signs and 4 of scale, for sub-block j of 32."""
    at = 2 + 8 * (i // 32)
    word = integer(block, at + 4, 4)
    group, place = i % 32 // 8, i % 8
    signs = word >> 7 * group & 127
    # The eighth sign makes their number even.
    folded = signs ^ signs >> 4
    folded ^= folded >> 2
    is_negative = (folded ^ folded >> 1 if place == 7 else signs >> place) & 1
    entry = 2 * block[at + group]
    packed = GRID[entry] + 256 * GRID[entry + 1]
    magnitude = float32(np.array((8, 25, 43))[packed >> 2 * place & 3])
    scale = half(block, 0) * (np.float32(0.5) + float32(word >> 28)) * np.float32(0.25)
    return scale * magnitude * float32(np.where(is_negative, -1, 1))


TYPES: dict[str, tuple[Callable[[Block, int], Floats], int, int]] = {
    "F32": (f32, 1, 4),
    "F16": (f16, 1, 2),
    "BF16": (bf16, 1, 2),
    "Q4_0": (q4_0, 32, 18),
    "Q4_1": (q4_1, 32, 20),
    "Q5_0": (q5_0, 32, 22),
    "Q5_1": (q5_1, 32, 24),
    "Q8_0": (q8_0, 32, 34),
    "IQ4_NL": (iq4_nl, 32, 18),
    "Q2_K": (q2_k, 256, 84),
    "Q3_K": (q3_k, 256, 110),
    "Q4_K": (q4_k, 256, 144),
    "Q5_K": (q5_k, 256, 176),
    "Q6_K": (q6_k, 256, 210),
    "IQ4_XS": (iq4_xs, 256, 136),
    "MXFP4": (mxfp4, 32, 17),
    "IQ2_XXS": (iq2_xxs, 256, 66),
}
