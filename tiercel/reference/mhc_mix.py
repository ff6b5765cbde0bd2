"""Oracle of DeepSeek-V4's residual streams: one token after the other, in float64."""

import torch
from torch import Tensor


def coefficients(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    rms_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients pre (T, n), post (T, n) and comb (T, n, n), float64."""
    num_tokens, n, _ = streams.shape
    scale, base = scale.double(), base.double()
    pre = torch.empty(num_tokens, n, dtype=torch.float64)
    post = torch.empty(num_tokens, n, dtype=torch.float64)
    comb = torch.empty(num_tokens, n, n, dtype=torch.float64)
    for t in range(num_tokens):
        u = streams[t].double().reshape(-1)
        numbers = fn.double() @ (u / torch.sqrt((u * u).mean() + rms_eps))
        for j in range(n):
            pre[t, j] = 1 / (1 + torch.exp(-(numbers[j] * scale[0] + base[j]))) + hc_eps
            post[t, j] = 2 / (1 + torch.exp(-(numbers[n + j] * scale[1] + base[n + j])))
        for i in range(n):
            row = slice(2 * n + i * n, 2 * n + i * n + n)
            exponentials = torch.exp(numbers[row] * scale[2] + base[row])
            comb[t, i] = exponentials / exponentials.sum() + hc_eps
        for step in range(2 * iters - 1):  # columns, rows, columns, ...
            dim = 0 if step % 2 == 0 else 1
            comb[t] = comb[t] / (comb[t].sum(dim, keepdim=True) + hc_eps)
    return pre, post, comb


def pre_sum(streams: Tensor, pre: Tensor) -> Tensor:
    """Sum of pre[:, i] * streams[:, i], float64."""
    return torch.einsum("ti,tih->th", pre.double(), streams.double())


def post_sum(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post[j] * y + sum over i of comb[i, j] * streams[i], float64."""
    out = torch.einsum("tj,th->tjh", post.double(), y.double())
    return out + torch.einsum("tij,tih->tjh", comb.double(), streams.double())


def collapse(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float, hc_eps: float
) -> Tensor:
    """The streams in one vector, float64."""
    u = streams.double().flatten(1)
    numbers = u @ fn.double().t() / torch.sqrt((u * u).mean(1, keepdim=True) + rms_eps)
    weights = 1 / (1 + torch.exp(-(numbers * scale.double() + base.double()))) + hc_eps
    return pre_sum(streams, weights)
