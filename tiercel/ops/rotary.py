"""Rotary position embedding of query and key heads, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError


def rotary_(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate pairs (i, i + half) of each head by the angle of its token's position, in place.

    Args:
        x: (tokens, heads, head_dim), float32, bfloat16 or float16, unit inner stride; mutated. The
            first 2 * half dimensions rotate, further ones pass.
        positions: (tokens,) int32, each below `table.shape[0]` (not checked on a device).
        table: (max_positions, 2, half) float32, cos then sin.

    Returns:
        x. Products are float32, rounded once.

    Raises:
        ArgumentError: the shapes disagree, or the inner stride is not 1.

    Source: "RoFormer", arXiv 2104.09864, in the half-split form of GPT-NeoX.
    """
    if x.dim() != 3 or positions.shape != x.shape[:1]:
        raise ArgumentError(
            f"rotary_: x is {tuple(x.shape)} and positions {tuple(positions.shape)}.",
            hint="Pass x as (tokens, heads, head_dim) and one position per token.",
        )
    if table.dim() != 3 or table.shape[1] != 2 or 2 * table.shape[2] > x.shape[2]:
        raise ArgumentError(
            f"rotary_: table is {tuple(table.shape)} for heads of {x.shape[2]}.",
            hint="Pass (positions, 2, half) with 2 * half at most the head size.",
        )
    if x.stride(2) != 1:
        raise ArgumentError(f"rotary_: x has inner stride {x.stride(2)}.", hint="Pass 1.")
    if x.is_cuda:
        from tiercel.kernels.rotary import launch_rotary

        launch_rotary(x, positions, table)
        return x
    half = table.shape[2]
    cos, sin = table.index_select(0, positions).unsqueeze(2).unbind(1)  # (tokens, 1, half) each
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    x[..., : 2 * half] = rotated
    return x
