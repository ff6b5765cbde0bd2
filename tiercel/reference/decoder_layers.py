"""Oracle of all layers of a dense decoder for the new tokens of one request, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tiercel.reference.fused_decode_step import activated, norm, rotate, rounded


def decoder_layers(
    x: Tensor,
    layers: Sequence[Mapping[str, Tensor]],
    turns: Sequence[Tensor],
    seen: Sequence[Tensor],
    eps: float,
    scale: float,
    *,
    activation: str = "silu",
    rounds: bool = False,
    cache_dtype: torch.dtype = torch.float32,
    last_update_norm: Tensor | None = None,
) -> Tensor:
    """The residual of T tokens after the last layer.

    Args:
        x: (T, hidden).
        layers: of each its matrices (out, in) `q k v o gate up down`, norms `attn_norm mlp_norm`,
            maybe `attn_update_norm mlp_update_norm q_norm k_norm qkv_bias o_bias`, and the `keys
            values` (tokens, kv_heads, head_dim) before the new ones.
        turns: of each layer (T, 2, half), cos and sin of each token's position.
        seen: of each layer (T, keys + T) bool, the earlier and new keys that each token sees.
        eps: of all norms.
        scale: of the scores.
        activation: ``silu`` or ``gelu_tanh``.
        rounds: whether inputs of matrices are rounded to 8 bits.
        cache_dtype: what new keys and values are rounded to.
        last_update_norm: (hidden,), of the last update.
    """
    x, update, update_norm = x.double(), None, None
    quantised = rounded if rounds else Tensor.clone
    for layer, turn, mask in zip(layers, turns, seen, strict=True):
        weight = {name: value.double() for name, value in layer.items()}

        def product(name: str, rows: Tensor, weight: Mapping[str, Tensor] = weight) -> Tensor:
            return torch.stack([weight[name] @ quantised(row) for row in rows])

        x = _add(x, update, weight.get("attn_update_norm"), eps)
        h = _norms(x, weight["attn_norm"], eps)
        bias = weight.get("qkv_bias", torch.zeros(1, dtype=torch.float64))
        qkv = torch.cat([product(name, h) for name in "qkv"], 1) + bias
        kv_heads, head_dim = weight["keys"].shape[1:]
        heads = qkv.view(len(x), -1, head_dim)
        q, k, v = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
        if "q_norm" in weight:
            q, k = (_norms(part, weight[f"{n}_norm"], eps) for n, part in (("q", q), ("k", k)))
        q, k = (_rotated(part, turn.double()) for part in (q, k))
        keys, values = (
            torch.cat((weight[name], new.to(cache_dtype).double()))
            for name, new in (("keys", k), ("values", v))
        )
        update = product("o", _attend(q, keys, values, mask, scale))
        update = update + weight.get("o_bias", torch.zeros(1, dtype=torch.float64))
        x = _add(x, update, weight.get("mlp_update_norm"), eps)
        h = _norms(x, weight["mlp_norm"], eps)
        update = product("down", activated(product("gate", h), activation) * product("up", h))
    update_norm = None if last_update_norm is None else last_update_norm.double()
    return _add(x, update, update_norm, eps)


def _norms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return torch.stack([norm(row, weight, eps) for row in rows]).view(x.shape)


def _add(x: Tensor, update: Tensor | None, weight: Tensor | None, eps: float) -> Tensor:
    if update is None:
        return x
    return x + (update if weight is None else _norms(update, weight, eps))


def _rotated(heads: Tensor, turns: Tensor) -> Tensor:
    """(T, heads, head_dim), of which the first 2 * half dimensions rotate."""
    rotating = 2 * turns.shape[2]
    out = heads.clone()
    for token, turn in enumerate(turns):
        for head in range(heads.shape[1]):
            out[token, head, :rotating] = rotate(heads[token, head, :rotating], turn)
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    group = q.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("thd,shd->hts", q, keys) * scale
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return torch.einsum("hts,shd->thd", weights, values).flatten(1)
