"""The weights of all layers in the order in which the kernel of a whole decode step reads them.

A CTA has 4 groups of warps, and each reads one sequence of bytes from end to end: layer, matrix,
slice of columns that follows another (of down), part, and there its slots, two by two:

    slot | slot, if there is another | of Q6_K, Q5_K and Q5_0: a slot of the parts C of both

A slot is a unit for each warp of the group: rows and blocks of weights as
`fused_decode_step_geometry.RowPlan` deals them. A lane of a warp has 128 weights of a row. What a
type stores is cut into planes (`_PLANES`), each of elements that a lane, or two, read together;
`fused_decode_step_units.cuh` and `fused_decode_step_units32.cuh` have their order. Slots are whole
lines. A slot of Q8_0 is two, one after the other, with half of each lane's weights.

So an order is two lists for each plane: of elements of the file and of the sequence. Bits of qh of
Q5_K and Q5_0 belong to 8 groups of 32 weights; a lane's 4 groups get bytes of their own, nibbles of
weights i and i + 16 side by side. Nibbles of IQ4_XS and IQ4_NL are in the order of weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.kernels.fused.fused_decode_step_geometry import (
    GROUP_WARPS,
    GROUPS,
    MATRICES,
    RowPlan,
    StepGeometry,
)
from tiercel.kernels.fused.fused_decode_step_planes import join_planes, split_planes
from tiercel.kernels.fused.fused_refusal import CTAS

_LINE = 128
# Where a plane is: within each unit of a slot; in a slot, unit after unit; so in the second slot of
# Q8_0; so in the parts C of two slots.
_UNIT, _SLOT, _SECOND, _PAIR = range(4)


class _Plane(Struct, frozen=True):
    """Elements of a type.

    Attributes:
        size: bytes of an element.
        lanes: of a warp that share elements, 1 or 2.
        count: elements of such lanes; element i of all comes before element i + 1.
        section: where the plane is.
        after: bytes of a lane in that section that come before the plane.
    """

    size: int
    lanes: int
    count: int
    section: int
    after: int = 0

    @property
    def lane_bytes(self) -> int:
        """Bytes of a lane; two that share an element have half of it each."""
        return self.size * self.count // self.lanes


_K_CODES = (_Plane(16, 1, 4, _UNIT), _Plane(16, 2, 1, _UNIT, 64))  # codes; header or scales
_NIBBLES = (_Plane(16, 1, 4, _SLOT), _Plane(8, 1, 1, _SLOT, 64))  # codes; d
_FIFTH_BITS = _Plane(16, 1, 1, _PAIR)
_PLANES: dict[str, tuple[_Plane, ...]] = {
    "Q4_K": _K_CODES,
    "Q5_K": (*_K_CODES, _FIFTH_BITS),
    "Q6_K": (*_K_CODES, _Plane(16, 1, 2, _PAIR), _Plane(2, 2, 1, _PAIR, 32)),
    "Q4_0": _NIBBLES,
    "IQ4_NL": _NIBBLES,
    "Q5_0": (*_NIBBLES, _FIFTH_BITS),
    "IQ4_XS": (_Plane(16, 1, 4, _SLOT), _Plane(8, 2, 1, _SLOT, 64)),
    "Q8_0": tuple(
        plane
        for section in (_SLOT, _SECOND)
        for plane in (_Plane(16, 1, 4, section), _Plane(4, 1, 1, section, 64))
    ),
}


def _section_bytes(qtype: str, *sections: int) -> int:
    """Bytes of a lane in some sections."""
    return sum(plane.lane_bytes for plane in _PLANES[qtype] if plane.section in sections)


class _Place(Struct, frozen=True):
    """Where a unit is in a slot, or in the parts C of two: first byte, lanes before, all lanes."""

    at: int
    before: int
    lanes: int


_NOWHERE = _Place(0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rows and blocks of one warp; where its bytes are in the sequence of its group."""

    part: int
    row: int  # in the part
    rows: int
    block: int
    blocks: int
    before: int  # lanes of the slot's units before it
    slot: _Place = _NOWHERE
    second: _Place = _NOWHERE
    pair: _Place = _NOWHERE

    def begin(self, plane: _Plane, qtype: str, lanes: int) -> int:
        """The first byte of one of its planes; `lanes`: its own."""
        if plane.section == _UNIT:
            unit_bytes = _section_bytes(qtype, _UNIT)
            return self.slot.at + unit_bytes * self.slot.before + plane.after * lanes
        place = (self.slot, self.slot, self.second, self.pair)[plane.section]
        return place.at + plane.after * place.lanes + plane.lane_bytes * place.before

    def begins(self, qtype: str, lanes: int) -> list[int]:
        """The first byte of each of its planes; `lanes`: its own."""
        return [self.begin(plane, qtype, lanes) for plane in _PLANES[qtype]]


