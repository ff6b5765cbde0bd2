"""Oracle of rotary embedding, in float64, from angles."""

import torch
from torch import Tensor


def rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (i, i + half) as complex numbers.

    Args:
        x: (tokens, heads, head_dim).
        angles: (tokens, half) float64, radians.

    Returns:
        (tokens, heads, head_dim) float64.
    """
    half = angles.shape[1]
    out = x.double().clone()
    for token in range(x.shape[0]):
        for i in range(half):
            z = torch.complex(out[token, :, i].clone(), out[token, :, i + half].clone())
            z = z * torch.polar(torch.ones((), dtype=torch.float64), angles[token, i])
            out[token, :, i], out[token, :, i + half] = z.real, z.imag
    return out
