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


def own_pairs(ids: Tensor, weights: Tensor, own: range | None) -> tuple[Tensor, Tensor]:
    """The pairs of tokens and experts with those of other ranks' experts left out.

    Args:
        ids: (T, topk) int64, experts of all ranks.
        weights: (T, topk) float32.
        own: experts of this rank; None: all.

    Returns:
        Ids within this rank's stacks, -1 for an expert of another rank, and weights, 0 for those.
        But the first token has an expert in each place, one that it has here anyway if there is
        any: so that a rank is never without a pair.
    """
    if own is None:
        return ids, weights
    local = ids - own.start
    is_own = (local >= 0) & (local < len(own))
    absent = torch.full_like(ids, -1)
    absent[:1] = local[:1].where(is_own[:1], 0).amax(dim=1, keepdim=True)
    return local.where(is_own, absent), weights.where(is_own, 0.0)
