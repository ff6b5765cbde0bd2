"""Oracle of decode attention: one token, one head at a time, in float64."""

import torch
from torch import Tensor


def decode_attention(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    query_lens: list[int],
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention on unpaged keys.

    Args:
        q: (tokens, heads, head_dim), requests end to end.
        k: per request (keys, kv_heads, head_dim); the last query is at the last key.
        v: like k.
        query_lens: new tokens per request.
        scale: multiplies the scores.
        window: 0 for none.

    Returns:
        (tokens, heads * head_dim) float64.
    """
    out = torch.empty(q.shape, dtype=torch.float64)
    token = 0
    for keys, values, queries in zip(k, v, query_lens, strict=True):
        for i in range(queries):
            position = keys.shape[0] - queries + i
            low = max(0, position - window + 1) if window else 0
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // keys.shape[1])
                scores = scale * (
                    keys[low : position + 1, kv_head].double() @ q[token, head].double()
                )
                weights = torch.softmax(scores, dim=0)
                out[token, head] = weights @ values[low : position + 1, kv_head].double()
            token += 1
    return out.flatten(1)
