"""Oracle of dequantize: the blocks of GGML files, one weight at a time, in the words of the format.

Each function answers "weight `i` of this block" with numpy float32 scalars, so that every product
and sum rounds to float32 exactly once, as the definition has it. Slow on purpose.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tiercel.quant_types import IQ2_XXS_GRID

Block = npt.NDArray[np.uint8]

V = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(data: npt.NDArray[np.uint8], type_name: str) -> npt.NDArray[np.float32]:
    """Decode rows of blocks.

    Args:
        data: (out, row_bytes) uint8.
        type_name: as in GGML, for instance "Q4_K".

    Returns:
        (out, in) float32.

    Source: the block formats of ggml (ggml-quants.c).
    """
    weight, block_weights, block_bytes = TYPES[type_name]
    rows = []
    with np.errstate(all="ignore"):
        for row in data:
            blocks = row.reshape(-1, block_bytes)
            rows.append([weight(block, i) for block in blocks for i in range(block_weights)])
    return np.array(rows, dtype=np.float32).reshape(len(data), -1)


def half(block: Block, at: int) -> np.float32:
    """The fp16 at byte `at`."""
    return np.float32(np.frombuffer(block[at : at + 2].tobytes(), "<f2")[0])


def nibble(block: Block, at: int, i: int) -> int:
    """Weight i of 32 whose low halves are weights 0..15 and high halves weights 16..31."""
    return int(block[at + i]) & 15 if i < 16 else int(block[at + i - 16]) >> 4


def bit(block: Block, at: int, i: int) -> int:
    """Bit i of a little-endian integer at byte `at`."""
    return int(block[at + i // 8]) >> (i % 8) & 1


def signed(byte: np.uint8) -> int:
    """A byte as a signed number."""
    return int(byte) - 256 if byte > 127 else int(byte)


def f32(block: Block, _: int) -> np.float32:
    """The four bytes as they are."""
    return np.float32(np.frombuffer(block.tobytes(), "<f4")[0])


def f16(block: Block, _: int) -> np.float32:
    """The two bytes, widened."""
    return half(block, 0)


def bf16(block: Block, _: int) -> np.float32:
    """The two bytes are the upper half of a float32."""
    return np.float32(np.frombuffer(b"\0\0" + block.tobytes(), "<f4")[0])


def q4_0(block: Block, i: int) -> np.float32:
    """0 d; 2 qs[16]."""
    return half(block, 0) * np.float32(nibble(block, 2, i) - 8)


def q4_1(block: Block, i: int) -> np.float32:
    """0 d; 2 m; 4 qs[16]."""
    return half(block, 0) * np.float32(nibble(block, 4, i)) + half(block, 2)


def q5_0(block: Block, i: int) -> np.float32:
    """0 d; 2 qh; 6 qs[16]."""
    q = nibble(block, 6, i) + 16 * bit(block, 2, i)
    return half(block, 0) * np.float32(q - 16)


def q5_1(block: Block, i: int) -> np.float32:
    """0 d; 2 m; 4 qh; 8 qs[16]."""
    q = nibble(block, 8, i) + 16 * bit(block, 4, i)
    return half(block, 0) * np.float32(q) + half(block, 2)


def q8_0(block: Block, i: int) -> np.float32:
    """0 d; 2 qs[32] int8."""
    return half(block, 0) * np.float32(signed(block[2 + i]))


def iq4_nl(block: Block, i: int) -> np.float32:
    """0 d; 2 qs[16]."""
    return half(block, 0) * np.float32(V[nibble(block, 2, i)])


def two_bits(block: Block, at: int, i: int) -> int:
    """Weight i of 256 in 64 bytes: half, then shift, then byte."""
    h, s, l = i // 128, i % 128 // 32, i % 32  # noqa: E741 - the letters of the format
    return int(block[at + 32 * h + l]) >> 2 * s & 3


def q2_k(block: Block, i: int) -> np.float32:
    """0 scales[16]; 16 qs[64]; 80 d; 82 dmin."""
    scale = int(block[i // 16])
    q = np.float32(two_bits(block, 16, i))
    return half(block, 80) * np.float32(scale & 15) * q - half(block, 82) * np.float32(scale >> 4)


def q3_k(block: Block, i: int) -> np.float32:
    """0 hmask[32]; 32 qs[64]; 96 scales[12]; 108 d."""
    j = i // 16
    low = int(block[96 + j]) & 15 if j < 8 else int(block[96 + j - 8]) >> 4
    scale = low + 16 * (int(block[96 + 8 + j % 4]) >> 2 * (j // 4) & 3)
    is_set = int(block[i % 32]) >> (4 * (i // 128) + i % 128 // 32) & 1
    q = two_bits(block, 32, i) - (0 if is_set else 4)
    return half(block, 108) * np.float32(scale - 32) * np.float32(q)


def scale_and_min(b: Block, j: int) -> tuple[int, int]:
    """The 6-bit scale and minimum of sub-block j from twelve bytes."""
    if j < 4:
        return int(b[j]) & 63, int(b[j + 4]) & 63
    scale = (int(b[j + 4]) & 15) | (int(b[j - 4]) >> 6 << 4)
    return scale, (int(b[j + 4]) >> 4) | (int(b[j]) >> 6 << 4)


def grouped_nibble(block: Block, at: int, i: int) -> int:
    """Weight i of 256 in 128 bytes: 32 bytes hold 32 low, then 32 high nibbles."""
    byte = int(block[at + 32 * (i // 64) + i % 32])
    return byte & 15 if i % 64 < 32 else byte >> 4


def q4_k(block: Block, i: int) -> np.float32:
    """0 d; 2 dmin; 4 scales[12]; 16 qs[128]."""
    scale, minimum = scale_and_min(block[4:16], i // 32)
    q = np.float32(grouped_nibble(block, 16, i))
    return (half(block, 0) * np.float32(scale)) * q - half(block, 2) * np.float32(minimum)


def q5_k(block: Block, i: int) -> np.float32:
    """0 d; 2 dmin; 4 scales[12]; 16 qh[32]; 48 qs[128]."""
    scale, minimum = scale_and_min(block[4:16], i // 32)
    fifth = int(block[16 + i % 32]) >> (i // 32) & 1
    q = np.float32(grouped_nibble(block, 48, i) + 16 * fifth)
    return (half(block, 0) * np.float32(scale)) * q - half(block, 2) * np.float32(minimum)


def q6_k(block: Block, i: int) -> np.float32:
    """0 ql[128]; 128 qh[64]; 192 sc[16] int8; 208 d."""
    h, quarter, l = i // 128, i % 128 // 32, i % 32  # noqa: E741 - the letters of the format
    ql0, ql1 = int(block[64 * h + l]), int(block[64 * h + 32 + l])
    low = (ql0 & 15, ql1 & 15, ql0 >> 4, ql1 >> 4)[quarter]
    q = low | (int(block[128 + 32 * h + l]) >> 2 * quarter & 3) << 4
    scale = np.float32(signed(block[192 + i // 16]))
    return (half(block, 208) * scale) * np.float32(q - 32)


def iq4_xs(block: Block, i: int) -> np.float32:
    """0 d; 2 scales_h u16; 4 scales_l[4]; 8 qs[128]."""
    j = i // 32
    scales_h = int(block[2]) + 256 * int(block[3])
    scale = (int(block[4 + j // 2]) >> 4 * (j % 2) & 15) | (scales_h >> 2 * j & 3) << 4
    value = V[nibble(block, 8 + 16 * j, i % 32)]
    return half(block, 0) * np.float32(scale - 32) * np.float32(value)


def mxfp4(block: Block, i: int) -> np.float32:
    """0 e; 1 qs[16]: twice the value of E2M1 times half the scale, whose byte 255 is no NaN."""
    code = nibble(block, 1, i)
    doubled = (0, 1, 2, 3, 4, 6, 8, 12)[code & 7]
    half_scale = np.float32(2.0 ** (int(block[0]) - 128))
    return half_scale * np.float32(-doubled if code >= 8 else doubled)


def iq2_xxs(block: Block, i: int) -> np.float32:
    """0 d; 2 + 8 j: index[4], then 28 bits of signs and 4 of scale, for sub-block j of 32."""
    at = 2 + 8 * (i // 32)
    word = int.from_bytes(block[at + 4 : at + 8].tobytes(), "little")
    group, place = i % 32 // 8, i % 8
    signs = word >> 7 * group & 127
    is_negative = signs.bit_count() % 2 if place == 7 else signs >> place & 1
    entry = 2 * int(block[at + group])
    packed = IQ2_XXS_GRID[entry] + 256 * IQ2_XXS_GRID[entry + 1]
    magnitude = np.float32((8, 25, 43)[packed >> 2 * place & 3])
    scale = half(block, 0) * (np.float32(0.5) + np.float32(word >> 28)) * np.float32(0.25)
    return scale * magnitude * np.float32(-1 if is_negative else 1)


TYPES: dict[str, tuple[Callable[[Block, int], np.float32], int, int]] = {
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
