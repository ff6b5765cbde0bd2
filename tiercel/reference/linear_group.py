"""Oracle of products of several matrices with one x, in float64 on decoded weights."""

from __future__ import annotations

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows times a weight, float64."""
    wide = x.double()
    rms = torch.sqrt((wide * wide).mean(1, keepdim=True) + eps)
    return wide / rms * weight.double()


def rotate_back(x: Tensor, positions: Tensor, table: Tensor, head_dim: int) -> Tensor:
    """The last channels of each head in pairs, turned by the negative angle, float64."""
    half = table.shape[2]
    heads = x.double().reshape(x.shape[0], -1, head_dim).clone()
    for token, position in enumerate(positions.tolist()):
        for pair in range(half):
            cos, sin = table[position, 0, pair].item(), table[position, 1, pair].item()
            first = head_dim - 2 * half + 2 * pair
            a, b = heads[token, :, first].clone(), heads[token, :, first + 1].clone()
            heads[token, :, first] = a * cos + b * sin
            heads[token, :, first + 1] = b * cos - a * sin
    return heads.flatten(1)


def product(
    x: Tensor,
    weight: Tensor,
    num_groups: int = 1,
    *,
    is_pair: bool = False,
    limit: float | None = None,
    addend: Tensor | None = None,
) -> Tensor:
    """One matrix (rows, in) of the group: float64 (tokens, rows), of a pair half as many.

    x is (tokens, groups * in); all on the CPU.
    """
    rows, columns = weight.shape[0] // num_groups, weight.shape[1]
    parts = [
        x[:, group * columns : (group + 1) * columns].double()
        @ weight[group * rows : (group + 1) * rows].double().t()
        for group in range(num_groups)
    ]
    out = torch.cat(parts, dim=1)
    if is_pair:
        gate, up = out.chunk(2, dim=1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out = gate / (1 + torch.exp(-gate)) * up
    return out if addend is None else out + addend.double()
