"""Oracle of DeepSeek-V4's rotation: complex numbers and exact angles, in float64."""

import math

import torch
from torch import Tensor


def frequencies(
    rotary_dim: int,
    base: float,
    factor: float = 1.0,
    original: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> list[float]:
    """RoPE frequencies, one after the other; original = 0 means no YaRN."""
    result = []
    for i in range(rotary_dim // 2):
        plain = base ** (-2 * i / rotary_dim)
        if original == 0:
            result.append(plain)
            continue
        # The pair that turns n times in the original context has index corr(n).
        corr_fast = rotary_dim * math.log(original / (beta_fast * 2 * math.pi)) / 2 / math.log(base)
        corr_slow = rotary_dim * math.log(original / (beta_slow * 2 * math.pi)) / 2 / math.log(base)
        low = max(math.floor(corr_fast), 0)
        high = min(math.ceil(corr_slow), rotary_dim - 1)
        if i <= low and low < high:
            ramp = 0.0
        elif i >= high:
            ramp = 1.0
        else:
            ramp = (i - low) / (high - low)
        result.append(plain / factor * ramp + plain * (1 - ramp))
    return result


def latent_rope(
    x: Tensor,
    positions: Tensor,
    angles: list[float],
    eps: float | None = None,
    weight: Tensor | None = None,
    inverse: bool = False,
) -> Tensor:
    """Heads (T, heads, d) normed and rotated by position * frequency, float64."""
    y = x.double()
    if eps is not None:
        y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.double()
    nope = y.shape[-1] - 2 * len(angles)
    pairs = torch.complex(y[..., nope::2], y[..., nope + 1 :: 2])
    turn = positions.double()[:, None] * torch.tensor(angles, dtype=torch.float64)
    rotation = torch.polar(torch.ones_like(turn), -turn if inverse else turn)
    turned = pairs * (rotation[:, None] if y.dim() == 3 else rotation)
    return torch.cat((y[..., :nope], torch.view_as_real(turned).flatten(-2)), dim=-1)