def _slots(plan: RowPlan, rows: int, before: int, group: int) -> range:
    """The slots of a part that a group takes; `before` slots of other matrices came first."""
    first = (group * plan.turn // GROUPS - before) % plan.turn
    return range(first, -(-rows // plan.step), plan.turn)


def _slot_units(
    plan: RowPlan, time: int, group: int, part: int, rows: int, slot: int
) -> tuple[list[_Unit], int]:
    """Units of a slot and the lanes of all."""
    from_slice = time * plan.across + GROUP_WARPS * group % plan.across
    first = plan.first_block(from_slice)
    width = plan.first_block(from_slice + plan.side) - first
    units = []
    for warp in range(GROUP_WARPS):
        tile, mine = warp // plan.side, from_slice + warp % plan.side
        row = slot * plan.step + tile * plan.tile
        own_rows = min(plan.tile, rows - row)
        if own_rows > 0:
            block = plan.first_block(mine)
            before = plan.lanes * (width * plan.tile * tile + (block - first) * own_rows)
            blocks = plan.first_block(mine + 1) - block
            units.append(_Unit(part, row, own_rows, block, blocks, before))
    return units, plan.lanes * width * min(plan.step, rows - slot * plan.step)


def _lines(num_bytes: int) -> int:
    """Whole lines of memory: copies that begin within one are slower."""
    return -(-num_bytes // _LINE) * _LINE


def _sequence(
    geometry: StepGeometry, name: str, num_parts: int, group: int, qtype: str
) -> tuple[list[_Unit], int]:
    """A matrix in the sequence of a group of warps, with addresses in bytes, and its length.

    Args:
        geometry: of the decoder.
        name: of `MATRICES`.
        num_parts: of the CTA.
        group: of warps.
        qtype: of the matrix.
    """
    plan, rows = geometry.plan(name), geometry.part_rows(name)
    # All parts of a phase are dealt as one list, q, k and v too.
    others = {"k": ("q",), "v": ("q", "k")}.get(name, ())
    before = sum(-(-geometry.part_rows(other) // plan.step) for other in others)
    part_slots = -(-rows // plan.step)
    slot_bytes, second_bytes, pair_bytes = (
        _section_bytes(qtype, *sections) for sections in ((_UNIT, _SLOT), (_SECOND,), (_PAIR,))
    )
    found: list[_Unit] = []
    start = 0
    for time in range(plan.times):
        for part in range(num_parts):
            slots = _slots(plan, rows, before + part * part_slots, group)
            for i in range(0, len(slots), 2):
                pair = [
                    _slot_units(plan, time, group, part, rows, slot) for slot in slots[i : i + 2]
                ]
                sizes = [_lines(own * slot_bytes) + _lines(own * second_bytes) for _, own in pair]
                c_at, lanes, passed = start + sum(sizes), sum(own for _, own in pair), 0
                for (units, own), size in zip(pair, sizes, strict=True):
                    second = start + _lines(own * slot_bytes)
                    found += [
                        replace(
                            unit,
                            slot=_Place(start, unit.before, own),
                            second=_Place(second, unit.before, own),
                            pair=_Place(c_at, passed + unit.before, lanes),
                        )
                        for unit in units
                    ]
                    start += size
                    passed += own
                start = c_at + _lines(lanes * pair_bytes)
    return found, start


def step_units(
    geometry: StepGeometry, name: str, num_parts: int, group: int, qtype: str
) -> list[_Unit]:
    """The units of a matrix in the sequence of a group of warps; see `_sequence`."""
    return _sequence(geometry, name, num_parts, group, qtype)[0]


def alike_ctas(geometry: StepGeometry, name: str) -> list[tuple[Tensor, Tensor]]:
    """CTAs with the same number of parts, (CTAs,), and first rows, (CTAs, parts) int64."""
    ctas_of: dict[int, list[int]] = {}
    for cta in range(CTAS):
        ctas_of.setdefault(len(geometry.parts(name, cta)), []).append(cta)
    return [
        (
            torch.tensor(ctas),
            torch.tensor(
                [[part[0] for part in geometry.parts(name, cta)] for cta in ctas],
                dtype=torch.int64,
            ).view(len(ctas), num_parts),
        )
        for num_parts, ctas in ctas_of.items()
    ]


class StreamLayout:
    """Where each matrix begins among the weights of all layers.

    Attributes:
        geometry: of the decoder.
        num_bytes: of all weights.
        starts: (CTAS, GROUPS) int64, where the sequence of each group begins.
    """

    def __init__(self, geometry: StepGeometry) -> None:
        self.geometry = geometry
        self._sizes = {
            (name, qtype): _matrix_sizes(geometry, name, qtype)
            for name in MATRICES
            for qtype in geometry.types
        }
        lengths = torch.zeros((CTAS, GROUPS), dtype=torch.int64)
        self._places: list[dict[str, Tensor]] = []
        for layer in range(len(geometry.masks)):
            places = {}
            for name in MATRICES:
                places[name] = lengths
                lengths = lengths + self._sizes[name, geometry.qtype(layer, name)]
            self._places.append(places)
        ends = lengths.flatten().cumsum(0)
        self.num_bytes = int(ends[-1])
        self.starts = (ends - lengths.flatten()).view(CTAS, GROUPS)

    def place(self, layer: int, name: str) -> Tensor:
        """(CTAS, GROUPS) int64, where a matrix of a layer begins."""
        return self.starts + self._places[layer][name]


def _matrix_sizes(geometry: StepGeometry, name: str, qtype: str) -> Tensor:
    """(CTAS, GROUPS) int64, the bytes of a matrix."""
    by_parts: dict[int, list[int]] = {}
    rows = []
    for cta in range(CTAS):
        parts = len(geometry.parts(name, cta))
        if parts not in by_parts:
            by_parts[parts] = [
                _sequence(geometry, name, parts, group, qtype)[1] for group in range(GROUPS)
            ]
        rows.append(by_parts[parts])
    return torch.tensor(rows)


class _Moves(Struct, frozen=True):
    """Elements of a file's planes and where they go; `to` is relative to the matrix's place."""

    source: Tensor
    to: Tensor
    group: Tensor  # of warps among those of all CTAs

    def targets(self, place: Tensor, size: int) -> Tensor:
        """Elements of `size` bytes of the sequence."""
        return self.to + place.flatten()[self.group] // size


class MatrixOrder:
    """The order of one matrix; the same for every layer where it has the same type."""

    def __init__(self, geometry: StepGeometry, name: str, qtype: str, device: torch.device) -> None:
        """List the pieces of a matrix.

        Args:
            geometry: of the decoder.
            name: of `MATRICES`.
            qtype: of the matrix, of `TYPES`.
            device: of the weights.
        """
        self.qtype = qtype
        self.plan = geometry.plan(name)
        with device:
            self._moves = self._list_moves(geometry, name)

    def _list_moves(self, geometry: StepGeometry, name: str) -> list[_Moves]:
        planes = _PLANES[self.qtype]
        moves: list[list[_Moves]] = [[] for _ in planes]
        for ctas, first_rows in alike_ctas(geometry, name):
            for group in range(GROUPS):
                units = step_units(geometry, name, first_rows.shape[1], group, self.qtype)
                shapes: dict[tuple[int, int], list[_Unit]] = {}
                for unit in units:
                    shapes.setdefault((unit.rows, unit.blocks), []).append(unit)
                owners = ctas * GROUPS + group
                for same in shapes.values():
                    lanes = self._lanes(same, first_rows)
                    for plane, found in zip(planes, moves, strict=True):
                        found.append(_plane_moves(plane, self.qtype, lanes, same, owners))
        return [_joined(found) for found in moves]

    def _lanes(self, units: list[_Unit], first_rows: Tensor) -> Tensor:
        """(CTAs, units, lanes) of equal units: their numbers among the lanes of all rows."""
        plan = self.plan
        rows = first_rows[:, torch.tensor([unit.part for unit in units])]
        rows = rows + torch.tensor([unit.row for unit in units])
        row_lanes, own = plan.lanes * plan.blocks, plan.lanes * units[0].blocks
        within = torch.arange(units[0].rows)[:, None] * row_lanes + torch.arange(own)
        first = rows * row_lanes + torch.tensor([plan.lanes * unit.block for unit in units])
        return first[..., None] + within.flatten()

    def write(self, stream: Tensor, place: Tensor, data: Tensor) -> None:
        """Put a matrix, (rows, row bytes) uint8 as in a file, into its place in the stream."""
        parts = split_planes(self.qtype, data)
        for plane, part, moves in zip(_PLANES[self.qtype], parts, self._moves, strict=True):
            elements = _elements(part.contiguous().flatten(), plane.size)
            targets = moves.targets(place.to(stream.device), plane.size)
            _elements(stream, plane.size).index_copy_(0, targets, elements[moves.source])

    def read(self, stream: Tensor, place: Tensor) -> Tensor:
        """The inverse of `write`."""
        parts = []
        for plane, moves in zip(_PLANES[self.qtype], self._moves, strict=True):
            targets = moves.targets(place.to(stream.device), plane.size)
            found = _elements(stream, plane.size)[targets]
            elements = torch.empty_like(found).index_copy_(0, moves.source, found)
            parts.append(elements.view(torch.uint8).flatten())
        whole = join_planes(self.qtype, parts)
        return whole.reshape(
            -1, whole.numel() * self.plan.lanes * self.plan.blocks // self._num_lanes
        )

    @property
    def _num_lanes(self) -> int:
        """Of all rows."""
        codes = _PLANES[self.qtype][0]
        return self._moves[0].source.numel() // codes.count


def _elements(data: Tensor, size: int) -> Tensor:
    """Bytes as elements of 16, 8, 4 or 2 bytes."""
    if size == 16:
        return data.view(torch.int64).view(-1, 2)
    return data.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[size])


def _joined(moves: list[_Moves]) -> _Moves:
    return _Moves(
        *(
            torch.cat([getattr(move, field).flatten() for move in moves])
            for field in ("source", "to", "group")
        )
    )


def _plane_moves(
    plane: _Plane, qtype: str, lanes: Tensor, units: list[_Unit], owners: Tensor
) -> _Moves:
    """Element i of all lanes of a unit, then element i + 1.

    Args:
        plane: of the type.
        qtype: of the matrix.
        lanes: (CTAs, units, lanes), their numbers.
        units: of equal size.
        owners: (CTAs,), groups of warps.
    """
    runs = lanes[..., :: plane.lanes] // plane.lanes
    number = torch.arange(plane.count)
    source = (runs[..., None] * plane.count + number).flatten(2)
    within = (number * runs.shape[2] + torch.arange(runs.shape[2])[:, None]).flatten()
    begins = [unit.begin(plane, qtype, lanes.shape[2]) // plane.size for unit in units]
    target = torch.tensor(begins)[:, None] + within
    return _Moves(source, target.expand(source.shape), owners[:, None, None].expand(source.shape))
