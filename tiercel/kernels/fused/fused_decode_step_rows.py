"""Where each row of a matrix is among the weights of a whole decode step.

Other kernels find its bytes by this table, so that the weights are in memory once. A row's blocks
are in one unit for each slice of columns (`RowPlan`), and what a reader needs of a unit is
`ENTRY` 32-bit integers:

    0  where the unit begins, in 16 bytes
    1  from there to its parts qh, in 16 bytes, and, in the upper half, to its d, in 2 bytes (Q6_K)
    2  the row's first block among those of the unit, 8 bits; blocks of the unit, 8 bits; in the
       upper half the block of the row with which the slice begins
    3  0

So block b of a row is block k = first + b - begin of n in its unit: its codes are 4 pairs of 16
bytes, 32 n apart, from 32 k on, its header or scales 16 bytes at 128 n + 16 k, its parts qh pairs
likewise, its d at 2 k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.kernels.fused.fused_decode_step_geometry import GROUPS, StepGeometry
from tiercel.kernels.fused.fused_decode_step_stream import alike_ctas, step_units

ENTRY = 4
_PIECE = 16


class RowTable:
    """The table of one matrix; the same for every layer where it has the same type."""

    def __init__(self, geometry: StepGeometry, name: str, qtype: str) -> None:
        """List a matrix's units.

        Args:
            geometry: of the decoder.
            name: of `MATRICES`.
            qtype: of the matrix, of `READ_TYPES`.
        """
        plan = geometry.plan(name)
        slice_of = {plan.first_block(i): i for i in range(plan.slices)}
        pieces: list[Tensor] = []  # row, slice, group of warps, `at`, parts of the entry
        for ctas, first_rows in alike_ctas(geometry, name):
            num_parts = first_rows.shape[1]
            for group in range(GROUPS):
                units = step_units(geometry, name, num_parts, group, qtype)
                own = [
                    (
                        unit.part,
                        unit.row + i,
                        slice_of[unit.block],
                        begins[0] // _PIECE,
                        _apart(begins, qtype),
                        unit.blocks * i | unit.blocks * unit.rows << 8 | unit.block << 16,
                    )
                    for unit in units
                    for begins in [unit.begins(qtype, plan.lanes * unit.rows * unit.blocks)]
                    for i in range(unit.rows)
                ]
                if not own or not num_parts:
                    continue
                part, row, *rest = torch.tensor(own).t()
                rows = first_rows[:, part] + row
                owners = (ctas * GROUPS + group)[:, None].expand(rows.shape)
                columns = (rows, owners, *(column.expand(rows.shape) for column in rest))
                pieces.append(torch.stack([column.flatten() for column in columns]))
        rows, self._groups, slices, self._at, *rest = torch.cat(pieces, dim=1)
        num_rows = int(rows.max()) + 1
        self._order = slices * num_rows + rows
        self._rest = (*rest, torch.zeros_like(rows))
        self._shape = (plan.slices, num_rows, ENTRY)

    def place(self, place: Tensor) -> Tensor:
        """(slices, rows, ENTRY) int32, of the matrix of a layer.

        place: (CTAS, GROUPS) int64, where the matrix begins, of `StreamLayout.place`.
        """
        at = self._at + place.flatten()[self._groups] // _PIECE
        entries = torch.stack((at, *self._rest), dim=1)
        entries = torch.where(entries < 1 << 31, entries, entries - (1 << 32)).int()  # unsigned
        table = torch.empty(self._shape, dtype=torch.int32)
        table.view(-1, ENTRY).index_copy_(0, self._order, entries)
        return table


def _apart(begins: Sequence[int], qtype: str) -> int:
    """Where qh and d of Q6_K are, from the unit's begin on."""
    if qtype != "Q6_K":
        return 0
    begin, _, qh, d = begins
    return (qh - begin) // _PIECE | (d - begin) // 2 << 16
