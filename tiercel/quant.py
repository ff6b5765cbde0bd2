"""Quantised weights from the file to the kernel: `QuantTensor`, of a type in `quant_types.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiercel.errors import ArgumentError, ModelFormatError
from tiercel.quant_types import PLANES, Layout, QuantType


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """Weights in a storage type.

    Attributes:
        qtype: the storage type.
        layout: the order of `planes` in memory.
        shape: (out_features, in_features); a vector is (1, n).
        planes: uint8 on any device. FILE: ``data``, (out, row_bytes). SOA: those of `PLANES`, each
            (tiles, groups, 16 * bytes of a group).
    """

    qtype: QuantType
    layout: Layout
    shape: tuple[int, int]
    planes: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.numel() * plane.element_size() for plane in self.planes.values())

    def ordered_planes(self) -> tuple[torch.Tensor, ...]:
        """The planes in the order of `PLANES`, as kernels take them; one in layout FILE."""
        if self.layout is Layout.FILE:
            return (self.planes["data"],)
        return tuple(self.planes[plane.name] for plane in PLANES[self.qtype])

    def rows(self, start: int, stop: int) -> QuantTensor:
        """A view of output rows [start, stop).

        Raises:
            ArgumentError: a bound is outside the tensor, or the layout is not FILE.
        """
        self._check_file("rows")
        _check_range("rows", start, stop, self.shape[0])
        planes = {name: plane[start:stop] for name, plane in self.planes.items()}
        return QuantTensor(self.qtype, self.layout, (stop - start, self.shape[1]), planes)

    def take(self, index: torch.Tensor) -> QuantTensor:
        """A copy of the rows in `index`, (n,) integer on the planes' device, in that order.

        Raises:
            ArgumentError: the layout is not FILE.
        """
        self._check_file("take")
        planes = {name: take_rows(plane, index) for name, plane in self.planes.items()}
        return QuantTensor(self.qtype, self.layout, (index.numel(), self.shape[1]), planes)

    def cols(self, start: int, stop: int) -> QuantTensor:
        """A view of input columns [start, stop).

        Raises:
            ArgumentError: a bound is outside the tensor, or the layout is not FILE.
            ModelFormatError: a bound is inside a block.
        """
        self._check_file("cols")
        _check_range("columns", start, stop, self.shape[1])
        block = self.qtype.block_weights
        if start % block or stop % block:
            raise ModelFormatError(
                f"columns {start}..{stop} of a {self.qtype.name} tensor cut a block of {block}.",
                hint=f"Cut at multiples of {block}.",
            )
        per_block = self.qtype.block_bytes
        data = self.planes["data"][:, start // block * per_block : stop // block * per_block]
        return QuantTensor(self.qtype, self.layout, (self.shape[0], stop - start), {"data": data})

    def to(self, device: torch.device) -> QuantTensor:
        """The same tensor on another device."""
        planes = {name: plane.to(device) for name, plane in self.planes.items()}
        return QuantTensor(self.qtype, self.layout, self.shape, planes)

    def _check_file(self, what: str) -> None:
        if self.layout is not Layout.FILE:
            raise ArgumentError(
                f"{what}: a tensor of layout {self.layout.name} cannot be cut.",
                hint="Cut it in layout FILE, before it is repacked.",
            )


def take_rows(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A copy of the rows of a (rows, columns) tensor in `index`, (n,) integer on its device.

    On a GPU `index_select` copies up to 16 rows one after the other (4096 columns of float32: 7 us
    for 16, other indexing 2 to 3 us; of one or two it is the faster one).
    """
    return matrix[index] if 2 < index.numel() <= 16 else matrix.index_select(0, index)


def _check_range(what: str, start: int, stop: int, size: int) -> None:
    if not 0 <= start <= stop <= size:
        raise ArgumentError(
            f"{what} {start}..{stop} are outside a tensor of {size}.", hint=f"Use 0 to {size}."
        )
