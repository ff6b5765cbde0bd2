"""Head norm and partial interleaved RoPE with PyTorch operators on any device.

A head of d channels: the first d - r stay, the last r are pairs (2i, 2i + 1) that rotate by the
angle position * f_i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_CHUNK_POSITIONS = 1 << 16  # of a table: 16 MB of float64 at 32 frequencies


def yarn_ramp(
    half: int, base: float, original_max_position: int, betas: tuple[float, float]
) -> Tensor:
    """0 where a frequency stays, 1 where it is divided by the factor, (half,) float64."""

    def pair(rotations: float) -> float:
        wavelength = original_max_position / (rotations * 2 * math.pi)
        return 2 * half * math.log(wavelength) / (2 * math.log(base))

    low = max(math.floor(pair(betas[0])), 0)
    high = min(math.ceil(pair(betas[1])), 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float64) - low) / max(high - low, 1e-3)
    return ramp.clamp(0, 1)


def make_table(frequencies: Tensor, max_positions: int) -> Tensor:
    """(max_positions, 2, half) float32, cos then sin, of angles formed in float64."""
    table = torch.empty(max_positions, 2, frequencies.shape[0])
    for start in range(0, max_positions, _CHUNK_POSITIONS):
        stop = min(start + _CHUNK_POSITIONS, max_positions)
        angles = torch.outer(torch.arange(start, stop, dtype=torch.float64), frequencies)
        table[start:stop, 0] = angles.cos()
        table[start:stop, 1] = angles.sin()
    return table


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
