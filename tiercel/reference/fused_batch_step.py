"""Oracle of fused_batch_step: all layers for requests with one new token each, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tiercel.reference.decode_attention import decode_attention
from tiercel.reference.fused_layer_tail import fused_layer_tail
from tiercel.reference.rotary_kv_write import rotary_kv_write


def fused_batch_step(
    heads: Tensor,
    x: Tensor,
    layers: Sequence[Mapping[str, Tensor]],
    caches: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
    angles: Tensor,
    head_norms: Sequence[tuple[Tensor, Tensor] | None],
    eps: float,
    head_eps: float,
    scale: float,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Attention and tail of each layer in turn.

    Args:
        heads: (tokens, heads, head_dim), q, k and v of the first layer.
        x: (tokens, hidden), the residual before the first output projection.
        layers: of `reference.fused_layer_tail`; that of the last layer has no `qkv`.
        caches: of each layer, older keys and values (keys, kv_heads, head_dim) of each token.
        angles: (tokens, head_dim / 2).
        head_norms: (head_dim,) of q and of k, of each layer.
        eps: of the norms of layers.
        head_eps: of the norms of heads.
        scale: of scores.

    Returns:
        The residual after the last layer, and each layer's new keys and values, in float64.
    """
    x, found = x.double(), []
    kv_heads = caches[0][0][0].shape[1]
    for layer, (old_keys, old_values), norms in zip(layers, caches, head_norms, strict=True):
        none = torch.zeros(1, 1, kv_heads, heads.shape[2], dtype=torch.float64)
        slots = torch.full((len(x),), -1)
        turned = rotary_kv_write(
            heads.double(), angles.double(), none, none, slots, norms, head_eps
        )
        keys, values = turned[:, -2 * kv_heads : -kv_heads], turned[:, -kv_heads:]
        found.append((keys, values))
        queries = turned[:, : -2 * kv_heads]
        attended = decode_attention(
            queries, _after(old_keys, keys), _after(old_values, values), [1] * len(x), scale
        )
        is_last = "qkv" not in layer
        weights = {**layer, "qkv": layer["gate"][:0]} if is_last else layer
        x, following = fused_layer_tail(attended.flatten(1), x, weights, eps)
        if not is_last:
            heads = following.view(len(x), -1, heads.shape[2])
    return x, found


def _after(olds: Sequence[Tensor], news: Tensor) -> list[Tensor]:
    """Each request's older keys, or values, and its new one."""
    return [torch.cat([old.double(), new[None]]) for old, new in zip(olds, news, strict=True)]
