"""A linear layer with groups: each group of inputs has weights and outputs of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.ops import block_matvec as block_op
from tiercel.ops.dequantize import dequantize
from tiercel.ops.grouped_linear_torch import product
from tiercel.quant import QuantTensor


def grouped_linear(x: Tensor, weight: Tensor | QuantTensor, num_groups: int) -> Tensor:
    """Multiply each group of inputs by its own block of weights (wo_a of DeepSeek-V4).

    Output j of group g is the sum over i of weight[g * out + j, i] * x[:, g * in + i]: a
    block-diagonal product. With (T, heads, d) the groups are consecutive heads.

    Args:
        x: (T, groups * in), or (T, heads, d) with heads * d = groups * in; a float dtype, with any
            strides.
        weight: (groups * out, in), a float matrix or weights of any type. A GPU reads block formats
            as stored for some tokens (`ops/block_matvec.py`) and decodes them to the dtype of x for
            more; otherwise weights are decoded whole, to 4 bytes a weight.
        num_groups: groups, >= 1.

    Returns:
        (T, groups * out), contiguous, dtype of x; float32 inside, rounded once.

    Raises:
        ArgumentError: sizes that disagree.

    Source: the inference code published with DeepSeek-V4.
    """
    if x.dim() not in (2, 3) or not x.is_floating_point():
        raise ArgumentError(
            f"grouped_linear: x is {tuple(x.shape)} {x.dtype}.",
            hint="Pass (tokens, inputs) or (tokens, heads, d) of a float dtype.",
        )
    if len(weight.shape) != 2:
        raise ArgumentError(
            f"grouped_linear: weight is {tuple(weight.shape)}.", hint="Pass (groups * out, in)."
        )
    rows, cols = weight.shape
    inputs = x.shape[1:].numel()
    if num_groups < 1 or rows % num_groups or inputs != num_groups * cols:
        raise ArgumentError(
            f"grouped_linear: x has {inputs} inputs, weight is {(rows, cols)}, "
            f"num_groups={num_groups}.",
            hint="Pass groups * in inputs and a weight of (groups * out, in).",
        )
    if isinstance(weight, QuantTensor) and not block_op.refusal(
        weight, x.dtype, x.device, num_groups
    ):
        flat = x.flatten(1)
        if block_op.takes_tokens(weight, flat.shape[0]) and flat.stride(1) == 1:
            return block_op.block_matvec(flat, weight, num_groups)
        return product(flat, dequantize(weight, x.dtype), num_groups)
    if isinstance(weight, Tensor) and x.is_cuda and weight.dtype == x.dtype:
        return product(x.flatten(1), weight, num_groups)
    matrix = weight.float() if isinstance(weight, Tensor) else dequantize(weight, torch.float32)
    return product(x.flatten(1).float(), matrix, num_groups).to(x.dtype)
