"""Blocks of K-quants between the order of the file and that of the tensor cores.

A permutation of bytes, in PyTorch operators on any device: one strided copy per plane, done once at
load. `quant.Plane` draws the order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE_ROWS = 16  # output rows that share a tile
_HALF = TILE_ROWS // 2


@dataclass(frozen=True, slots=True)
class Field:
    """Bytes [start, start + size) of a block, in pieces of the order (outer, pieces, inner)."""

    start: int
    size: int
    outer: int
    pieces: int
    inner: int

    @property
    def width(self) -> int:
        """Bytes that stay together."""
        return self.size // (self.outer * self.pieces * self.inner)


def pack_plane(blocks: Tensor, plane: Field) -> Tensor:
    """(rows, blocks, block_bytes) uint8 to (tiles, blocks, 16 * size)."""
    rows, num_blocks = blocks.shape[:2]
    tiles = -(-rows // TILE_ROWS)
    field = blocks[..., plane.start : plane.start + plane.size]
    if rows % TILE_ROWS:
        field = torch.nn.functional.pad(field, (0, 0, 0, 0, 0, tiles * TILE_ROWS - rows))
    places = (plane.outer, plane.pieces, plane.inner)
    split = field.reshape(tiles, 2, _HALF, num_blocks, *places, plane.width)
    packed = split.permute(0, 3, 1, 5, 2, 4, 6, 7)
    return packed.reshape(tiles, num_blocks, TILE_ROWS * plane.size)


def unpack_plane(packed: Tensor, plane: Field, out: Tensor) -> None:
    """The inverse, into the plane's bytes of `out`, (rows, blocks, block_bytes)."""
    rows, num_blocks = out.shape[:2]
    tiles = packed.shape[0]
    shape = (tiles, num_blocks, 2, plane.pieces, _HALF, plane.outer, plane.inner, plane.width)
    split = packed.view(shape).permute(0, 2, 4, 1, 5, 3, 6, 7)
    field = split.reshape(tiles * TILE_ROWS, num_blocks, plane.size)
    out[..., plane.start : plane.start + plane.size] = field[:rows]
