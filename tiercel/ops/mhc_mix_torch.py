"""The residual streams of DeepSeek-V4 with PyTorch operators on any device.

A stream matrix is (T, n, hidden). One product with fn gives a token n * (2 + n) numbers: n weights
of the sum into the block (pre), n weights of the way back (post), and the n x n matrix that mixes
the streams (comb), made doubly stochastic by Sinkhorn's iteration. Mixes are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mix(streams: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    """Product of fn and the flattened streams over their root mean square: (T, rows) float32."""
    flat = streams.flatten(1).float()
    rms = torch.sqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    return (flat @ fn.t()) / rms  # divided after the product, as in the published code


def weighted_sum(streams: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights[:, i] * streams[:, i], (T, hidden) in the dtype of the streams."""
    return (weights.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Row softmax once, then columns and rows in turn; the last step is on columns."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def split_mix(
    mixed: Tensor, scale: Tensor, base: Tensor, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The coefficients (T, n), (T, n), (T, n, n) of a token's n * (2 + n) numbers."""
    num_streams = int((1 + base.shape[0]) ** 0.5) - 1  # n * (n + 2) = (n + 1)^2 - 1
    first, second = num_streams, 2 * num_streams
    pre = torch.sigmoid(mixed[:, :first] * scale[0] + base[:first]) + eps
    post = 2 * torch.sigmoid(mixed[:, first:second] * scale[1] + base[first:second])
    logits = mixed[:, second:] * scale[2] + base[second:]
    return pre, post, sinkhorn(logits.view(-1, num_streams, num_streams), iters, eps)


def write_back(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post[j] * y + sum over i of comb[i, j] * streams[i], in the dtype of the streams."""
    mixed = torch.matmul(comb.transpose(1, 2), streams.float())
    return (mixed + post.unsqueeze(-1) * y.float().unsqueeze(1)).to(streams.dtype)
