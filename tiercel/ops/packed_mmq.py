"""Packed MMQ: many tokens, rounded to 8 bits, times a K-quantised matrix as small as its file."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_mmq as kernel
from tiercel.kernels.packed.packed_matvec import device_limits
from tiercel.ops.dequantize import dequantize
from tiercel.ops.packed_matvec import PackedWeight, prepare_result
from tiercel.quant_types import Layout, QuantType

GROUP = 32  # columns of a token that share a scale


@functools.cache
def has_packed_mmq(qtype: QuantType, device: torch.device) -> bool:
    """Whether this op's kernel reads a type on a CUDA device."""
    is_capable = torch.cuda.get_device_capability(device) >= kernel.CAPABILITY
    known = is_capable and qtype.name in kernel.TYPES
    return known and bool(kernel.fitting_tiles(qtype.name, device_limits(device)))


def load_packed_mmq(weight: PackedWeight, out_dtype: torch.dtype) -> None:
    """Load every kernel that `packed_mmq` may launch for a weight on a GPU."""
    tensor = weight.tensor
    device = weight.tickets.device
    if has_packed_mmq(tensor.qtype, device):
        in_file = tensor.layout is Layout.FILE
        limits = device_limits(device)
        kernel.load_packed_mmq(tensor.qtype.name, out_dtype, device, limits, in_file=in_file)


def packed_mmq(
    x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """X @ W^T with x rounded to 8 bits, each 32 columns of a token under a scale of their own.

    Args:
        x: (tokens, in) float16, contiguous, on the weight's device.
        weight: from `prepare_packed`, Q4_K or Q6_K.
        out_dtype: float16, bfloat16 or float32; None for that of `out`, or float16.
        out: (tokens, rows) to write to, unit inner stride; None for a new one.

    Returns:
        (tokens, rows). Of x, max |x| / 127 of a group is its step; weights as stored; sums of a
        group are integers, those over groups float32, rounded once. Both layouts of W give the same
        bits; the order of sums depends on the number of tokens and the shape.

    Raises:
        ArgumentError: the shapes or dtypes disagree, or W is of another type.
    """
    rows, in_features = weight.tensor.shape
    is_input = x.dim() == 2 and x.shape[1] == in_features and x.is_contiguous()
    qtype = weight.tensor.qtype
    if not is_input or x.dtype != torch.float16 or qtype.name not in kernel.TYPES:
        raise ArgumentError(
            f"packed_mmq: x is {tuple(x.shape)} {x.dtype} but the weight takes rows of "
            f"{in_features} and is {qtype.name}.",
            hint=f"Pass contiguous (tokens, {in_features}) float16 and one of "
            f"{', '.join(kernel.TYPES)}.",
        )
    out = prepare_result("packed_mmq", (x.shape[0], rows), x.device, out_dtype, out)
    if not x.is_cuda:
        return out.copy_(_rounded(x) @ dequantize(weight.tensor, torch.float32).t())
    if x.shape[0]:
        limits = device_limits(x.device)
        config = kernel.select_packed_mmq(qtype.name, weight.tensor.shape, x.shape[0], limits)
        shape = kernel.image_shape(x.shape[0], in_features, config)
        image = torch.empty(shape, dtype=torch.uint8, device=x.device)
        partial = None
        if config.splits > 1:
            sums = kernel.partial_shape(x.shape[0], rows, config)
            partial = torch.empty(sums, dtype=torch.float32, device=x.device)
        kernel.launch_packed_mmq(
            x,
            weight.tensor.ordered_planes(),
            qtype.name,
            image,
            out,
            partial,
            weight.tickets,
            config,
            is_dependent=weight.is_dependent,
        )
    return out


def _rounded(x: Tensor) -> Tensor:
    """X as the kernel takes it, float32; its operations are those of the kernel."""
    groups = x.float().unflatten(1, (-1, GROUP))
    most = groups.abs().amax(dim=2, keepdim=True)
    step = ((most * (1 / 127)).view(torch.int32) & ~3).view(torch.float32)
    # A scalar over a tensor would be a product with its reciprocal.
    inverse = torch.where(step > 0, torch.full_like(most, 127.0) / most, 0.0)
    rounded: Tensor = (groups * inverse).round() * step
    return rounded.flatten(1)
