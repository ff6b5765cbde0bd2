"""Products of some tokens with weights in block formats, read as stored, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.env import has_block_kernel, has_prefill_gemm
from tiercel.errors import ArgumentError
from tiercel.quant import QuantTensor
from tiercel.quant_types import FP4_GROUPS, Layout, QuantType

# Tokens up to which weights are read as stored, 32 or in FP8 128 at a time: decoding to 16 bits for
# a dense product moves five times their bytes.
MAX_TOKENS = {QuantType.FP8_BLOCK: 128, QuantType.MXFP4: 64, QuantType.NVFP4: 64}
ROW_INVARIANT_TOKENS = 64  # up to which a token's bits do not depend on their number
SCALE_COLS = 128  # columns of FP8 that the kernel takes at a time: blocks are a multiple of them


def refusal(
    weight: QuantTensor, dtype: torch.dtype, device: torch.device, num_groups: int = 1
) -> str:
    """Why the kernel does not take a weight; "" if it does.

    Args:
        weight: on any device.
        dtype: of the activations.
        device: of the product.
        num_groups: groups of its rows with inputs of their own.
    """
    return device_refusal(device) or shape_refusal(weight, dtype, num_groups)


def device_refusal(device: torch.device) -> str:
    """Why no weight is multiplied as stored on a device; "" where the kernel may be used."""
    if device.type != "cuda":
        return f"there is no kernel on {device.type}"
    return "" if has_block_kernel() else "TIERCEL_BLOCK_KERNEL=0"


def shape_refusal(weight: QuantTensor, dtype: torch.dtype, num_groups: int = 1) -> str:
    """Why the kernel does not take a weight on any GPU; "" if it does."""
    if weight.layout is not Layout.BLOCKS or len(weight.shape) != 2:
        return f"{weight.qtype.name} {weight.shape} is no matrix in a block format"
    if weight.shape[0] % num_groups:
        return f"{weight.shape[0]} rows are not {num_groups} groups"
    is_fp8 = weight.qtype is QuantType.FP8_BLOCK
    if dtype != torch.bfloat16 and not (is_fp8 and dtype == torch.float16):
        return f"{weight.qtype.name} with activations in {dtype}"
    if is_fp8 and weight.block[1] % SCALE_COLS:
        return f"blocks of {weight.block[1]} columns are no multiple of {SCALE_COLS}"
    if weight.planes["q"].stride(1) != 1:
        return "gaps between columns"
    return ""


def takes_tokens(weight: QuantTensor, num_tokens: int) -> bool:
    """Whether so many tokens are multiplied by weights as stored that the kernel takes.

    All are without ``TIERCEL_PREFILL_GEMM``, and for ``TIERCEL_EXACT``: only these products have
    the same bits for a token in any batch.
    """
    return num_tokens <= MAX_TOKENS[weight.qtype] or not has_prefill_gemm()


def block_matvec(
    x: Tensor,
    weight: QuantTensor,
    num_groups: int = 1,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """X @ W^T, or with groups the product of each group of inputs with its own rows.

    Args:
        x: (tokens, groups * in), bfloat16, or for FP8 float16, on a GPU; rows may be strided.
        weight: (groups * out, in) in layout BLOCKS, which `refusal` does not refuse.
        num_groups: groups, >= 1.
        out_dtype: the dtype of x (None) or float32.
        out: (tokens, groups * out) of that dtype for the result, whose rows may be strided; None
            for a new tensor.

    Returns:
        (tokens, groups * out). Weights are exact, sums float32, the result is rounded once. A
        token's bits do not depend on the number of tokens up to 64. NaN among E4M3 weights counts
        as 480.

    Raises:
        ArgumentError: a weight that the kernel does not take, or sizes that disagree.
    """
    reason = shape_refusal(weight, x.dtype, num_groups) if num_groups >= 1 else "no groups"
    if reason:
        raise ArgumentError(f"block_matvec: {reason}.", hint="Decode it with dequantize.")
    weight.check("block_matvec")
    rows, cols = weight.shape
    if x.dim() != 2 or x.shape[1] != num_groups * cols or x.stride(1) != 1:
        raise ArgumentError(
            f"block_matvec: x is {tuple(x.shape)} with strides {x.stride()}, the weight "
            f"{weight.shape}, num_groups={num_groups}.",
            hint="Pass (tokens, groups * in) with contiguous columns.",
        )
    out_dtype = out_dtype or x.dtype
    if out is None:
        out = torch.empty((x.shape[0], rows), dtype=out_dtype, device=x.device)
    from tiercel.kernels.block.block_matvec import Planes, launch_block_matvec, select_tiles

    has_tiles = weight.qtype is QuantType.FP8_BLOCK and has_prefill_gemm()
    num_tokens = x.shape[0] if has_tiles else min(x.shape[0], ROW_INVARIANT_TOKENS)
    tiles = select_tiles(num_groups, rows // num_groups, cols, num_tokens)
    parts = None
    if tiles.splits > 1:
        size = (tiles.splits, x.shape[0], rows)
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
    group = FP4_GROUPS.get(weight.qtype)
    planes = weight.planes
    matrix = Planes(
        planes["q"],
        planes["scale"],
        weight.block if group is None else (1, group),
        planes.get("global_scale", planes.get("divisor")),
        "divisor" in planes,
    )
    launch_block_matvec(x, matrix, num_groups, tiles, out, parts)
    return out
