"""Head norm and partial interleaved RoPE with PyTorch operators on any device.

A head of d channels: the first d - r stay, the last r are pairs (2i, 2i + 1) that rotate by the
angle position * f_i.
"""

from __future__ import annotations

import torch
from torch import Tensor


def normalise(x: Tensor, eps: float, weight: Tensor | None) -> Tensor:
    """Rows over their root mean square, times weight, float32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rotate(x: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    """Rotate the last channels of float32 rows by `rotation`, (T, 2, half) cos then sin."""
    half = rotation.shape[-1]
    nope = x.shape[-1] - 2 * half
    shape = (x.shape[0], *[1] * (x.dim() - 2), half)
    cos, sin = rotation[:, 0].view(shape), rotation[:, 1].view(shape)
    if inverse:
        sin = -sin
    even, odd = x[..., nope::2], x[..., nope + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((x[..., :nope], turned.flatten(-2)), dim=-1)


def write_rows(values: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy rows to their slots; a slot of -1 rewrites what slot 0 holds, and so changes nothing."""
    is_real = (slot_mapping >= 0).unsqueeze(-1)
    slots = slot_mapping.clamp(min=0)
    rows = torch.where(is_real, values.to(cache.dtype), cache[0, 0])
    per_block = cache.shape[1]
    cache.index_put_((slots // per_block, slots % per_block), rows)
