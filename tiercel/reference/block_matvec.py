"""Oracle of products with weights in block formats, in float64 on decoded weights."""

from __future__ import annotations

import torch
from torch import Tensor


def block_matvec(x: Tensor, weight: Tensor, num_groups: int = 1) -> Tensor:
    """Multiply each group of inputs by its own rows.

    Args:
        x: (tokens, groups * in).
        weight: (groups * out, in), decoded exactly.
        num_groups: groups; 1 for X @ W^T.

    Returns:
        (tokens, groups * out) float64 on the CPU.
    """
    rows, cols = weight.shape[0] // num_groups, weight.shape[1]
    parts = []
    for group in range(num_groups):
        matrix = weight[group * rows : (group + 1) * rows].double().cpu()
        parts.append(x[:, group * cols : (group + 1) * cols].double().cpu() @ matrix.t())
    return torch.cat(parts, dim=1)
