"""Decode attention with PyTorch's fused operators, one request after the other: all steps on a CPU.

Keys and values are gathered from the request's blocks. Where the blocks are one run, as those of a
lone request on a CPU are, the cache itself is read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

TILE = 512  # keys of a tile of PyTorch's fused CPU kernel, and a multiple of usual blocks


def first_key(start: int, queries: int, window: int) -> int:
    """The first position to gather for queries from `start` on: that of the tile that they see."""
    first = max(0, start - window + 1) if window else 0
    return first if queries == 1 else first // TILE * TILE


def gather_cache(cache: Tensor, table: Tensor, length: int, first: int = 0) -> Tensor:
    """Entries of a request up to `length`, (entries, heads, head_dim); a view of a run.

    They begin with the block that holds `first`: earlier ones may be gone.

    cache: (num_blocks, block_size, heads, head_dim); table: (max_blocks,) int32.
    """
    block_size = cache.shape[1]
    blocks = table[first // block_size : -(-length // block_size)]
    length -= first // block_size * block_size
    if not cache.is_cuda:  # on a GPU a look at the ids would wait for the device
        start = int(blocks[0])
        if blocks.numel() == 1 or bool((blocks[1:] - blocks[:-1] == 1).all()):
            return cache[start : start + blocks.numel()].flatten(0, 1)[:length]
    return cache.index_select(0, blocks).flatten(0, 1)[:length]


def attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, base: int = 0) -> Tensor:
    """Causal attention of one request whose last query is its last key.

    On a CPU a token's result has the same bits whatever was computed before it in the same call:
    tiles of queries and keys end at fixed positions of the sequence, so a prompt whose start was
    cached has the same result as one computed whole. One query alone takes a faster way of its own.

    q: (queries, heads, head_dim); k, v: (keys, kv_heads, head_dim); window 0 is none; base:
    position of the first key in its sequence, before which no query sees anything.
    Returns (queries, heads, head_dim).
    """
    queries, keys = q.shape[0], k.shape[0]
    if queries == 1:
        first = max(0, keys - window) if window else 0  # earlier keys are not seen
        # The heads of a group as queries of one head: keys are read once per group, 45 us instead
        # of 249 for 9 heads on 3 and 512 keys (2 cores, torch 2.13).
        grouped = q.view(1, k.shape[1], -1, q.shape[2])
        k, v = k[first:].transpose(0, 1).unsqueeze(0), v[first:].transpose(0, 1).unsqueeze(0)
        # Some fused kernels lay heads innermost, so this may copy.
        return scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(q.shape)
    if not q.is_cuda:
        return _attend_tiles(q, k, v, scale, window, base)
    query_at = torch.arange(keys - queries, keys, device=q.device)
    key_at = torch.arange(keys, device=q.device)
    # The fused kernels that take a mask do not share keys among heads.
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return attend_masked(q, k, v, place_mask(query_at, key_at, window), scale)


def _attend_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, base: int) -> Tensor:
    start, end = base + k.shape[0] - q.shape[0], base + k.shape[0]
    missing = -end % TILE
    k, v = pad(k, (0, 0, 0, 0, 0, missing)), pad(v, (0, 0, 0, 0, 0, missing))
    out = torch.empty_like(q)
    for tile in range(start // TILE * TILE, end, TILE):
        begin, stop = max(tile, start), min(tile + TILE, end)
        low = max(base, (tile - window + 1) // TILE * TILE) if window else base
        mask = place_mask(torch.arange(begin, stop), torch.arange(low, tile + TILE), window)
        keys = slice(low - base, tile + TILE - base)
        rows = slice(begin - start, stop - start)
        out[rows] = attend_masked(q[rows], k[keys], v[keys], mask, scale)
    return out


def place_mask(query_at: Tensor, key_at: Tensor, window: int) -> Tensor:
    """(queries, keys) bool: the keys that each query sees, by their positions."""
    mask = key_at <= query_at.unsqueeze(1)
    return mask & (key_at > query_at.unsqueeze(1) - window) if window else mask


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention under a mask (queries, keys); shapes as in `attend_one`."""
    out = scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)
