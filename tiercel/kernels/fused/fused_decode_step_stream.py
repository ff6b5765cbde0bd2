"""The weights of all layers in the order in which the kernel of a whole decode step reads them.

A CTA has 4 groups of warps, and each reads one sequence of bytes from end to end: layer, matrix,
slice of columns that follows another (of down), part, and there its slots, two by two:

    slot | slot, if there is another | of Q6_K and Q5_K: a slot of the parts C of both

A slot is a unit for each warp of the group: rows and blocks of 256 weights as
`fused_decode_step_geometry.RowPlan` deals them; `fused_decode_step_units.cuh` has the order of a
unit's bytes. Parts C are first qh of both slots, then d (of Q6_K) of both. Slots are whole lines.
All but d moves in pieces of 16 bytes, so an order is two lists of pieces: of the file and of the
sequence. Bits of qh of Q5_K belong to 8 groups of 32 weights; a lane's 4 groups get bytes of their
own, nibbles of weights i and i + 16 side by side.
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
    TYPES,
    RowPlan,
    StepGeometry,
)
from tiercel.kernels.fused.fused_refusal import CTAS

_PIECE, _LINE = 16, 128
_PIECES = 9  # of a block's header or scales, and of its 8 of codes
_QH_PIECES = {"Q4_K": 0, "Q6_K": 4, "Q5_K": 2}  # of a block
_D_BYTES = {"Q4_K": 0, "Q6_K": 2, "Q5_K": 0}


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rows and blocks of one warp; where its bytes are in the sequence of its group."""

    part: int
    row: int  # in the part
    rows: int
    block: int
    blocks: int
    at: int
    qh_at: int = 0
    d_at: int = 0


