"""Quantised weights from the file to the kernel: `QuantTensor`, of a type in `quant_types.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tiercel.errors import ArgumentError, ModelFormatError
from tiercel.quant_types import FP4_GROUPS, PLANES, Layout, QuantType

_MATRIX_PLANES = ("global_scale", "divisor")  # one number per matrix


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """Weights in a storage type, a matrix or a stack of matrices.

    Attributes:
        qtype: the storage type.
        layout: the order of `planes` in memory.
        shape: (out_features, in_features), or (experts, out_features, in_features); a vector is (1,
            n).
        planes: on any device. FILE: ``data``, (..., out, row_bytes) uint8. SOA: those of `PLANES`,
            each (tiles, groups, 16 * bytes of a group) uint8. BLOCKS: see `quant_types.py`; E4M3 is
            float8_e4m3fn, other planes of 8 bits are uint8. TILES: see `quant_tiles.py`. STEP:
            ``weights`` of all layers, and ``table``, see `quant_types.py`.
        block: FP8_BLOCK: rows and columns of a scale; edge blocks may be partial.
    """

    qtype: QuantType
    layout: Layout
    shape: tuple[int, ...]
    planes: dict[str, torch.Tensor]
    block: tuple[int, int] = (1, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all planes; in layout STEP of this matrix and its table."""
        if self.layout is Layout.STEP:
            table = self.planes["table"]
            return self.shape[-2] * self.qtype.row_bytes(self.shape[-1]) + table.nbytes
        return sum(plane.numel() * plane.element_size() for plane in self.planes.values())

    @property
    def device(self) -> torch.device:
        """Device of all planes."""
        return next(iter(self.planes.values())).device

    def ordered_planes(self) -> tuple[torch.Tensor, ...]:
        """The planes in the order of `PLANES`, as kernels take them; one in layout FILE."""
        if self.layout is Layout.SOA:
            return tuple(self.planes[plane.name] for plane in PLANES[self.qtype])
        return tuple(self.planes.values())

    @property
    def kernel_type(self) -> str:
        """The type and layout as `kernels/packed/packed_types.py` names them."""
        return f"{self.qtype.name}_STEP" if self.layout is Layout.STEP else self.qtype.name

    def rows(self, start: int, stop: int) -> QuantTensor:
        """A view of output rows [start, stop), of each matrix of a stack.

        Raises:
            ArgumentError: a bound is outside the tensor, or the layout is SOA, STEP or TILES.
            ModelFormatError: a bound is inside a block.
        """
        return self._cut("rows", -2, start, stop)

    def cols(self, start: int, stop: int) -> QuantTensor:
        """A view of input columns [start, stop), of each matrix of a stack.

        Raises:
            ArgumentError: a bound is outside the tensor, or the layout is SOA, STEP or TILES.
            ModelFormatError: a bound is inside a block.
        """
        return self._cut("columns", -1, start, stop)

    def take(self, index: torch.Tensor) -> QuantTensor:
        """A copy of some rows of a matrix, or of some matrices of a stack.

        Rows of FP8_BLOCK have scales of their own in the copy, whose block is one row high.

        Args:
            index: (n,) integer on the planes' device; the order of the copy.

        Raises:
            ArgumentError: the layout is SOA or STEP.
        """
        is_stack = len(self.shape) == 3
        if not is_stack or self.layout is not Layout.TILES:
            self._check_cut("take")
        planes = {}
        for name, plane in self.planes.items():
            if is_stack or name not in _MATRIX_PLANES:
                height = 1 if is_stack else self._sizes(name)[0]
                plane = take_rows(plane, index if height == 1 else index // height)
            planes[name] = plane
        block = self.block if is_stack else (1, self.block[1])
        shape = (index.numel(), *self.shape[1:])
        return QuantTensor(self.qtype, self.layout, shape, planes, block)

    def to(self, device: torch.device) -> QuantTensor:
        """The same tensor on another device."""
        planes = {name: plane.to(device) for name, plane in self.planes.items()}
        return replace(self, planes=planes)

    def check(self, name: str) -> None:
        """Raise ArgumentError unless the planes fit the shape and each other; `name` is the op's.

        Of layouts SOA and TILES nothing is checked: `ops/packed_repack.py` and `quant_tiles.py`
        alone make them.
        """
        if self.layout is Layout.FILE:
            _check_file(self, name)
        elif self.layout is Layout.BLOCKS:
            _check_blocks(self, name)

    def _sizes(self, name: str) -> tuple[int, int]:
        """Rows and columns of weights that one element of a plane, or block of bytes, is for."""
        if self.layout is Layout.FILE:
            return 1, self.qtype.block_weights
        if self.qtype is QuantType.FP8_BLOCK:
            return self.block if name == "scale" else (1, 1)
        return 1, FP4_GROUPS[self.qtype] if name == "scale" else 2

    def _cut(self, what: str, dim: int, start: int, stop: int) -> QuantTensor:
        """A view of [start, stop) of dimension -2 or -1."""
        self._check_cut("cols" if dim == -1 else "rows")
        size = self.shape[dim]
        _check_range(what, start, stop, size)
        whole = max(self._sizes(name)[dim] for name in self.planes if name not in _MATRIX_PLANES)
        if start % whole or (stop % whole and stop != size):
            raise ModelFormatError(
                f"{what} {start}..{stop} of a {self.qtype.name} tensor cut a block of {whole}.",
                hint=f"Cut at multiples of {whole}.",
            )
        planes = {}
        for name, plane in self.planes.items():
            if name not in _MATRIX_PLANES:
                unit = self._sizes(name)[dim]
                step = self.qtype.block_bytes if (self.layout, dim) == (Layout.FILE, -1) else 1
                first, last = start // unit * step, -(-stop // unit) * step
                plane = plane.narrow(dim, first, max(0, last - first))
            planes[name] = plane
        shape = list(self.shape)
        shape[dim] = stop - start
        return replace(self, shape=tuple(shape), planes=planes)

    def _check_cut(self, what: str) -> None:
        if self.layout in (Layout.SOA, Layout.STEP, Layout.TILES):
            raise ArgumentError(
                f"{what}: a tensor of layout {self.layout.name} cannot be cut.",
                hint="Cut it in layout FILE, before it is repacked.",
            )


def take_rows(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A copy of the entries of the first dimension in `index`, (n,) integer on its device.

    On a GPU `index_select` copies up to 16 rows one after the other (4096 columns of float32: 7 us
    for 16, other indexing 2 to 3 us; of one or two it is the faster one). Floats of 8 bits are
    copied as bytes: not every device selects them.
    """
    if matrix.dtype == torch.float8_e4m3fn:
        return take_rows(matrix.view(torch.uint8), index).view(matrix.dtype)
    return matrix[index] if 2 < index.numel() <= 16 else matrix.index_select(0, index)


def _check_file(weight: QuantTensor, name: str) -> None:
    data, qtype = weight.planes["data"], weight.qtype
    if not qtype.is_ggml:
        raise ArgumentError(
            f"{name}: {qtype.name} is no type of weights in layout FILE.",
            hint="Pass a GGML type, or a block format in layout BLOCKS.",
        )
    in_features = weight.shape[-1]
    expected = (*weight.shape[:-1], qtype.row_bytes(in_features))
    is_whole = in_features % qtype.block_weights == 0
    if not is_whole or tuple(data.shape) != expected or data.dtype != torch.uint8:
        raise ArgumentError(
            f"{name}: plane 'data' is {tuple(data.shape)} {data.dtype} but {qtype.name} "
            f"of shape {weight.shape} needs {expected} torch.uint8, in rows of whole blocks.",
            hint=f"Cut rows at multiples of {qtype.block_weights} weights.",
        )


def _check_blocks(weight: QuantTensor, name: str) -> None:
    *stack, out, cols = weight.shape
    qtype = weight.qtype.name
    totals = [plane for plane in weight.planes if plane in _MATRIX_PLANES]
    if set(weight.planes) - set(totals) != {"q", "scale"} or len(totals) != (qtype == "NVFP4"):
        raise ArgumentError(
            f"{name}: {qtype} with the planes {sorted(weight.planes)}.",
            hint="Pass q and scale; NVFP4 has global_scale or divisor too, the others neither.",
        )
    byte, e4m3 = torch.uint8, torch.float8_e4m3fn
    if weight.qtype is QuantType.FP8_BLOCK:
        q_type, scale_types = e4m3, [byte, torch.float32]
        q_shape = (*stack, out, cols)
        rows, width = weight.block
        scale_shape = (*stack, -(-out // rows), -(-cols // width))
    else:
        group = FP4_GROUPS[weight.qtype]
        q_type, scale_types = byte, [byte if group == 32 else e4m3]
        q_shape = (*stack, out, cols // 2)
        scale_shape = (*stack, out, cols // group)
        if cols % group:
            raise ArgumentError(
                f"{name}: {qtype} of shape {weight.shape} has {cols} columns.",
                hint=f"Pass a multiple of {group}.",
            )
    q, scale = weight.planes["q"], weight.planes["scale"]
    if q.dtype != q_type or tuple(q.shape) != q_shape:
        raise ArgumentError(
            f"{name}: the values of {qtype} {weight.shape} are {tuple(q.shape)} {q.dtype}.",
            hint=f"Pass {q_shape} {q_type}; view the bytes of a container, never cast them.",
        )
    if scale.dtype not in scale_types or tuple(scale.shape) != scale_shape:
        raise ArgumentError(
            f"{name}: the scales of {qtype} {weight.shape} are {tuple(scale.shape)} {scale.dtype}.",
            hint=f"Pass {scale_shape} in {' or '.join(map(str, scale_types))}.",
        )
    for total in totals:
        plane = weight.planes[total]
        if list(plane.shape) != stack or plane.dtype != torch.float32:
            raise ArgumentError(
                f"{name}: {total} of {weight.shape} is {tuple(plane.shape)} {plane.dtype}.",
                hint=f"Pass {tuple(stack)} torch.float32: one number per matrix.",
            )


def _check_range(what: str, start: int, stop: int, size: int) -> None:
    if not 0 <= start <= stop <= size:
        raise ArgumentError(
            f"{what} {start}..{stop} are outside a tensor of {size}.", hint=f"Use 0 to {size}."
        )
