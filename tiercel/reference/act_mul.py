"""Oracle of the gated activation, in float64."""

import math

import torch
from torch import Tensor


def act_mul(x: Tensor, activation: str) -> Tensor:
    """act(first half) * second half of the last dimension, float64."""
    gate, up = x.double().chunk(2, dim=-1)
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up
