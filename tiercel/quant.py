"""Quantised weights from the file to the kernel: the types, their blocks, and `QuantTensor`.

A GGML type packs a row of weights into blocks of `block_weights` weights and `block_bytes` bytes.
Rows are whole blocks, so a tensor of shape (out, in) in layout FILE is one plane `data` of (out, in
/ block_weights * block_bytes) bytes, exactly as the file stores it. The float types have a block of
one weight. The byte-level meaning of each block is drawn in `kernels/dequantize.py`.

This module needs no PyTorch at run time: a file can be inspected without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from tiercel.errors import ArgumentError, ModelFormatError

if TYPE_CHECKING:
    import torch


class QuantType(Enum):
    """A storage type of weights; the value is (GGML id, weights per block, bytes per block)."""

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    BF16 = (30, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    IQ4_NL = (20, 32, 18)
    IQ4_XS = (23, 256, 136)

    @property
    def ggml_id(self) -> int:
        """The number that a GGUF file stores."""
        return self.value[0]

    @property
    def block_weights(self) -> int:
        """Weights in one block; 1 for the float types."""
        return self.value[1]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.value[2]

    @property
    def is_float(self) -> bool:
        """Whether a weight is stored as a plain float."""
        return self.block_weights == 1

    def row_bytes(self, in_features: int) -> int:
        """Bytes of one row of `in_features` weights, which must be whole blocks."""
        return in_features // self.block_weights * self.block_bytes


GGML_TYPES = {qtype.ggml_id: qtype for qtype in QuantType}


class Layout(Enum):
    """How the planes of a tensor lie in memory."""

    FILE = "file"  # one plane `data`: the bytes of the file


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """Weights in a storage type.

    Attributes:
        qtype: the storage type.
        layout: how `planes` lie.
        shape: (out_features, in_features); a vector is (1, n).
        planes: FILE: ``data``, (out, row_bytes) uint8 on any device.
    """

    qtype: QuantType
    layout: Layout
    shape: tuple[int, int]
    planes: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.numel() * plane.element_size() for plane in self.planes.values())

    def rows(self, start: int, stop: int) -> QuantTensor:
        """A view of output rows [start, stop).

        Raises:
            ArgumentError: a bound lies outside the tensor.
        """
        _check_range("rows", start, stop, self.shape[0])
        planes = {name: plane[start:stop] for name, plane in self.planes.items()}
        return QuantTensor(self.qtype, self.layout, (stop - start, self.shape[1]), planes)

    def take(self, index: torch.Tensor) -> QuantTensor:
        """A copy of the rows in `index`, (n,) integer on the planes' device, in that order."""
        planes = {name: plane.index_select(0, index) for name, plane in self.planes.items()}
        return QuantTensor(self.qtype, self.layout, (index.numel(), self.shape[1]), planes)

    def cols(self, start: int, stop: int) -> QuantTensor:
        """A view of input columns [start, stop).

        Raises:
            ArgumentError: a bound lies outside the tensor.
            ModelFormatError: a bound lies inside a block.
        """
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


def _check_range(what: str, start: int, stop: int, size: int) -> None:
    if not 0 <= start <= stop <= size:
        raise ArgumentError(
            f"{what} {start}..{stop} lie outside a tensor of {size}.", hint=f"Use 0 to {size}."
        )
