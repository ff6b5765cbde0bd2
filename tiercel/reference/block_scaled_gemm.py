"""Oracle of block-scaled products: tiles are read byte by byte, sums are float64."""

import torch
from torch import Tensor

from tiercel.reference.block_quantize import E2M1

_TILE_ROWS, _TILE_COLUMNS = 128, 256


def e4m3_value(code: int) -> float:
    """A scale in E4M3, which is not negative."""
    exponent, mantissa = code >> 3, code & 7
    return 2.0 ** (max(exponent, 1) - 7) * ((1 if exponent else 0) + mantissa / 8)


def element(values: Tensor, scales: Tensor, group: int, row: int, column: int) -> float:
    """One element of tiled values and scales, by its place in them."""
    tile = (row // _TILE_ROWS, column // _TILE_COLUMNS)
    r, c = row % _TILE_ROWS, column % _TILE_COLUMNS
    piece, within = c // 32, c % 32 // 2
    byte = int(values[tile][r * 128 + (piece ^ (r % 8)) * 16 + within])
    code = byte >> 4 if c % 2 else byte & 15
    s = c // group
    place = s // 4 * 512 + r % 32 * 16 + r // 32 * 4 + s % 4
    stored = int(scales[tile][place])
    scale = e4m3_value(stored) if group == 16 else 2.0 ** (stored - 127)
    return float(E2M1[code]) * scale


def matrix(values: Tensor, scales: Tensor, group: int, shape: tuple[int, int]) -> Tensor:
    """All elements of tiled values and scales, float64."""
    rows, columns = shape
    found = [
        [element(values, scales, group, row, column) for column in range(columns)]
        for row in range(rows)
    ]
    return torch.tensor(found, dtype=torch.float64).view(rows, columns)


def gate_up(both: Tensor, run: int) -> tuple[Tensor, Tensor]:
    """Rows that are `run` of gate, `run` of up, and so on; the last turn may be shorter."""
    half, row = both.shape[0] // 2, 0
    gate: list[Tensor] = []
    up: list[Tensor] = []
    while len(gate) < half:
        count = min(run, half - len(gate))
        gate += list(both[row : row + count])
        up += list(both[row + count : row + 2 * count])
        row += 2 * count
    return torch.stack(gate), torch.stack(up)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), float64."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-gate)) * up
