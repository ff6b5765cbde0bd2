"""Layout TILES of stacks of experts: units of 16 rows x 256 columns, as tensor cores take them.

A plane of layout FILE or BLOCKS keeps its name and its bytes; a unit's bytes become neighbours, so
that one warp reads them as whole lines, and units follow each other in the order (expert, tile of
16 rows, columns):

    (experts, out, row_bytes)  to  (experts, ceil(out / 16), ceil(in / 256), 16 * unit_bytes) uint8

Rows and columns that fill up the last units are zeros. In a unit the fields of `_FIELDS` follow
each other, each in the order in which the lanes of a warp take it: where a lane's bytes are 8 or
16, those of a row's four lanes are neighbours.

Codes of E2M1 are cut up besides: of the four in two bytes, bit 3 (the sign) goes to bit 15, 9, 14
and 13, bits 2 to 0 go to bit 8, 2, 5 and 12 and down. So few shifts and masks make a bfloat16
number of each.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Final

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.quant import QuantTensor
from tiercel.quant_types import TILE_ROWS, Layout, QuantType

UNIT_COLUMNS: Final = 256
MOST_E8M0: Final = 192  # scales of MXFP4 up to 2^65: the kernels' operands are 2^-64 of weights


class _Field(Struct, frozen=True):
    """Bytes [start, start + size) of each block of a row's 256 columns.

    Attributes:
        start: in a block.
        size: of a block.
        dims: sizes, whose product is that of all blocks.
        order: of them in a unit; 0 is the row, 1 the first of `dims`.
    """

    start: int
    size: int
    dims: tuple[int, ...]
    order: tuple[int, ...]


def _rows(start: int, size: int, blocks: int = 1) -> _Field:
    return _Field(start, size, (blocks * size,), (0, 1))


_E2M1 = (_Field(0, 128, (4, 2, 16), (2, 0, 1, 3)),)
_PLACES_OF_FOUR = ((15, 6), (9, 0), (14, 3), (13, 10))  # of a sign, of the lowest of three bits
_NIBBLES = (4, 4, 8), (1, 0, 2, 3)  # of 64 columns, of a lane: 8 columns of two groups
_HEADER = _rows(0, 16)
_FIELDS: Final[dict[QuantType, dict[str, tuple[_Field, ...]]]] = {
    QuantType.Q2_K: {"data": (_rows(16, 64), _rows(0, 16), _rows(80, 4))},
    QuantType.Q3_K: {"data": (_rows(32, 64), _rows(0, 32), _rows(96, 12), _rows(108, 2))},
    QuantType.Q4_K: {"data": (_Field(16, 128, *_NIBBLES), _HEADER)},
    QuantType.Q5_K: {"data": (_Field(48, 128, *_NIBBLES), _rows(16, 32), _HEADER)},
    QuantType.Q6_K: {
        "data": (
            _Field(0, 128, (2, 4, 4, 4), (1, 0, 3, 2, 4)),
            _Field(128, 64, (2, 2, 4, 4), (1, 0, 3, 2, 4)),
            _rows(192, 16),
            _rows(208, 2),
        )
    },
    QuantType.Q8_0: {"data": (_Field(2, 32, (8, 4, 8), (1, 0, 2, 3)), _rows(0, 2, 8))},
    QuantType.IQ2_XXS: {"data": (_Field(2, 64, (8, 8), (1, 0, 2)), _rows(0, 2))},
    QuantType.MXFP4: {"q": _E2M1, "scale": (_rows(0, 8),)},
    QuantType.NVFP4: {"q": _E2M1, "scale": (_rows(0, 16),)},
}
TILE_TYPES: Final = tuple(_FIELDS)


def unit_bytes(qtype: QuantType, plane: str) -> int:
    """Bytes of a plane that are of 16 rows x 256 columns."""
    return TILE_ROWS * sum(math.prod(field.dims) for field in _FIELDS[qtype][plane])


def tile_stack(weight: QuantTensor) -> QuantTensor:
    """Bring a stack of a type of `TILE_TYPES` into layout TILES.

    Planes that need no zeros are rearranged where they are, one expert at a time: `weight` must not
    be used afterwards.

    Args:
        weight: (experts, out, in), layout FILE or BLOCKS, on any device.

    Raises:
        ArgumentError: it is no such stack.
    """
    if weight.qtype not in _FIELDS or len(weight.shape) != 3 or weight.layout is Layout.TILES:
        raise ArgumentError(
            f"tile_stack: {weight.qtype.name} {weight.shape} in layout {weight.layout.name}.",
            hint=f"Pass a stack of {', '.join(kind.name for kind in TILE_TYPES)}.",
        )
    planes = dict(weight.planes)
    for name in _FIELDS[weight.qtype]:
        planes[name] = _tile_plane(planes[name], weight, name)
    return replace(weight, layout=Layout.TILES, planes=planes)


def untile_stack(weight: QuantTensor) -> QuantTensor:
    """A copy of a stack of layout TILES in that of its file."""
    out = weight.shape[1]
    planes = dict(weight.planes)
    for name in _FIELDS[weight.qtype]:
        plane, row_bytes = planes[name], _row_bytes(weight, name)
        if _is_cut_up(weight.qtype, name):
            plane = _exchange(plane, _joined())
        units = plane.index_select(-1, _places(weight.qtype, name).argsort().to(plane.device))
        parts = units.view(*units.shape[:3], TILE_ROWS, -1)
        rows = parts.transpose(2, 3).flatten(3).flatten(1, 2)
        made = rows[:, :out, :row_bytes].contiguous()
        is_e4m3 = (weight.qtype, name) == (QuantType.NVFP4, "scale")
        planes[name] = made.view(torch.float8_e4m3fn) if is_e4m3 else made
    layout = Layout.FILE if "data" in planes else Layout.BLOCKS
    return replace(weight, layout=layout, planes=planes)


def _row_bytes(weight: QuantTensor, name: str) -> int:
    """Bytes of a row, without zeros that fill it up."""
    size = unit_bytes(weight.qtype, name) // TILE_ROWS
    return weight.shape[-1] * size // UNIT_COLUMNS


def _tile_plane(plane: Tensor, weight: QuantTensor, name: str) -> Tensor:
    num_experts, out, cols = weight.shape
    tiles, units = math.ceil(out / TILE_ROWS), math.ceil(cols / UNIT_COLUMNS)
    size = unit_bytes(weight.qtype, name)
    places = _places(weight.qtype, name).to(plane.device)
    plane = plane.view(torch.uint8)
    shape = (num_experts, tiles, units, size)
    is_whole = plane[0].numel() == tiles * units * size and plane.is_contiguous()
    result = plane.view(shape) if is_whole else plane.new_empty(shape)
    for expert in range(num_experts):
        rows = plane[expert]
        if not is_whole:
            width = units * size // TILE_ROWS
            missing = (0, width - rows.shape[1], 0, tiles * TILE_ROWS - rows.shape[0])
            rows = torch.nn.functional.pad(rows, missing)
        parts = rows.reshape(tiles, TILE_ROWS, units, -1).transpose(1, 2).flatten(2)
        made = parts.index_select(-1, places)
        result[expert] = _exchange(made, _cut_up()) if _is_cut_up(weight.qtype, name) else made
    return result


def _is_cut_up(qtype: QuantType, name: str) -> bool:
    return _FIELDS[qtype][name] is _E2M1


def _exchange(codes: Tensor, table: Tensor) -> Tensor:
    """Two bytes for two bytes."""
    pairs = codes.contiguous().view(torch.int16).int() & 0xFFFF
    return table.to(codes.device)[pairs].view(torch.uint8)


@functools.cache
def _cut_up() -> Tensor:
    """What becomes of four codes in two bytes: (65536,) int16."""
    four = torch.arange(1 << 16)
    made = torch.zeros_like(four)
    for i, (sign, lowest) in enumerate(_PLACES_OF_FOUR):
        code = four >> 4 * i & 15
        made |= (code >> 3) << sign | (code & 7) << lowest
    return made.short()


@functools.cache
def _joined() -> Tensor:
    """The inverse of `_cut_up`."""
    return torch.argsort(_cut_up().int() & 0xFFFF).short()


@functools.cache
def _places(qtype: QuantType, name: str) -> Tensor:
    """Of each byte of a unit, its place in (row, bytes of 256 columns)."""
    places = torch.arange(unit_bytes(qtype, name)).view(TILE_ROWS, -1)
    parts = []
    for field in _FIELDS[qtype][name]:
        blocks = math.prod(field.dims) // field.size
        part = places.view(TILE_ROWS, blocks, -1)[:, :, field.start : field.start + field.size]
        parts.append(part.reshape(TILE_ROWS, *field.dims).permute(field.order).flatten())
    return torch.cat(parts)
