"""Weights of a checked file, by our names, as tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.models.registry import shard_rules
from tiercel.models.sharding import COLUMNS, WHOLE, Cut, Sharding, cut_stored
from tiercel.models.source import ModelSource
from tiercel.models.stored import StoredWeight
from tiercel.models.upload import Uploader
from tiercel.models.weight_planes import (
    FACTORS,
    check_scales,
    check_table,
    cut,
    plane_size,
    unpack_mxfp4,
)
from tiercel.ops.dequantize import dequantize
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.resting import uses_native


def unpermute_rows(heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Row order that undoes the permutation of Llama's GGUF files.

    There row 2i + j of a head's rotating part is row j * rotary_dim / 2 + i of the original.

    Returns:
        (heads * head_dim,) int64: original row r is stored row result[r].
    """
    rotating = torch.arange(rotary_dim).view(-1, 2).t().flatten()
    one_head = torch.cat((rotating, torch.arange(rotary_dim, head_dim)))
    return (torch.arange(heads).unsqueeze(1) * head_dim + one_head).flatten()


def _as_tensor(data: npt.NDArray[np.uint8]) -> Tensor:
    with warnings.catch_warnings():
        # The map is read-only and stays so: these views are only ever read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)


class WeightReader:
    """Reads tensors of a `ModelSource`; on a CPU matrices are views of the file until prepared.

    Where several ranks share the model it reads this rank's part of each, and no other bytes.
    """

    def __init__(
        self,
        source: ModelSource,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
        *,
        dense_copies: bool = True,
        step_copy: bool = True,
        sharding: Sharding = WHOLE,
    ) -> None:
        """Start reading.

        Args:
            source: a checked file.
            device: where results are; but see `file_tensor`.
            progress: called with (bytes read, bytes in all).
            dense_copies: for `prepare_linear`: whether there is memory for them.
            step_copy: whether there is memory for a second packed copy of all layers, which the
                fused decode step reads.
            sharding: the rank's place among those that share the model.
        """
        self.source = source
        self.dense_copies = dense_copies
        self.step_copy = step_copy
        self.sharding = sharding
        self._rules = shard_rules(source.family)
        self.device = device
        self._uploader = Uploader(device) if device.type == "cuda" else None
        self._progress = progress
        self.read_bytes = 0
        # Of this rank, about: what is not split is a small part.
        self._total_bytes = sum(info.nbytes for info in source.tensors.values()) // sharding.size

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of our name."""
        return name in self.source.names or name in self.source.stored

    def file_tensor(self, name: str) -> QuantTensor:
        """A matrix as the file stores it, read-only; rows of q and k ordered for (i, i + D/2)."""
        tensor = self._view(name)
        if self._uploader is not None:
            planes = {
                key: self._uploader(plane.contiguous()) for key, plane in tensor.planes.items()
            }
            tensor = QuantTensor(tensor.qtype, tensor.layout, tensor.shape, planes)
        if not self._is_permuted(name):
            return tensor
        order = self._order(tensor.shape[0])
        if self._uploader is not None:
            return tensor.take(order.to(self.device))
        # By NumPy in one thread: PyTorch's wait for each other, on a busy machine 7 ms a matrix.
        rows = torch.from_numpy(tensor.planes["data"].numpy()[order.numpy()])
        return replace(tensor, planes={"data": rows})

    def stored(self, name: str) -> QuantTensor:
        """A matrix in its stored type on the device.

        In memory of its own, or on a CPU with the native library, which decodes rows where they
        are, in the map of the file.
        """
        tensor = self.file_tensor(name)
        if self._uploader is not None or uses_native(self.device.type):
            return tensor
        planes = {key: plane.clone() for key, plane in tensor.planes.items()}
        return QuantTensor(tensor.qtype, tensor.layout, tensor.shape, planes)

    def weight(self, name: str) -> QuantTensor:
        """A matrix or stack of experts on the device, in memory of its own.

        Layout FILE for floats and GGML types, BLOCKS for block formats. A stack is filled expert by
        expert: the peak on the host is the result, and one tensor of the file beside it if the
        device is a GPU.

        Raises:
            ModelFormatError: a scale is no number.
        """
        if name not in self.source.stored:
            return self.stored(name)
        cut, stored = self._cut(name), self.source.stored[name]
        if cut is not None:
            stored = cut_stored(stored, cut)
        if stored.qtype is QuantType.MXFP4 and "data" in stored.planes:
            planes = self._mxfp4_planes(stored)
        else:
            planes = {plane: self._plane(stored, plane) for plane in stored.planes}
        layout = Layout.FILE if "data" in planes else Layout.BLOCKS
        shape = stored.shape if len(stored.shape) > 1 else (1, *stored.shape)
        return QuantTensor(stored.qtype, layout, shape, planes, stored.block)

    def floats(self, name: str) -> Tensor:
        """Plain floats, float32 of the stored rank on the device."""
        shape = self.source.stored[name].shape
        return dequantize(self._view(name), torch.float32).reshape(shape).to(self.device)

    def integers(self, name: str) -> Tensor:
        """A table of experts by token id, (vocab_size, experts per token) int64 on the device.

        Raises:
            ModelFormatError: an expert that does not exist, or one that is twice in a row.
        """
        stored = self.source.stored[name]
        (file_name,) = stored.planes["data"]
        kind = "<i8" if stored.qtype is QuantType.I64 else "<i4"
        table = np.ascontiguousarray(self.source.data(file_name)).view(kind)
        check_table(table, stored.limit, file_name, self._file)
        self._count(table.nbytes)
        return torch.from_numpy(table.astype(np.int64)).to(self.device)

    def vector(self, name: str) -> Tensor:
        """A vector, (n,) float32 on the device."""
        return dequantize(self._view(name), torch.float32).flatten().to(self.device)

    def norm_weight(self, name: str) -> Tensor:
        """An RMSNorm weight, (n,) float32 on the device, with the format's offset added."""
        return self.vector(name) + self.source.norm_offset

    def _view(self, name: str) -> QuantTensor:
        """A view of the file's bytes, on the CPU: of this rank's part."""
        stored = self.source.stored.get(name)
        info = self.source.tensors[stored.planes["data"][0] if stored else self.source.names[name]]
        data = _as_tensor(self.source.data(info.name))
        tensor = QuantTensor(info.qtype, Layout.FILE, info.shape, {"data": data})
        cut = self._cut(name)
        if cut is not None:
            part = tensor.cols if cut.axis == COLUMNS else tensor.rows
            tensor = part(cut.start, cut.stop)
        self._count(tensor.nbytes)
        return tensor

    def _cut(self, name: str) -> Cut | None:
        """The part of a weight that this rank holds; None for all of it."""
        if self.sharding.size == 1:
            return None
        return self._rules.cut(self.source.config, self.sharding, name)

    @property
    def _file(self) -> str:
        return self.source.path.name

    def _plane(self, stored: StoredWeight, plane: str) -> Tensor:
        """A plane of a weight, filled from one tensor or one of each expert."""
        names = stored.planes[plane]
        qtype = self.source.tensors[names[0]].qtype
        matrices, rows, row_bytes = plane_size(stored, plane, qtype)
        out = torch.empty((matrices, rows, row_bytes), dtype=torch.uint8, device=self.device)
        for index, data in enumerate(self._matrices(stored, plane)):
            self._fill(data, out[index])
        if plane in FACTORS:
            return out.view(torch.float32).reshape(stored.shape[:-2])
        if qtype is QuantType.F8_E4M3:
            out = out.view(torch.float8_e4m3fn)
        elif plane == "scale" and qtype is QuantType.F32:
            out = out.view(torch.float32)
        return out if len(stored.shape) == 3 else out[0]

    def _mxfp4_planes(self, stored: StoredWeight) -> dict[str, Tensor]:
        """The planes of layout BLOCKS of GGUF's blocks."""
        matrices, rows, row_bytes = plane_size(stored, "data", QuantType.MXFP4)
        sizes = {"q": row_bytes // 17 * 16, "scale": row_bytes // 17}
        out = {
            key: torch.empty((matrices, rows, size), dtype=torch.uint8, device=self.device)
            for key, size in sizes.items()
        }
        for index, blocks in enumerate(self._matrices(stored, "data")):
            parts = {key: plane[index] for key, plane in out.items()}
            if self._uploader is not None:
                parts = {key: torch.empty_like(part, device="cpu") for key, part in parts.items()}
            unpack_mxfp4(blocks, parts["q"].numpy(), parts["scale"].numpy())
            if self._uploader is not None:
                for key, part in parts.items():
                    self._uploader.fill(part, out[key][index])
        return out if len(stored.shape) == 3 else {key: plane[0] for key, plane in out.items()}

    def _matrices(self, stored: StoredWeight, plane: str) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield (rows, row_bytes) of each matrix of a plane, views of the file, checked."""
        names = stored.planes[plane]
        is_stack = len(stored.shape) == 3 and len(names) == 1
        for name in names:
            info = self.source.tensors[name]
            data = self.source.data(name)
            if plane in FACTORS:
                data = data.reshape(-1, 1, 4)
            else:
                data = data.reshape(info.stack_shape[0] if is_stack else 1, -1, data.shape[1])
            part = cut(data, stored, plane, info.qtype)
            for matrix in part:
                check_scales(matrix, info, plane, self._file)
                yield matrix
            self._count(part.nbytes)

    def _fill(self, data: npt.NDArray[np.uint8], out: Tensor) -> None:
        """Copy a view of the file to `out`, contiguous on the device."""
        if self._uploader is not None:
            self._uploader.fill(_as_tensor(np.ascontiguousarray(data)), out)
        else:
            out.copy_(_as_tensor(data))

    def _is_permuted(self, name: str) -> bool:
        return self.source.is_interleaved and name.split(".")[-2] in ("q", "k")

    def _order(self, rows: int) -> Tensor:
        config = self.source.config
        return unpermute_rows(rows // config.head_dim, config.head_dim, config.rope.rotary_dim)

    def _count(self, nbytes: int) -> None:
        self.read_bytes += nbytes
        if self._progress is not None:
            self._progress(min(self.read_bytes, self._total_bytes), self._total_bytes)
