"""Oracle of DeepSeek-V4's router: one token after the other, in float64."""

import torch
from torch import Tensor


def scores(logits: Tensor) -> Tensor:
    """Square root of log(1 + e^z), float64."""
    return torch.sqrt(torch.logaddexp(logits.double(), torch.zeros((), dtype=torch.float64)))


def learned(logits: Tensor, bias: Tensor, topk: int, scale: float) -> tuple[Tensor, Tensor]:
    """The best of scores + bias, ties to the lower expert: ids and weights (T, topk)."""
    s = scores(logits)
    biased: list[list[float]] = (s + bias.double()).tolist()
    # Python's sort keeps the order of equal elements when it is reversed, too.
    ids = [sorted(range(len(row)), key=row.__getitem__, reverse=True)[:topk] for row in biased]
    chosen = torch.tensor(ids, dtype=torch.int64).reshape(-1, topk)
    return chosen, weights(s, chosen, scale)


def weights(s: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Scores of the experts over their sum, times scale."""
    chosen = torch.stack([s[t, row] for t, row in enumerate(ids)])
    return chosen / (chosen.sum(1, keepdim=True) + 1e-20) * scale
