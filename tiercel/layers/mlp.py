"""The gated MLP of a decoder layer."""

from __future__ import annotations

from torch import Tensor

from tiercel.layers.linear import Linear
from tiercel.ops.act_mul import act_mul


class GatedMLP:
    """Wdown(act(Wgate x) * Wup x), gate and up as one projection."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(act_mul(self.gate_up(x), self.activation))