def _slots(plan: RowPlan, rows: int, before: int, group: int) -> range:
    """The slots of a part that a group takes; `before` slots of other matrices came first."""
    first = (group * plan.turn // GROUPS - before) % plan.turn
    return range(first, -(-rows // plan.step), plan.turn)


def _slot_units(
    plan: RowPlan, time: int, group: int, part: int, rows: int, slot: int
) -> tuple[list[_Unit], int]:
    """Units of a slot, `at` in blocks from its begin, and the blocks of all."""
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
            at = width * plan.tile * tile + (block - first) * own_rows
            blocks = plan.first_block(mine + 1) - block
            units.append(_Unit(part, row, own_rows, block, blocks, at))
    return units, width * min(plan.step, rows - slot * plan.step)


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
    qh_bytes = _PIECE * _QH_PIECES[qtype]
    found: list[_Unit] = []
    start = 0
    for time in range(plan.times):
        for part in range(num_parts):
            slots = _slots(plan, rows, before + part * part_slots, group)
            for i in range(0, len(slots), 2):
                pair = [
                    _slot_units(plan, time, group, part, rows, slot) for slot in slots[i : i + 2]
                ]
                c_at = start + sum(_lines(own * _PIECE * _PIECES) for _, own in pair)
                blocks = sum(own for _, own in pair)
                passed = 0
                for units, own in pair:
                    for unit in units:
                        at = passed + unit.at
                        found.append(
                            replace(
                                unit,
                                at=start + unit.at * _PIECE * _PIECES,
                                qh_at=c_at + at * qh_bytes,
                                d_at=c_at + blocks * qh_bytes + at * _D_BYTES[qtype],
                            )
                        )
                    start += _lines(own * _PIECE * _PIECES)
                    passed += own
                start = c_at + _lines(blocks * (qh_bytes + _D_BYTES[qtype]))
    return found, start


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
            for qtype in TYPES
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
        self.blocks = geometry.plan(name).blocks
        with device:
            self._moves = self._list_moves(geometry, name)

    def _list_moves(self, geometry: StepGeometry, name: str) -> list[_Moves]:
        codes, qh, d = [], [], []
        ctas_of: dict[int, list[int]] = {}
        for cta in range(CTAS):
            ctas_of.setdefault(len(geometry.parts(name, cta)), []).append(cta)
        for num_parts, ctas in ctas_of.items():
            first_rows = torch.tensor(
                [[part[0] for part in geometry.parts(name, cta)] for cta in ctas],
                dtype=torch.int64,
            ).view(len(ctas), num_parts)
            for group in range(GROUPS):
                units, _ = _sequence(geometry, name, num_parts, group, self.qtype)
                shapes: dict[tuple[int, int], list[_Unit]] = {}
                for unit in units:
                    shapes.setdefault((unit.rows, unit.blocks), []).append(unit)
                owners = torch.tensor(ctas) * GROUPS + group
                for same in shapes.values():
                    blocks = self._blocks(same, first_rows)
                    codes.append(_code_moves(blocks, same, owners))
                    if _QH_PIECES[self.qtype]:
                        qh.append(_qh_moves(blocks, same, owners, _QH_PIECES[self.qtype]))
                    if _D_BYTES[self.qtype]:
                        d.append(_d_moves(blocks, same, owners))
        return [_joined(moves) for moves in (codes, qh, d) if moves]

    def _blocks(self, units: list[_Unit], first_rows: Tensor) -> Tensor:
        """(CTAs, units, blocks) indices of the blocks of equal units in a file."""
        rows = first_rows[:, torch.tensor([unit.part for unit in units])]
        rows = rows + torch.tensor([unit.row for unit in units])
        within = torch.arange(units[0].rows)[:, None] * self.blocks + torch.arange(units[0].blocks)
        first = rows * self.blocks + torch.tensor([unit.block for unit in units])
        return first[..., None] + within.flatten()

    def write(self, stream: Tensor, place: Tensor, data: Tensor) -> None:
        """Put a matrix, (rows, row bytes) uint8 as in a file, into its place in the stream."""
        for plane, size, moves in zip(self._split(data), (16, 16, 2), self._moves, strict=False):
            targets = moves.targets(place.to(stream.device), size)
            _elements(stream, size).index_copy_(0, targets, plane[moves.source])

    def read(self, stream: Tensor, place: Tensor) -> Tensor:
        """The inverse of `write`."""
        planes = []
        for size, moves in zip((16, 16, 2), self._moves, strict=False):
            found = _elements(stream, size)[moves.targets(place.to(stream.device), size)]
            planes.append(torch.empty_like(found).index_copy_(0, moves.source, found))
        return self._join(planes)

    def _split(self, data: Tensor) -> list[Tensor]:
        """A file's blocks to elements: pieces with codes, pieces of qh, d."""
        blocks = data.unflatten(1, (self.blocks, -1))
        if self.qtype == "Q4_K":
            parts = [blocks]
        elif self.qtype == "Q5_K":
            codes = torch.cat((blocks[..., :16], blocks[..., 48:]), dim=2)
            parts = [codes, _turn_bits(blocks[..., 16:48])]
        else:
            codes = torch.cat((blocks[..., 192:208], blocks[..., :128]), dim=2)
            parts = [codes, blocks[..., 128:192], blocks[..., 208:]]
        flat = [part.contiguous().flatten() for part in parts]
        return [_elements(part, size) for part, size in zip(flat, (16, 16, 2), strict=False)]

    def _join(self, planes: list[Tensor]) -> Tensor:
        """The inverse of `_split`."""
        count = planes[0].shape[0] // _PIECES
        parts = [plane.contiguous().view(torch.uint8).view(count, -1) for plane in planes]
        if self.qtype == "Q5_K":
            codes, bits = parts
            parts = [torch.cat((codes[:, :16], _turn_bits(bits), codes[:, 16:]), dim=1)]
        elif self.qtype == "Q6_K":
            codes, qh, d = parts
            parts = [torch.cat((codes[:, 16:], qh, codes[:, :16], d), dim=1)]
        return parts[0].reshape(count // self.blocks, -1)


def _turn_bits(bits: Tensor) -> Tensor:
    """Bytes i and i + 16 of 32 to bytes i of their low and of their high nibbles, or back."""
    low, high = bits[..., :16], bits[..., 16:]
    return torch.cat((low & 15 | high << 4, low >> 4 | high & 240), dim=-1)


def _elements(data: Tensor, size: int) -> Tensor:
    """Bytes as elements of 16 or 2 bytes."""
    return data.view(torch.int64).view(-1, 2) if size == _PIECE else data.view(torch.int16)


def _joined(moves: list[_Moves]) -> _Moves:
    return _Moves(
        *(
            torch.cat([getattr(move, field).flatten() for move in moves])
            for field in ("source", "to", "group")
        )
    )


def _moves(source: Tensor, to: Tensor, units: Tensor, owners: Tensor) -> _Moves:
    """Source (CTAs, units, n), target of a unit's elements (n,), of units (units,)."""
    target = units[:, None] + to
    return _Moves(source, target.expand(source.shape), owners[:, None, None].expand(source.shape))


def _code_moves(blocks: Tensor, units: list[_Unit], owners: Tensor) -> _Moves:
    """Headers or scales, and codes: chunk i of all lanes, then chunk i + 1."""
    count = blocks.shape[2]
    lanes = 2 * count
    piece = torch.arange(4 * 2)  # of a block's codes: 4 of its first lane, 4 of its second
    to = piece % 4 * lanes + piece // 4 + 2 * torch.arange(count)[:, None]
    headers = 4 * lanes + torch.arange(count)
    sources = blocks[..., None] * _PIECES + 1 + piece
    at = torch.tensor([unit.at // _PIECE for unit in units])
    return _moves(
        torch.cat((sources.flatten(2), blocks * _PIECES), dim=2),
        torch.cat((to.flatten(), headers)),
        at,
        owners,
    )


def _qh_moves(blocks: Tensor, units: list[_Unit], owners: Tensor, pieces: int) -> _Moves:
    """Chunk i of all lanes, then chunk i + 1, if a lane has two."""
    count, chunks = blocks.shape[2], pieces // 2
    piece = torch.arange(pieces)
    to = piece % chunks * 2 * count + piece // chunks + 2 * torch.arange(count)[:, None]
    at = torch.tensor([unit.qh_at // _PIECE for unit in units])
    sources = (blocks[..., None] * pieces + piece).flatten(2)
    return _moves(sources, to.flatten(), at, owners)


def _d_moves(blocks: Tensor, units: list[_Unit], owners: Tensor) -> _Moves:
    at = torch.tensor([unit.d_at // _D_BYTES["Q6_K"] for unit in units])
    return _moves(blocks, torch.arange(blocks.shape[2]), at, owners)
