"""Causal attention of new tokens over the paged cache: prefill chunks and decode steps alike."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.errors import ArgumentError
from tiercel.kernels.paged_attention import attend_decode, attend_one, gather_cache


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    *,
    group: int = 0,
    window: int = 0,
) -> Tensor:
    """softmax(scale * q k^T + mask) v for every new token; their keys are in the cache already.

    Args:
        q: (num_tokens, num_heads, head_dim); head i reads key/value head i // (num_heads /
            num_kv_heads).
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim), dtype of q.
        v_cache: like k_cache.
        batch: lengths and block tables; the token at index p of its sequence sees keys 0 .. p.
        scale: multiplies the scores.
        group: the cache group of this layer.
        window: with w > 0 the token at p sees keys p - w + 1 .. p only.

    Returns:
        (num_tokens, num_heads * head_dim), dtype of q; softmax in float32.

    Raises:
        ArgumentError: the shapes disagree.

    Source: "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    arXiv 2309.06180.
    """
    if (
        q.shape[0] != batch.num_tokens
        or q.shape[1] % k_cache.shape[2]
        or q.shape[2] != k_cache.shape[3]
    ):
        raise ArgumentError(
            f"paged_attention: q {tuple(q.shape)} does not fit {batch.num_tokens} tokens and "
            f"a cache of {tuple(k_cache.shape)}.",
            hint="Heads must be a multiple of the cache's, with equal head sizes.",
        )
    tables = batch.block_tables[group].index_select(0, batch.rows)
    if q.is_cuda and batch.max_query_len == 1:
        blocks = -(-batch.max_seq_len // k_cache.shape[1])
        tables = tables[:, :blocks]
        return attend_decode(q, k_cache, v_cache, tables, batch.seq_lens, scale, window).flatten(1)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    start = 0
    for request, query_len in enumerate(batch.query_lens):
        stop, length = start + query_len, batch.context_lens[request]
        k = gather_cache(k_cache, tables[request], length)
        v = gather_cache(v_cache, tables[request], length)
        out[start:stop] = attend_one(q[start:stop], k, v, scale, window)
        start = stop
    return out.flatten(1)
