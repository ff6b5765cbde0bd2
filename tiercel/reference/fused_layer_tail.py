"""Oracle of fused_layer_tail: a dense decoder from one attention to the next, in float64."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of (n,)."""
    return x / (x.square().mean() + eps).sqrt() * weight


def fused_layer_tail(
    attended: Tensor, x: Tensor, layer: Mapping[str, Tensor], eps: float
) -> tuple[Tensor, Tensor]:
    """From the outputs of one attention to the inputs of the next, token by token.

    Args:
        attended: (tokens, hidden).
        x: (tokens, hidden), the residual before the output projection.
        layer: matrices (out, in) `o gate up down qkv` and norms `mlp_norm next_norm`; `qkv` and
            `next_norm` are the next layer's.
        eps: of both norms.

    Returns:
        (tokens, hidden), the residual after down, and (tokens, rows of qkv), in float64.
    """
    w = {name: tensor.double() for name, tensor in layer.items()}
    residuals, heads = [], []
    for outputs, residual in zip(attended.double(), x.double(), strict=True):
        residual = residual + w["o"] @ outputs
        h = norm(residual, w["mlp_norm"], eps)
        residual = residual + w["down"] @ (torch.nn.functional.silu(w["gate"] @ h) * (w["up"] @ h))
        residuals.append(residual)
        heads.append(w["qkv"] @ norm(residual, w["next_norm"], eps))
    return torch.stack(residuals), torch.stack(heads)
