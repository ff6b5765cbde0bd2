"""Oracle of DeepSeek-V4's indexer: scores head by head in float64, and a sort of each row."""

import math

import torch
from torch import Tensor


def scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores (T, entries) of q (T, heads, d), weights (T, heads), keys (entries, d), float64."""
    num_tokens, num_heads, d = q.shape
    out: Tensor = torch.zeros(num_tokens, keys.shape[0], dtype=torch.float64)
    for head in range(num_heads):
        dots = q[:, head].double() @ keys.double().t()
        out += weights[:, head, None].double() * torch.where(dots > 0, dots, 0.0)
    return out / math.sqrt(d * num_heads)


def topk(score_rows: Tensor, visible: Tensor, k: int) -> list[list[int]]:
    """The k best visible entries of each row in ascending order, ties to the lower entry."""
    chosen = []
    for row, count in zip(score_rows.tolist(), visible.tolist(), strict=True):
        order = sorted(range(min(count, len(row))), key=row.__getitem__, reverse=True)
        chosen.append(sorted(order[:k]))
    return chosen
