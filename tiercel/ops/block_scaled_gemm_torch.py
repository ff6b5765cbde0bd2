"""Tiles of block-scaled tensor cores by PyTorch: made, read back, and the end of a product."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.kernels.block.block_scaled_gemm import TILE_COLUMNS, TILE_ROWS
from tiercel.ops.block_quantize import swizzle_scales
from tiercel.ops.block_quantize_torch import dequantize_fp4

_PIECE = 16  # bytes that the swizzle moves
_PIECES = TILE_COLUMNS // 2 // _PIECE  # of a row
_SCALE_ROWS, _SCALE_COLUMNS = 32, 4  # of a tile of scales, a quarter of its rows


def interleave(gate: Tensor, up: Tensor, run: int) -> Tensor:
    """Rows of gate and up in turns of `run`; the last turn has what is left of both."""
    order = torch.arange(gate.shape[0], device=gate.device)
    # By turn, then gate before up, then row.
    key = torch.cat((order // run * 2, order // run * 2 + 1))
    return _rows(torch.cat((_bytes(gate), _bytes(up))), key.argsort(stable=True), gate.dtype)


def deinterleave(both: Tensor, run: int) -> tuple[Tensor, Tensor]:
    """Gate and up of `interleave`."""
    rows = torch.arange(both.shape[0] // 2, device=both.device)
    last = both.shape[0] // 2 - rows // run * run
    gate = rows + rows // run * run
    up = gate + last.clamp(max=run)
    return _rows(_bytes(both), gate, both.dtype), _rows(_bytes(both), up, both.dtype)


def _bytes(plane: Tensor) -> Tensor:
    return plane.view(torch.uint8) if plane.element_size() == 1 else plane


def _rows(plane: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return plane.index_select(0, rows).view(dtype)


def tile(q: Tensor, scale: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Values (rows, columns / 2) and scales (rows, columns / group) in tiles."""
    rows, width = q.shape
    padded = torch.nn.functional.pad(
        q.view(torch.uint8), (0, -width % (TILE_COLUMNS // 2), 0, -rows % TILE_ROWS)
    )
    row_tiles, column_tiles = padded.shape[0] // TILE_ROWS, padded.shape[1] * 2 // TILE_COLUMNS
    pieces = padded.view(row_tiles, TILE_ROWS, column_tiles, _PIECES, _PIECE).transpose(1, 2)
    values = _swizzled(pieces).reshape(row_tiles, column_tiles, -1)
    per_tile = TILE_COLUMNS // group
    scales = torch.nn.functional.pad(
        scale.contiguous().view(torch.uint8), (0, -scale.shape[1] % per_tile)
    )
    return values, swizzle_scales(scales).view(row_tiles, column_tiles, -1)


def _swizzled(pieces: Tensor) -> Tensor:
    """(row tiles, column tiles, rows, pieces, bytes) with pieces moved; it undoes itself."""
    row = torch.arange(TILE_ROWS, device=pieces.device).unsqueeze(1)
    place = torch.arange(_PIECES, device=pieces.device) ^ row % 8
    return pieces.gather(3, place.unsqueeze(-1).expand(pieces.shape))


def untile(values: Tensor, scales: Tensor, group: int) -> Tensor:
    """All rows and columns of tiles, padding included, float32 without the totals."""
    row_tiles, column_tiles, _ = values.shape
    pieces = _swizzled(values.view(row_tiles, column_tiles, TILE_ROWS, _PIECES, _PIECE))
    q = pieces.transpose(1, 2).reshape(row_tiles * TILE_ROWS, -1)
    tiles = scales.view(row_tiles, -1, _SCALE_ROWS, TILE_ROWS // _SCALE_ROWS, _SCALE_COLUMNS)
    scale = tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * TILE_ROWS, -1)
    return dequantize_fp4(q, scale.view(torch.float8_e4m3fn) if group == 16 else scale)


def finish(sums: Tensor, totals: Tensor, limit: float | None, run: int) -> Tensor:
    """The result of float32 sums; `run`: rows of gate, then of up; 0 for plain products."""
    if not run:
        return sums * totals[0]
    gate, up = deinterleave(sums.t().contiguous(), run)
    gate, up = gate.t() * totals[0], up.t() * totals[1]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up
