"""The router of DeepSeek-V4 with PyTorch operators on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def scores(logits: Tensor) -> Tensor:
    """Scores sqrt(softplus(z)) in float32, finite for any finite z."""
    z = logits.float()
    return torch.sqrt(z.clamp(min=0) + torch.log1p(torch.exp(-z.abs())))


def best(values: Tensor, topk: int) -> Tensor:
    """Columns of the `topk` largest values in descending order, ties to the lower column."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :topk]


def normalised(chosen: Tensor, scale: float) -> Tensor:
    """Rows over their sum, times scale."""
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale
