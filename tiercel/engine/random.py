"""Counter-based noise: it depends on (seed, stream, position, token id) and on nothing else.

So a request draws the same answer alone, in a batch, after preemption, and on every rank. The
generator is SplitMix64: a Weyl sequence through a 64-bit finaliser. One key per row is mixed on the
host (`engine/seeds.py`); the token id steps the sequence on the device.

Source: "Fast Splittable Pseudorandom Number Generators", doi 10.1145/2714064.2660195.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.engine.seeds import GAMMA, MIX_1, MIX_2, signed


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def uniform_noise(keys: Tensor, count: int) -> Tensor:
    """Uniform numbers in (0, 1).

    Args:
        keys: (rows,) int64 from `mix_key`.
        count: columns; column j steps the sequence j + 1 times.

    Returns:
        (rows, count) float64, multiples of 2^-52 plus 2^-53: one bit more, and the largest would
        round to 1.
    """
    steps = torch.arange(1, count + 1, dtype=torch.int64, device=keys.device)
    value = keys.unsqueeze(1) + steps * signed(GAMMA)  # int64 wraps like the unsigned sum
    value = (value ^ _shift(value, 30)) * signed(MIX_1)
    value = (value ^ _shift(value, 27)) * signed(MIX_2)
    value = value ^ _shift(value, 31)
    return (_shift(value, 12).double() + 0.5) * 2.0**-52
