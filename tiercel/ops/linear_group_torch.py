"""Products of a group of matrices with PyTorch operators on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tiercel.kernels.block.linear_group import GroupInput
from tiercel.kernels.block.q8_planes import Q8Planes
from tiercel.ops.dequantize import dequantize
from tiercel.ops.grouped_linear_torch import product
from tiercel.ops.latent_rope_torch import normalise, rotate
from tiercel.ops.moe_experts_torch import swiglu
from tiercel.quant import QuantTensor


class Multiplied(Protocol):
    """What is read of a `GroupMatrix`."""

    @property
    def weight(self) -> Tensor | QuantTensor | Q8Planes: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def is_pair(self) -> bool: ...
    @property
    def addend(self) -> Tensor | None: ...


def multiply(
    x: Tensor, matrices: Sequence[Multiplied], outs: Sequence[Tensor], given: GroupInput
) -> None:
    """Write the products of x (tokens, groups * in) with each matrix."""
    wide = x.float()
    if given.norm is not None:
        weight, eps = given.norm
        wide = normalise(x, eps, weight).to(x.dtype).float()
    if given.rotation is not None:
        positions, table = given.rotation
        heads = wide.unflatten(1, (-1, given.head_dim))
        wide = rotate(heads, table[positions], True).to(x.dtype).float().flatten(1)
    for matrix, out in zip(matrices, outs, strict=True):
        result = product(wide, _dense(matrix.weight), matrix.num_groups)
        if matrix.is_pair:
            gate, up = result.chunk(2, dim=1)
            result = swiglu(gate, up, given.limit)
        out.copy_(result if matrix.addend is None else result + matrix.addend)


def _dense(weight: Tensor | QuantTensor | Q8Planes) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.float()
    if isinstance(weight, Q8Planes):
        return weight.dense(torch.float32)
    return dequantize(weight, torch.float32)
