"""Oracle of DeepSeek-V4's block formats: number tables and loops over groups, in float64.

Numbers are rounded by a search for the nearest entry of a table, so no bit trick of the op is
repeated here.
"""

import math

import torch
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


def e4m3_table() -> Tensor:
    """The 127 values of E4M3 that are not negative, by code, float64."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        scale = 2.0 ** (max(exponent, 1) - 7)
        values.append(scale * ((1 if exponent else 0) + mantissa / 8))
    return torch.tensor(values).double()


def nearest_codes(x: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest entry of an ascending table for |x|, ties to the even index."""
    distance = (x.double().abs().unsqueeze(-1) - table).abs()
    is_best = distance == distance.amin(-1, keepdim=True)
    index = torch.arange(table.numel())
    first = torch.where(is_best, index, table.numel()).amin(-1)
    last = torch.where(is_best, index, -1).amax(-1)
    return torch.where(first % 2 == 0, first, last)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest values of E2M1, saturated, float64."""
    return E2M1[nearest_codes(x, E2M1[:8])] * torch.where(torch.signbit(x), -1.0, 1.0).double()


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest values of E4M3, saturated, float64."""
    table = e4m3_table()
    return table[nearest_codes(x, table)] * torch.where(x < 0, -1.0, 1.0).double()


def power_of_two(x: float) -> float:
    """The least power of two that is >= x."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def round_groups(x: Tensor, size: int, kind: str) -> tuple[Tensor, Tensor]:
    """Rows (rows, n) rounded in groups of `size` columns: values, and the scale of each group."""
    out = torch.empty_like(x, dtype=torch.float64)
    scales = torch.empty(x.shape[0], -(-x.shape[1] // size), dtype=torch.float64)
    for row in range(x.shape[0]):
        for group in range(scales.shape[1]):
            part = x[row, group * size : (group + 1) * size].double()
            amax = part.abs().max().item()
            if kind == "fp8":
                scale = power_of_two(max(amax, 1e-4) / 448)
                rounded = round_e4m3(part / scale)
            else:
                scale = power_of_two(max(amax / 6, 2.0**-126))
                rounded = round_e2m1(part / scale)
            out[row, group * size : (group + 1) * size] = rounded * scale
            scales[row, group] = scale
    return out, scales


def fp8_blocks(weight: Tensor, block: tuple[int, int], has_e8m0: bool) -> tuple[Tensor, Tensor]:
    """A matrix rounded in blocks: values, and the scale of each block; float64."""
    rows, cols = (-(-size // part) for size, part in zip(weight.shape, block, strict=True))
    out = torch.empty_like(weight, dtype=torch.float64)
    scales = torch.empty(rows, cols, dtype=torch.float64)
    for row in range(rows):
        for col in range(cols):
            place = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(col * block[1], (col + 1) * block[1]),
            )
            part = weight[place].double()
            scale = max(part.abs().max().item(), 1e-4) / 448
            scale = power_of_two(scale) if has_e8m0 else scale
            out[place] = round_e4m3(part / scale) * scale
            scales[row, col] = scale
    return out, scales


def nvfp4_blocks(weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """A matrix rounded to NVFP4: values, the E4M3 scale of each group, the global scale."""
    total = weight.abs().max().item() / (6 * 448)
    out = torch.empty_like(weight, dtype=torch.float64)
    scales = torch.empty(weight.shape[0], weight.shape[1] // 16, dtype=torch.float64)
    for row in range(weight.shape[0]):
        for group in range(scales.shape[1]):
            part = weight[row, group * 16 : (group + 1) * 16].double()
            amax = part.abs().max()
            scale = max(round_e4m3((amax / (6 * total)).reshape(1)).item(), 2.0**-9)
            out[row, group * 16 : (group + 1) * 16] = round_e2m1(part / (scale * total)) * (
                scale * total
            )
            scales[row, group] = scale
    return out, scales, total


def dequantize_fp8(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """E4M3 bytes (out, in) times the scale of their block, float64."""
    table = e4m3_table()
    values = torch.cat((table, table[:1] * float("nan"), -table, table[:1] * float("nan")))
    row = torch.arange(codes.shape[0])[:, None] // block[0]
    col = torch.arange(codes.shape[1])[None, :] // block[1]
    return values[codes.long()] * scales.double()[row, col]


def dequantize_fp4(packed: Tensor, scales: Tensor, total: float = 1.0) -> Tensor:
    """Packed E2M1 (out, in / 2) times the scale of their group and of the matrix, float64."""
    out = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.float64)
    out[:, 0::2] = E2M1[(packed % 16).long()]
    out[:, 1::2] = E2M1[(packed // 16).long()]
    group = torch.arange(out.shape[1]) // (out.shape[1] // scales.shape[1])
    return out * scales.double()[:, group] * total


def hadamard(x: Tensor) -> Tensor:
    """Product with the matrix (-1)^popcount(i & j) / sqrt(n), float64."""
    size = x.shape[-1]
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return x.double() @ torch.tensor(signs).double() / math.sqrt(size)


def kv_entries(x: Tensor, rotary_dim: int) -> Tensor:
    """What cache entries (rows, head_dim) hold after decoding, float64."""
    nope = x.shape[1] - rotary_dim
    rounded, _ = round_groups(x[:, :nope], 64, "fp8")
    return torch.cat((rounded, x[:, nope:].bfloat16().double()), dim=1)


def swizzle(scale: Tensor) -> Tensor:
    """Bytes (rows, cols) in 128 x 4 tiles, element by element."""
    rows, cols = scale.shape
    tiles_across = -(-cols // 4)
    out = torch.zeros(-(-rows // 128) * tiles_across * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * tiles_across + c // 4
            out[tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = scale[r, c]
    return out
