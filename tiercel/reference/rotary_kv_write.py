"""Oracle of norm, rotation and cache write, in float64, from angles, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_kv_write(
    heads: Tensor,
    angles: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm, rotate as complex numbers, write.

    Args:
        heads: (tokens, num_heads + 2 * num_kv_heads, head_dim).
        angles: (tokens, half) float64, radians.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim) float64, mutated.
        v_cache: like k_cache.
        slot_mapping: (tokens,); -1 writes nothing.
        weights: of the norms of queries and keys, (head_dim,) each; None for no norm.
        eps: of the norms.

    Returns:
        heads as they are afterwards, float64.
    """
    half, kv_heads, block_size = angles.shape[1], k_cache.shape[2], k_cache.shape[1]
    out = heads.double().clone()
    queries = heads.shape[1] - 2 * kv_heads
    for token, slot in enumerate(slot_mapping.tolist()):
        for head in range(queries + kv_heads):
            x = out[token, head]
            if weights is not None:
                weight = weights[head >= queries].double()
                x[:] = x / (x.pow(2).mean() + eps).sqrt() * weight
            for i in range(half):
                z = torch.complex(x[i].clone(), x[i + half].clone())
                z = z * torch.polar(torch.ones((), dtype=torch.float64), angles[token, i])
                x[i], x[i + half] = z.real, z.imag
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = out[token, queries:-kv_heads]
            v_cache[slot // block_size, slot % block_size] = out[token, -kv_heads:]
    return out
