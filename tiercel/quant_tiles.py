"""Layout TILES of stacks of experts: units of 16 rows x 256 columns, as tensor cores take them.

A plane of layout FILE or BLOCKS keeps its name and its bytes; a unit's bytes become neighbours, so
that one warp reads them as whole lines, and units follow each other in the order (expert, tile of
16 rows, columns):

    (experts, out, row_bytes)  to  (experts, ceil(out / 16), ceil(in / 256), 16 * unit_bytes) uint8

Rows and columns that fill up the last units are zeros. In a unit the fields of `_FIELDS` follow
each other. Of a field the order is (pieces, row, outer, inner): a row's bytes are (outer, pieces,
inner) before, and lane 4 g + t of a warp takes those of outer = t, 16 bytes of each piece, of rows
g and g + 8.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.quant import QuantTensor
from tiercel.quant_types import TILE_ROWS, Layout, QuantType

UNIT_COLUMNS: Final = 256
MOST_E8M0: Final = 192  # scales of MXFP4 up to 2^65: the kernels' operands are 2^-64 of weights


@dataclass(frozen=True, slots=True)
class _Field:
    """Bytes [start, start + size) of a row's 256 columns."""

    start: int
    size: int
    outer: int = 1
    pieces: int = 1


_E2M1 = (_Field(0, 128, 4, 2),)
_FIELDS: Final[dict[QuantType, dict[str, tuple[_Field, ...]]]] = {
    QuantType.Q2_K: {"data": (_Field(16, 64), _Field(0, 16), _Field(80, 4))},
    QuantType.MXFP4: {"q": _E2M1, "scale": (_Field(0, 8),)},
    QuantType.NVFP4: {"q": _E2M1, "scale": (_Field(0, 16),)},
}
TILE_TYPES: Final = tuple(_FIELDS)


def unit_bytes(qtype: QuantType, plane: str) -> int:
    """Bytes of a plane that are of 16 rows x 256 columns."""
    return TILE_ROWS * sum(field.size for field in _FIELDS[qtype][plane])


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
        result[expert] = parts.index_select(-1, places)
    return result


@functools.cache
def _places(qtype: QuantType, name: str) -> Tensor:
    """Of each byte of a unit, its place in (row, bytes of 256 columns)."""
    fields = _FIELDS[qtype][name]
    row_bytes = sum(field.size for field in fields)
    places = torch.arange(TILE_ROWS * row_bytes).view(TILE_ROWS, row_bytes)
    parts = []
    for field in fields:
        part = places[:, field.start : field.start + field.size]
        part = part.reshape(TILE_ROWS, field.outer, field.pieces, -1)
        parts.append(part.permute(2, 0, 1, 3).flatten())
    return torch.cat(parts)
