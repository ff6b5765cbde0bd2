"""Products of two matrices in FP4 with scales of blocks, for the tensor cores of Blackwell.

Elsewhere both are decoded and multiplied by PyTorch. The kernel was compiled, never run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.block import block_scaled_gemm as kernel
from tiercel.ops import block_scaled_gemm_torch as torch_ops
from tiercel.quant import QuantTensor
from tiercel.quant_types import FP4_GROUPS, Layout, QuantType


@dataclass(frozen=True, slots=True)
class TiledOperand:
    """A matrix as block-scaled tensor cores read it, by tiles of 128 rows and 256 columns.

    Rows of 128 bytes of values have their 16-byte pieces in the order of the 128-byte swizzle:
    piece i of row r is at i ^ (r % 8). Scales are in the order of `swizzle_scales`.

    Attributes:
        values: (row tiles, column tiles, 16 KB) uint8.
        scales: (row tiles, column tiles, 128 * 256 / group) uint8.
        shape: rows and columns, without the padding, which is zero.
        group: columns of a scale: 16 with E4M3 scales (NVFP4), 32 with E8M0 (MXFP4).
        totals: (2,) float32, factors of all values; of gate and up where rows are both.
        is_gate_up: whether rows are 8 of gate, 8 of up, and so on.
    """

    values: Tensor
    scales: Tensor
    shape: tuple[int, int]
    group: int
    totals: Tensor
    is_gate_up: bool = False


def tile_operand(matrix: QuantTensor) -> TiledOperand:
    """Lay a matrix out in tiles.

    Args:
        matrix: (rows, columns) in MXFP4 or NVFP4, layout BLOCKS, with a global scale.

    Raises:
        ArgumentError: another type, a stack, or NVFP4 with divisors.
    """
    group = _group(matrix)
    planes = matrix.planes
    total = _total(matrix)
    values, scales = torch_ops.tile(planes["q"], planes["scale"], group)
    return TiledOperand(values, scales, _shape(matrix), group, torch.stack((total, total)))


def tile_gate_up(gate: QuantTensor, up: QuantTensor) -> TiledOperand:
    """Lay gate and up out as one operand, whose results are both side by side.

    Args:
        gate: (rows, columns) as of `tile_operand`; rows a multiple of 8.
        up: likewise, of the same shape and type.

    Raises:
        ArgumentError: as `tile_operand`, or the two disagree.
    """
    group = _group(gate)
    if up.qtype is not gate.qtype or up.shape != gate.shape or gate.shape[0] % kernel.RUN:
        raise ArgumentError(
            f"tile_gate_up: gate is {gate.qtype.name} {gate.shape}, up {up.qtype.name} {up.shape}.",
            hint=f"Pass equal types and shapes, with a multiple of {kernel.RUN} rows.",
        )
    both = [
        torch_ops.interleave(gate.planes[name], up.planes[name], kernel.RUN)
        for name in ("q", "scale")
    ]
    values, scales = torch_ops.tile(both[0], both[1], group)
    rows, columns = _shape(gate)
    totals = torch.stack((_total(gate), _total(up)))
    return TiledOperand(values, scales, (2 * rows, columns), group, totals, is_gate_up=True)


def _group(matrix: QuantTensor) -> int:
    is_known = matrix.qtype in FP4_GROUPS and matrix.layout is Layout.BLOCKS
    if not is_known or len(matrix.shape) != 2 or "divisor" in matrix.planes:
        raise ArgumentError(
            f"tile_operand: {matrix.qtype.name} {matrix.shape} with {sorted(matrix.planes)}.",
            hint="Pass a matrix in MXFP4, or in NVFP4 with a global scale.",
        )
    return FP4_GROUPS[matrix.qtype]


def _shape(matrix: QuantTensor) -> tuple[int, int]:
    return matrix.shape[0], matrix.shape[1]


def _total(matrix: QuantTensor) -> Tensor:
    if matrix.qtype is QuantType.NVFP4:
        return matrix.planes["global_scale"].reshape(())
    return torch.ones((), dtype=torch.float32, device=matrix.planes["q"].device)


def block_scaled_gemm(
    x: TiledOperand,
    weight: TiledOperand,
    *,
    limit: float | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """X @ W^T, or with gate and up the clamped SwiGLU of both products.

    Args:
        x: (tokens, columns), of `tile_operand`.
        weight: (rows, columns) of the same type, of `tile_operand` or `tile_gate_up`.
        limit: of the clamped SwiGLU, > 0; None for no clamp.
        out_dtype: bfloat16 or float32.

    Returns:
        (tokens, rows), with gate and up (tokens, rows / 2). Sums are float32, rounded once.

    Raises:
        ArgumentError: types or columns disagree, or another dtype.

    Source: PTX ISA, ``tcgen05.mma`` with ``.block_scale``.
    """
    if x.group != weight.group or x.shape[1] != weight.shape[1] or x.is_gate_up:
        raise ArgumentError(
            f"block_scaled_gemm: x is {x.shape} in groups of {x.group}, the weight {weight.shape} "
            f"in groups of {weight.group}.",
            hint="Pass equal columns and types, and gate and up as the weight alone.",
        )
    if out_dtype not in (torch.bfloat16, torch.float32) or (limit is not None and not limit > 0):
        raise ArgumentError(
            f"block_scaled_gemm: out_dtype={out_dtype}, limit={limit}.",
            hint="Pass bfloat16 or float32, and a positive limit or None.",
        )
    columns = weight.shape[0] // (2 if weight.is_gate_up else 1)
    totals = x.totals[:1] * weight.totals
    if device_refusal(x.values.device):
        matrices = [torch_ops.untile(one.values, one.scales, one.group) for one in (x, weight)]
        sums = matrices[0][: x.shape[0]] @ matrices[1][: weight.shape[0]].t()
        return torch_ops.finish(sums, totals, limit, kernel.RUN if weight.is_gate_up else 0).to(
            out_dtype
        )
    out = torch.empty((x.shape[0], columns), dtype=out_dtype, device=x.values.device)
    if out.numel():
        kernel.launch_block_scaled_gemm(
            out,
            (x.values, x.scales),
            (weight.values, weight.scales),
            totals,
            x.group,
            limit,
            is_gate_up=weight.is_gate_up,
        )
    return out


def device_refusal(device: torch.device) -> str:
    """Why the kernel does not run on a device; "" where it does."""
    if device.type != "cuda":
        return f"there is no kernel on {device.type}"
    if torch.cuda.get_device_capability(device)[0] != kernel.CAPABILITY[0]:
        return "the GPU is no Blackwell of a data centre"
    return ""
