"""A block-diagonal linear layer with PyTorch operators on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def product(x: Tensor, weight: Tensor, num_groups: int) -> Tensor:
    """(T, groups * in) and (groups * out, in) of one float dtype to (T, groups * out)."""
    groups = x.unflatten(1, (num_groups, weight.shape[1])).transpose(0, 1)
    weights = weight.unflatten(0, (num_groups, weight.shape[0] // num_groups))
    return torch.bmm(groups, weights.transpose(1, 2)).transpose(0, 1).flatten(1)
