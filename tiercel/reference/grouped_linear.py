"""Oracle of the grouped linear layer: a dense block-diagonal matrix, in float64."""

import torch
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, num_groups: int) -> Tensor:
    """Rows (T, groups * in) times the block-diagonal matrix of (groups * out, in), float64."""
    rows, cols = weight.shape[0] // num_groups, weight.shape[1]
    dense = torch.zeros(num_groups * rows, num_groups * cols, dtype=torch.float64)
    for g in range(num_groups):
        band = slice(g * rows, (g + 1) * rows)
        dense[band, g * cols : (g + 1) * cols] = weight[band]
    return x.double().flatten(1) @ dense.t()
