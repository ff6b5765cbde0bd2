"""Where a byte of a block lies in its plane: one byte at a time, as `quant.Plane` says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tiercel.quant import PLANES, TILE_ROWS, Plane, QuantType

Bytes = npt.NDArray[np.uint8]


def q4k_repack(data: Bytes, qtype: QuantType) -> dict[str, Bytes]:
    """Blocks of the file to planes.

    Args:
        data: (rows, blocks, block_bytes) uint8.
        qtype: a type in `PLANES`.

    Returns:
        The planes, (tiles, blocks, 16 * size) uint8 each; rows that the tensor lacks are zeros.
    """
    rows, blocks, _ = data.shape
    tiles = -(-rows // TILE_ROWS)
    planes = {}
    for plane in PLANES[qtype]:
        out = np.zeros((tiles, blocks, TILE_ROWS * plane.size), np.uint8)
        for row in range(rows):
            for block in range(blocks):
                for i in range(plane.size):
                    byte = data[row, block, plane.start + i]
                    out[row // TILE_ROWS, block, place(plane, row % TILE_ROWS, i)] = byte
        planes[plane.name] = out
    return planes


def place(plane: Plane, row: int, i: int) -> int:
    """Where byte i of a plane's field of a tile's row lies within the tile's bytes."""
    width = plane.size // (plane.outer * plane.pieces * plane.inner)
    rest, byte = divmod(i, width)
    rest, inner = divmod(rest, plane.inner)
    outer, piece = divmod(rest, plane.pieces)
    half, row_of_half = divmod(row, TILE_ROWS // 2)
    at = half
    at = at * plane.pieces + piece
    at = at * (TILE_ROWS // 2) + row_of_half
    at = at * plane.outer + outer
    at = at * plane.inner + inner
    return at * width + byte
