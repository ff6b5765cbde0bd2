"""Gated activation of an MLP: act(gate) * up."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError

ACTIVATIONS = ("silu", "gelu_tanh")


def act_mul(x: Tensor, activation: str) -> Tensor:
    """act(x[:, :inner]) * x[:, inner:].

    Args:
        x: (rows, 2 * inner), float32, bfloat16 or float16; rows may be strided.
        activation: ``silu``, or ``gelu_tanh``: 0.5 y (1 + tanh(sqrt(2 / pi) (y + 0.044715 y^3))).

    Returns:
        (rows, inner), contiguous, dtype of x; float32 inside, rounded once on a GPU, twice on a
        CPU.

    Raises:
        ArgumentError: odd columns, an unknown activation, or an inner stride other than 1.

    Source: "GLU Variants Improve Transformer", arXiv 2002.05202.
    """
    if x.dim() != 2 or x.shape[1] % 2 or activation not in ACTIVATIONS:
        raise ArgumentError(
            f"act_mul: x is {tuple(x.shape)}, activation {activation!r}.",
            hint=f"Pass (rows, 2 * inner) and one of {ACTIVATIONS}.",
        )
    if x.stride(1) != 1:
        raise ArgumentError(f"act_mul: x has inner stride {x.stride(1)}.", hint="Pass 1.")
    gate, up = x.chunk(2, dim=1)
    if x.is_cuda:
        from tiercel.kernels.fused.act_mul import launch_act_mul

        out = torch.empty(gate.shape, dtype=x.dtype, device=x.device)
        launch_act_mul(gate, up, out, activation)
        return out
    if activation == "silu":
        return torch.nn.functional.silu(gate).mul_(up)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)
