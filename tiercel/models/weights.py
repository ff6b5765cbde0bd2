"""Weights of a checked file, by our names, as tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from tiercel.models.source import ModelSource
from tiercel.models.upload import Uploader
from tiercel.ops.dequantize import dequantize
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout


def unpermute_rows(heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Row order that undoes the permutation of Llama's GGUF files.

    There row 2i + j of a head's rotating part is row j * rotary_dim / 2 + i of the original.

    Returns:
        (heads * head_dim,) int64: original row r is stored row result[r].
    """
    rotating = torch.arange(rotary_dim).view(-1, 2).t().flatten()
    one_head = torch.cat((rotating, torch.arange(rotary_dim, head_dim)))
    return (torch.arange(heads).unsqueeze(1) * head_dim + one_head).flatten()


class WeightReader:
    """Reads tensors of a `ModelSource`; on a CPU matrices are views of the file until prepared."""

    def __init__(
        self,
        source: ModelSource,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
        *,
        dense_copies: bool = True,
    ) -> None:
        """Start reading.

        Args:
            source: a checked file.
            device: where results are; but see `file_tensor`.
            progress: called with (bytes read, bytes in all).
            dense_copies: for `prepare_linear`: whether there is memory for them.
        """
        self.source = source
        self.dense_copies = dense_copies
        self.device = device
        self._uploader = Uploader(device) if device.type == "cuda" else None
        self._progress = progress
        self._read_bytes = 0
        self._total_bytes = sum(info.nbytes for info in source.tensors.values())

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of our name."""
        return name in self.source.names

    def file_tensor(self, name: str) -> QuantTensor:
        """A matrix as the file stores it, read-only; rows of q and k ordered for (i, i + D/2)."""
        tensor = self._view(name)
        if self._uploader is not None:
            planes = {key: self._uploader(plane) for key, plane in tensor.planes.items()}
            tensor = QuantTensor(tensor.qtype, tensor.layout, tensor.shape, planes)
        if not self._is_permuted(name):
            return tensor
        return tensor.take(self._order(tensor.shape[0]).to(self.device))

    def stored(self, name: str) -> QuantTensor:
        """A matrix in its stored type on the device, in memory of its own."""
        tensor = self.file_tensor(name)
        if self._uploader is not None:
            return tensor
        planes = {key: plane.clone() for key, plane in tensor.planes.items()}
        return QuantTensor(tensor.qtype, tensor.layout, tensor.shape, planes)

    def vector(self, name: str) -> Tensor:
        """A vector, (n,) float32 on the device."""
        return dequantize(self._view(name), torch.float32).flatten().to(self.device)

    def norm_weight(self, name: str) -> Tensor:
        """An RMSNorm weight, (n,) float32 on the device, with the format's offset added."""
        return self.vector(name) + self.source.norm_offset

    def _view(self, name: str) -> QuantTensor:
        """A view of the file's bytes, on the CPU."""
        info = self.source.tensors[self.source.names[name]]
        with warnings.catch_warnings():
            # The map is read-only and stays so: these views are only ever read.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            data = torch.from_numpy(self.source.data(info.name))
        self._count(info.nbytes)
        return QuantTensor(info.qtype, Layout.FILE, info.shape, {"data": data})

    def _is_permuted(self, name: str) -> bool:
        return self.source.is_interleaved and name.split(".")[-2] in ("q", "k")

    def _order(self, rows: int) -> Tensor:
        config = self.source.config
        return unpermute_rows(rows // config.head_dim, config.head_dim, config.rope.rotary_dim)

    def _count(self, nbytes: int) -> None:
        self._read_bytes += nbytes
        if self._progress is not None:
            self._progress(min(self._read_bytes, self._total_bytes), self._total_bytes)
