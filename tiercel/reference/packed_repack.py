"""Oracle of packed_repack: the position of each byte of a block in its plane, see `quant.Plane`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tiercel.quant_types import PLANES, TILE_ROWS, Plane, QuantType

Bytes = npt.NDArray[np.uint8]


def packed_repack(data: Bytes, qtype: QuantType) -> dict[str, Bytes]:
    """Blocks of the file to planes.

    Args:
        data: (rows, blocks, block_bytes) uint8.
        qtype: a type in `PLANES`.

    Returns:
        The planes, (tiles, groups, 16 * bytes of a group) uint8 each; rows and blocks that the
        tensor lacks are zeros.
    """
    rows, blocks, _ = data.shape
    group = qtype.group_blocks
    tiles, groups = -(-rows // TILE_ROWS), -(-blocks // group)
    planes = {}
    for plane in PLANES[qtype]:
        out = np.zeros((tiles, groups, TILE_ROWS * group * plane.size), np.uint8)
        for row in range(rows):
            for block in range(blocks):
                for i in range(plane.size):
                    byte = data[row, block, plane.start + i]
                    at = place(plane, group, row % TILE_ROWS, block % group * plane.size + i)
                    out[row // TILE_ROWS, block // group, at] = byte
        planes[plane.name] = out
    return planes


def place(plane: Plane, group: int, row: int, i: int) -> int:
    """The position in a tile's bytes of byte i of the fields of a group of blocks of a row."""
    width = group * plane.size // (plane.outer * plane.pieces * plane.inner)
    rest, byte = divmod(i, width)
    if plane.is_woven:
        rest, outer = divmod(rest, plane.outer)
        piece, inner = divmod(rest, plane.inner)
    else:
        rest, inner = divmod(rest, plane.inner)
        outer, piece = divmod(rest, plane.pieces)
    half, row_of_half = divmod(row, TILE_ROWS // 2)
    at = half
    at = at * plane.pieces + piece
    at = at * (TILE_ROWS // 2) + row_of_half
    at = at * plane.outer + outer
    at = at * plane.inner + inner
    return at * width + byte
