"""Dequantisation: weights in a storage type to a plain matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.packed.packed_dequantize import launch_packed_dequantize
from tiercel.ops.dequantize_torch import launch_dequantize
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant import QuantTensor, take_rows
from tiercel.quant_types import PLANES, Layout

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def dequantize(weight: QuantTensor, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """Decode a weight matrix, or some rows of it.

    Args:
        weight: (out, in) in either layout, on any device; in layout FILE rows may be strided.
        dtype: float32, float16 or bfloat16.
        rows: (n,) integer on the same device, which rows of layout FILE to decode, in that order;
            None for all.

    Returns:
        (out or n, in), contiguous, on the device of `weight`. Values are formed in float32,
        bit-exact with the `gguf` package, and rounded once. Values beyond float16 become infinite.

    Raises:
        ArgumentError: another dtype, a plane that does not fit the shape, or rows of layout SOA.

    Source: the block formats of ggml (ggml-quants.c); described in ops/dequantize_torch.py.
    """
    if dtype not in _DTYPES:
        raise ArgumentError(
            f"dequantize: dtype={dtype} is not a float type of weights.",
            hint="Use float32, float16 or bfloat16.",
        )
    if weight.layout is Layout.SOA:
        return _dequantize_planes(weight if rows is None else weight.take(rows), dtype)
    data = weight.planes["data"]
    num_rows, in_features = weight.shape
    ragged = in_features % weight.qtype.block_weights
    expected = (num_rows, weight.qtype.row_bytes(in_features))
    if ragged or tuple(data.shape) != expected or data.dtype != torch.uint8:
        raise ArgumentError(
            f"dequantize: plane 'data' is {tuple(data.shape)} {data.dtype} but {weight.qtype.name} "
            f"of shape {weight.shape} needs {expected} torch.uint8, in rows of whole blocks.",
            hint=f"Cut rows at multiples of {weight.qtype.block_weights} weights.",
        )
    count = num_rows if rows is None else rows.numel()
    out = torch.empty((count, in_features), dtype=dtype, device=data.device)
    alignment = 16 if weight.qtype.block_bytes % 16 == 0 else 2
    is_aligned = data.stride(0) % alignment == 0 == data.data_ptr() % alignment
    if count and is_aligned and _has_kernel(weight, data.device):
        index = None if rows is None else rows.int()
        launch_packed_dequantize(weight.ordered_planes(), weight.qtype.name, out, index)
    else:
        launch_dequantize(data if rows is None else take_rows(data, rows), weight.qtype.name, out)
    return out


def _dequantize_planes(weight: QuantTensor, dtype: torch.dtype) -> Tensor:
    device = next(iter(weight.planes.values())).device
    if not _has_kernel(weight, device):
        return dequantize(packed_repack(weight, Layout.FILE), dtype)
    out = torch.empty(weight.shape, dtype=dtype, device=device)
    launch_packed_dequantize(weight.ordered_planes(), weight.qtype.name, out)
    return out


def _has_kernel(weight: QuantTensor, device: torch.device) -> bool:
    """Whether a kernel decodes the type: at 3.1 to 3.5 TB/s on an H200."""
    return device.type == "cuda" and weight.qtype in PLANES and 0 not in weight.shape
