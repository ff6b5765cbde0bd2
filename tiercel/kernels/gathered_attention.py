"""Attention of one request with PyTorch's fused operators: prompts, and all steps on a CPU.

Keys and values are gathered from the request's blocks; where the blocks are one run, as a lone
request's are on a CPU, the cache itself is read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def gather_cache(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` entries of a request, (length, heads, head_dim); a view of a run.

    cache: (num_blocks, block_size, heads, head_dim); table: (max_blocks,) int32.
    """
    block_size = cache.shape[1]
    blocks = table[: -(-length // block_size)]
    if not cache.is_cuda:  # on a GPU a look at the ids would wait for the device
        first = int(blocks[0])
        if blocks.numel() == 1 or bool((blocks[1:] - blocks[:-1] == 1).all()):
            return cache[first : first + blocks.numel()].flatten(0, 1)[:length]
    return cache.index_select(0, blocks).flatten(0, 1)[:length]


def attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention of one request whose last query is its last key.

    q: (queries, heads, head_dim); k, v: (keys, kv_heads, head_dim); window 0 is none.
    Returns (queries, heads, head_dim).
    """
    queries, keys = q.shape[0], k.shape[0]
    first = (
        max(0, keys - queries - window + 1) if window else 0
    )  # earlier keys are seen by no query
    k, v = k[first:], v[first:]
    keys -= first
    if queries == 1:
        # The heads of a group as queries of one head: keys are read once per group, 45 us instead
        # of 249 for 9 heads on 3 and 512 keys (2 cores, torch 2.13).
        grouped = q.view(1, k.shape[1], -1, q.shape[2])
        k, v = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        # Some fused kernels lay heads innermost, so this may copy.
        return scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(q.shape)
    mask = None
    is_causal = queries == keys and (not window or window >= keys)
    if not is_causal:
        query_at = torch.arange(keys - queries, keys, device=q.device).unsqueeze(1)
        key_at = torch.arange(keys, device=q.device)
        mask = key_at <= query_at
        if window:
            mask &= key_at > query_at - window
    groups = q.shape[1] // k.shape[1]
    if mask is not None and q.is_cuda and groups > 1:
        # The fused kernels that take a mask do not share keys among heads.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out = scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)
