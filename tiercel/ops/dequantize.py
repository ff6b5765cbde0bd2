"""Dequantisation: weights in a storage type to a plain matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tiercel.env import has_block_kernel
from tiercel.errors import ArgumentError
from tiercel.kernels.native import matrices as native
from tiercel.kernels.native.forms import has_native, is_native_type
from tiercel.kernels.packed.packed_dequantize import launch_packed_dequantize
from tiercel.ops import block_quantize_torch
from tiercel.ops.dequantize_torch import launch_dequantize
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant import QuantTensor, take_rows
from tiercel.quant_types import FP4_GROUPS, PLANES, Layout, QuantType

# Weights of layout BLOCKS decoded together: about 20 bytes of temporaries each, 320 MB.
CHUNK_WEIGHTS = 1 << 24
MOST_MATRICES = 65535  # of a stack that the kernel of block formats takes
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def dequantize(weight: QuantTensor, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """Decode a weight matrix or a stack of them, or some rows or matrices of it.

    Args:
        weight: (out, in) or (experts, out, in) in any layout, on any device; planes of the layouts
            FILE and BLOCKS may be strided.
        dtype: float32, float16 or bfloat16.
        rows: (n,) integer on the same device, which rows of a matrix, or matrices of a stack, to
            decode, in that order; None for all. Not for layouts SOA and STEP.

    Returns:
        (out or n, in) or (experts or n, out, in), contiguous, on the device of `weight`. Values are
        formed in float32 and rounded once; those beyond float16 become infinite. GGML types are
        bit-exact with the `gguf` package. In layout BLOCKS, FP8 with E8M0 scales and MXFP4 are
        exact in float32, and an E8M0 byte of 255 gives NaN; NVFP4 rounds in the product with
        `global_scale`, or the quotient by `divisor`.

    Raises:
        ArgumentError: another dtype, a plane that does not fit the shape, or rows of layouts SOA
            and STEP.

    Source: the block formats of ggml (ggml-quants.c), described in ops/dequantize_torch.py; the
    formats of layout BLOCKS in ops/block_quantize_torch.py; compressed-tensors for `divisor`.
    """
    if dtype not in _DTYPES:
        raise ArgumentError(
            f"dequantize: dtype={dtype} is not a float type of weights.",
            hint="Use float32, float16 or bfloat16.",
        )
    if weight.layout in (Layout.SOA, Layout.STEP):
        return _dequantize_planes(weight if rows is None else weight.take(rows), dtype)
    weight.check("dequantize")
    if weight.layout is Layout.BLOCKS:
        blocks = weight if rows is None else weight.take(rows)
        return _dequantize_blocks(blocks, dtype)
    if len(weight.shape) == 3:
        stack = weight if rows is None else weight.take(rows)
        shape = (stack.shape[0] * stack.shape[1], stack.shape[2])
        data = stack.planes["data"].flatten(0, 1)
        matrix = QuantTensor(weight.qtype, Layout.FILE, shape, {"data": data})
        return _dequantize_file(matrix, dtype, None).view(stack.shape)
    return _dequantize_file(weight, dtype, rows)


def _dequantize_file(weight: QuantTensor, dtype: torch.dtype, rows: Tensor | None) -> Tensor:
    """A matrix of layout FILE, checked."""
    data = weight.planes["data"]
    num_rows, in_features = weight.shape
    count = num_rows if rows is None else rows.numel()
    out = torch.empty((count, in_features), dtype=dtype, device=data.device)
    if count and _has_kernel(weight, data.device) and _is_aligned(weight):
        index = None if rows is None else rows.int()
        launch_packed_dequantize(weight.ordered_planes(), weight.qtype.name, out, index)
    elif count and _is_native(weight):
        index = None if rows is None else rows.int().contiguous()
        floats = out if dtype == torch.float32 else torch.empty(out.shape)
        native.launch_dequantize(weight.qtype.ggml_id, data, in_features, index, floats)
        if floats is not out:
            out.copy_(floats)
    else:
        launch_dequantize(data if rows is None else take_rows(data, rows), weight.qtype.name, out)
    return out


def _dequantize_blocks(weight: QuantTensor, dtype: torch.dtype) -> Tensor:
    """Layout BLOCKS, checked; by PyTorch some rows at a time: float32 temporaries are bounded."""
    if weight.device.type == "cuda" and has_block_kernel() and _takes_blocks(weight):
        out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        _launch_blocks(weight, out)
        return out
    height = weight.block[0]
    num_rows = weight.shape[-2]
    per_row = max(1, math.prod(weight.shape) // max(1, num_rows))
    step = max(1, CHUNK_WEIGHTS // (per_row * height)) * height
    if step >= num_rows:
        return _decode_blocks(weight).to(dtype)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        out[..., start:stop, :].copy_(_decode_blocks(weight.rows(start, stop)))
    return out


def _takes_blocks(weight: QuantTensor) -> bool:
    """Whether the kernel of block formats takes a tensor of layout BLOCKS."""
    is_stack = len(weight.shape) == 3
    return weight.planes["q"].stride(-1) == 1 and not (is_stack and weight.shape[0] > MOST_MATRICES)


def _launch_blocks(weight: QuantTensor, out: Tensor) -> None:
    from tiercel.kernels.block.block_dequantize import launch_block_dequantize

    planes = weight.planes
    group = FP4_GROUPS.get(weight.qtype)
    launch_block_dequantize(
        planes["q"],
        planes["scale"],
        weight.block if group is None else (1, group),
        out,
        total=planes.get("global_scale", planes.get("divisor")),
        is_divisor="divisor" in planes,
    )


def _decode_blocks(weight: QuantTensor) -> Tensor:
    """Layout BLOCKS to float32."""
    q, scale = weight.planes["q"], weight.planes["scale"]
    if weight.qtype is QuantType.FP8_BLOCK:
        return block_quantize_torch.dequantize_fp8(q, scale, weight.block)
    values = block_quantize_torch.dequantize_fp4(q, scale)
    if "divisor" in weight.planes:
        return values / weight.planes["divisor"][..., None, None]
    if "global_scale" in weight.planes:
        return values * weight.planes["global_scale"][..., None, None]
    return values


def _dequantize_planes(weight: QuantTensor, dtype: torch.dtype) -> Tensor:
    device = next(iter(weight.planes.values())).device
    if not _has_kernel(weight, device):
        return dequantize(packed_repack(weight, Layout.FILE), dtype)
    out = torch.empty(weight.shape, dtype=dtype, device=device)
    launch_packed_dequantize(weight.ordered_planes(), weight.kernel_type, out)
    return out


def _is_aligned(weight: QuantTensor) -> bool:
    """Whether the rows of layout FILE begin where the kernel can read them."""
    data = weight.planes["data"]
    alignment = 16 if weight.qtype.block_bytes % 16 == 0 else 2
    return data.stride(0) % alignment == 0 == data.data_ptr() % alignment


def _is_native(weight: QuantTensor) -> bool:
    """Whether the native library decodes a matrix of layout FILE on a CPU."""
    data = weight.planes["data"]
    if data.is_cuda or not has_native() or not is_native_type(weight.qtype.ggml_id):
        return False
    return data.stride(1) == 1


def _has_kernel(weight: QuantTensor, device: torch.device) -> bool:
    """Whether a kernel decodes the type: at 3.1 to 3.5 TB/s on an H200."""
    return device.type == "cuda" and weight.qtype in PLANES and 0 not in weight.shape
