"""Repacking of quantised blocks between the order of the file and that of the tensor cores.

A permutation of bytes, in PyTorch operators on any device: one strided copy per plane, done once at
load. `quant_types.Plane` has the order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

TILE_ROWS = 16  # output rows that share a tile
_HALF = TILE_ROWS // 2


class Field(Struct, frozen=True):
    """Bytes [start, start + size) of each of `group` blocks, in pieces: see `quant.Plane`."""

    start: int
    size: int
    outer: int
    pieces: int
    inner: int
    is_woven: bool
    group: int

    @property
    def width(self) -> int:
        """Bytes that stay together."""
        return self.group * self.size // (self.outer * self.pieces * self.inner)


def pack_plane(blocks: Tensor, plane: Field) -> Tensor:
    """(rows, blocks, block_bytes) uint8 to (tiles, groups, 16 * group * size)."""
    rows, num_blocks = blocks.shape[:2]
    tiles, groups = -(-rows // TILE_ROWS), -(-num_blocks // plane.group)
    field = blocks[..., plane.start : plane.start + plane.size]
    missing = (groups * plane.group - num_blocks, tiles * TILE_ROWS - rows)
    if any(missing):
        field = torch.nn.functional.pad(field, (0, 0, 0, missing[0], 0, missing[1]))
    outer, pieces, inner = plane.outer, plane.pieces, plane.inner
    if plane.is_woven:
        split = field.reshape(tiles, 2, _HALF, groups, pieces, inner, outer, plane.width)
        packed = split.permute(0, 3, 1, 4, 2, 6, 5, 7)
    else:
        split = field.reshape(tiles, 2, _HALF, groups, outer, pieces, inner, plane.width)
        packed = split.permute(0, 3, 1, 5, 2, 4, 6, 7)
    return packed.reshape(tiles, groups, TILE_ROWS * plane.group * plane.size)


def unpack_plane(packed: Tensor, plane: Field, out: Tensor) -> None:
    """The inverse, into the plane's bytes of `out`, (rows, blocks, block_bytes)."""
    rows, num_blocks = out.shape[:2]
    tiles, groups = packed.shape[:2]
    shape = (tiles, groups, 2, plane.pieces, _HALF, plane.outer, plane.inner, plane.width)
    order = (0, 2, 4, 1, 3, 6, 5, 7) if plane.is_woven else (0, 2, 4, 1, 5, 3, 6, 7)
    split = packed.view(shape).permute(order)
    field = split.reshape(tiles * TILE_ROWS, groups * plane.group, plane.size)
    out[..., plane.start : plane.start + plane.size] = field[:rows, :num_blocks]


def gather_rows(
    weights: Tensor, table: Tensor, blocks: int, fields: Sequence[tuple[int, int]]
) -> Tensor:
    """Blocks of a file from the weights of a whole decode step; fields are of Q4_K or Q6_K.

    Args:
        weights: (bytes,) uint8.
        table: (slices, rows, 4) int32, see `fused_decode_step_rows.py`.
        blocks: of a row.
        fields: (first byte, bytes) of codes, header or scales, and of Q6_K qh and d in a block.

    Returns:
        (rows, blocks, block_bytes) uint8.
    """
    slices, rows, _ = table.shape
    least, extra = blocks // slices, blocks % slices
    sizes = torch.tensor([least + (i < extra) for i in range(slices)], device=table.device)
    of_block = torch.repeat_interleave(torch.arange(slices, device=table.device), sizes)
    entries = (table.long() & 0xFFFFFFFF)[of_block]  # (blocks, rows, 4)
    at, apart, place = 16 * entries[..., 0], entries[..., 1], entries[..., 2]
    count = place >> 8 & 0xFF
    own = (place & 0xFF) + torch.arange(blocks, device=table.device)[:, None] - (place >> 16)
    out = weights.new_empty((rows, blocks, sum(size for _, size in fields)))

    def copy(field: tuple[int, int], first: Tensor, pairs: int) -> None:
        """Pairs of 16 bytes, of the first and second lane of a block, 32 * count apart."""
        start, size = field
        byte = torch.arange(size, device=table.device)
        piece, width = byte // 16, max(1, pairs)
        apart = 32 * (piece % width) * count[..., None] + 16 * (piece // width) + byte % 16
        out[..., start : start + size] = weights[first[..., None] + apart].transpose(0, 1)

    copy(fields[0], at + 32 * own, 4)
    copy(fields[1], at + 128 * count + 16 * own, 1)
    if len(fields) > 2:
        copy(fields[2], at + 16 * (apart & 0xFFFF) + 32 * own, 2)
        copy(fields[3], at + 2 * (apart >> 16) + 2 * own, 1)
    return out
