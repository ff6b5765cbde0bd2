"""Oracle of a whole decode step: one token through all layers of a dense decoder, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def rounded(x: Tensor) -> Tensor:
    """Each 32 neighbours of (n,) to integers of -127 to 127 times one scale."""
    out = x.clone()
    for first in range(0, x.shape[0], 32):
        group = x[first : first + 32]
        scale = group.abs().max() / 127
        if scale > 0:
            out[first : first + 32] = (group / scale).round() * scale
    return out


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of (n,)."""
    return x / (x.square().mean() + eps).sqrt() * weight


def rotate(head: Tensor, turn: Tensor) -> Tensor:
    """Rotate pairs (i, i + half) of (2 * half,) by (2, half) cos and sin."""
    half = head.shape[0] // 2
    first, second = head[:half], head[half:]
    cos, sin = turn
    return torch.cat((first * cos - second * sin, second * cos + first * sin))


def activated(gate: Tensor, activation: str) -> Tensor:
    """Of the MLP: ``silu`` or ``gelu_tanh``."""
    if activation == "silu":
        return gate / (1 + (-gate).exp())
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner))


def fused_decode_step(
    x: Tensor,
    layers: Sequence[Mapping[str, Tensor]],
    turn: Tensor,
    eps: float,
    scale: float,
    *,
    activation: str = "silu",
    rounds: bool = True,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """One token through all layers.

    Args:
        x: (hidden,).
        layers: of each its matrices (out, in) `q k v o gate up down`, norms `attn_norm mlp_norm`
            and maybe `q_norm k_norm`, `q_bias k_bias v_bias`, norms of updates `attn_update_norm
            mlp_update_norm`, a `turn` of its own, and the `keys values` (tokens, kv_heads,
            head_dim) before this token, of sliding layers those in the window.
        turn: (2, head_dim / 2), cos and sin of the token's position, of layers without their own.
        eps: of all norms.
        scale: of the scores.
        activation: of the MLP.
        rounds: whether inputs of matrices are rounded to 8 bits, and heads to float16.

    Returns:
        (hidden,) float64, and of each layer the new key and value, (kv_heads, head_dim).
    """
    x, new = x.double(), []
    quantised = rounded if rounds else Tensor.clone
    for layer in layers:
        keys, values = layer["keys"].double(), layer["values"].double()
        kv_heads, head_dim = keys.shape[1:]
        h = quantised(norm(x, layer["attn_norm"].double(), eps))
        rows = {name: layer[name].double() @ h for name in "qkv"}
        if "q_bias" in layer:
            rows = {name: row + layer[f"{name}_bias"].double() for name, row in rows.items()}
        q, k, v = (rows[name].view(-1, head_dim) for name in "qkv")
        if "q_norm" in layer:
            q = torch.stack([norm(head, layer["q_norm"].double(), eps) for head in q])
            k = torch.stack([norm(head, layer["k_norm"].double(), eps) for head in k])
        own_turn = layer.get("turn", turn).double()
        q, k = (torch.stack([rotate(head, own_turn) for head in heads]) for heads in (q, k))
        new.append((k, v))
        if rounds:
            q, k, v = (heads.half().double() for heads in (q, k, v))
        keys, values = torch.cat((keys, k[None])), torch.cat((values, v[None]))
        heads = []
        for i, head in enumerate(q):
            kv_head = i // (q.shape[0] // kv_heads)
            weights = torch.softmax(scale * (keys[:, kv_head] @ head), dim=0)
            heads.append(weights @ values[:, kv_head])
        x = x + _normed(layer, "attn", layer["o"].double() @ quantised(torch.cat(heads)), eps)
        h = quantised(norm(x, layer["mlp_norm"].double(), eps))
        gate, up = layer["gate"].double() @ h, layer["up"].double() @ h
        update = layer["down"].double() @ quantised(activated(gate, activation) * up)
        x = x + _normed(layer, "mlp", update, eps)
    return x, new


def _normed(layer: Mapping[str, Tensor], part: str, update: Tensor, eps: float) -> Tensor:
    """An update after its norm, if it has one."""
    weight = layer.get(f"{part}_update_norm")
    return update if weight is None else norm(update, weight.double(), eps)
