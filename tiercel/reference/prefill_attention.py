"""Oracle of prefill attention: a dense mask per request, in float64, on unpaged keys."""

import torch
from torch import Tensor


def make_mask(
    queries: int, keys: int, prefix_len: int, item_start: Tensor, window: int = 0
) -> Tensor:
    """Which keys the last `queries` tokens of a request see.

    Args:
        queries: new tokens.
        keys: tokens of the request.
        prefix_len: P; `keys` or more for plain causal attention.
        item_start: (queries,) read for tokens from P on.
        window: 0 for none.

    Returns:
        (queries, keys) bool.
    """
    i = torch.arange(keys - queries, keys, device=item_start.device).unsqueeze(1)
    k = torch.arange(keys, device=item_start.device)
    start = item_start.long().unsqueeze(1)
    mask = (k <= i) & ((i < prefix_len) | (k < prefix_len) | (k >= start))
    if window:
        # Distances in the request's own sequence: an item's tokens count on from the prefix.
        restarts = (i >= prefix_len) & (k < prefix_len)
        distance = torch.where(restarts, prefix_len + i - start - k, i - k)
        mask &= distance < window
    return mask


def prefill_attention(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    query_lens: list[int],
    scale: float,
    window: int = 0,
    prefix_len: list[int] | None = None,
    item_start: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of each request's last tokens over all its keys.

    Args:
        q: (tokens, heads, head_dim), requests end to end.
        k: per request (keys, kv_heads, head_dim); the last query is at the last key.
        v: like k.
        query_lens: new tokens per request.
        scale: multiplies the scores.
        window: 0 for none.
        prefix_len: P per request; None for plain causal attention.
        item_start: (tokens,) index of the first token of each token's item.
        softcap: c; scores become c * tanh(score / c). 0 for none.

    Returns:
        (tokens, heads * head_dim) float64, zeros where a token sees nothing; and
        (tokens, heads) float64, the natural logarithm of its sum of exponentials.
    """
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    at = 0
    for request, queries in enumerate(query_lens):
        keys, kv_heads, _ = k[request].shape
        rows = slice(at, at + queries)
        prefix = keys if prefix_len is None else prefix_len[request]
        starts = torch.zeros(queries) if item_start is None else item_start[rows]
        mask = make_mask(queries, keys, prefix, starts.to(q.device), window)
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // kv_heads)
            scores = scale * (q[rows, head].double() @ k[request][:, kv_head].double().T)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~mask, float("-inf"))
            # 0 / 0 where nothing is seen: the result is defined as 0.
            weights = torch.softmax(scores, dim=1).masked_fill(~mask, 0.0)
            out[rows, head] = weights @ v[request][:, kv_head].double()
            lse[rows, head] = torch.logsumexp(scores, dim=1)
        at += queries
    return out.flatten(1), lse
