"""Packed GEMM: some dozens of tokens times a K-quantised matrix that stays as small as its file."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_gemm as kernel
from tiercel.kernels.packed.packed_types import UNIT_COLUMNS
from tiercel.ops.dequantize import dequantize
from tiercel.ops.packed_matvec import PackedWeight, prepare_result
from tiercel.quant_types import Layout, QuantType

TYPES = (
    QuantType.Q4_K,
    QuantType.Q6_K,
    QuantType.Q5_K,
    QuantType.Q8_0,
    QuantType.Q4_0,
    QuantType.Q4_1,
    QuantType.IQ4_NL,
    QuantType.IQ4_XS,
)


@functools.cache
def has_packed_gemm(device: torch.device) -> bool:
    """Whether this op's kernel runs on a CUDA device."""
    return torch.cuda.get_device_capability(device) == kernel.CAPABILITY


def is_read(weight: PackedWeight) -> bool:
    """Whether this op reads a weight: its type, its layout, rows of whole units."""
    is_whole = weight.tensor.shape[1] % UNIT_COLUMNS == 0
    return is_whole and weight.tensor.layout is Layout.SOA and weight.tensor.qtype in TYPES


def load_packed_gemm(weight: PackedWeight, out_dtype: torch.dtype) -> None:
    """Load every kernel that `packed_gemm` may launch for a weight on a GPU."""
    tensor = weight.tensor
    device = tensor.ordered_planes()[0].device
    if is_read(weight) and has_packed_gemm(device):
        shape = (tensor.shape[0], tensor.shape[1])
        kernel.load_packed_gemm(tensor.qtype.name, shape, out_dtype, device)


def packed_gemm(
    x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """X @ W^T by tensor cores, the weights decoded on their way to them.

    Args:
        x: (tokens, in) float16, contiguous, on the weight's device.
        weight: from `prepare_packed`, in layout SOA.
        out_dtype: float16, bfloat16 or float32; None for that of `out`, or float16.
        out: (tokens, rows) to write to, unit inner stride; None for a new one.

    Returns:
        (tokens, rows). Weights are rounded to float16 on their way, their scales before that; sums
        in float32, rounded once. The order of sums depends on the number of tokens and the shape.

    Raises:
        ArgumentError: the shapes or dtypes disagree, or the weight is in the layout of the file.
    """
    rows, in_features = weight.tensor.shape
    is_input = x.dim() == 2 and x.shape[1] == in_features and x.is_contiguous()
    if not is_input or x.dtype != torch.float16 or not is_read(weight):
        raise ArgumentError(
            f"packed_gemm: x is {tuple(x.shape)} {x.dtype} but the weight takes rows of "
            f"{in_features} and is {weight.tensor.qtype.name} in layout "
            f"{weight.tensor.layout.name}.",
            hint=f"Pass contiguous (tokens, {in_features}) float16 and layout SOA of one of "
            f"{', '.join(qtype.name for qtype in TYPES)} in rows of {UNIT_COLUMNS}.",
        )
    out = prepare_result("packed_gemm", x, rows, out_dtype, out)
    if not x.is_cuda:
        return out.copy_(x.float() @ dequantize(weight.tensor, torch.float32).t())
    if x.shape[0]:
        name = weight.tensor.qtype.name
        config = kernel.select_packed_gemm(name, weight.tensor.shape, x.shape[0])
        image = x.new_empty(kernel.image_shape(x.shape[0], in_features, config))
        planes = weight.tensor.ordered_planes()
        is_dependent = weight.is_dependent
        kernel.launch_packed_gemm(x, planes, name, image, out, config, is_dependent=is_dependent)
    return out
