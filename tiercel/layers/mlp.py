"""The gated MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tiercel.layers.linear import Linear
from tiercel.ops.act_mul import act_mul
from tiercel.ops.packed_gemm import NextNorm, TokenImage
from tiercel.ops.packed_matvec import PackedWeight
from tiercel.ops.packed_mlp import load_packed_mlp, mlp_refusal, packed_mlp, packed_mlp_norm


class GatedMLP:
    """Wdown(act(Wgate x) * Wup x), gate and up as one projection."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self._packed = _packed(gate_up, down)
        if self._packed is not None:
            load_packed_mlp(*self._packed, activation)

    def __call__(self, x: Tensor | TokenImage) -> Tensor:
        if self._packed is not None and self._takes_images(x):
            return packed_mlp(x, *self._packed, self.activation)
        return self.down(act_mul(self.gate_up(x), self.activation))

    def into_norm(self, x: Tensor | TokenImage, norm: NextNorm) -> TokenImage | None:
        """The residual += the MLP of x, and its norm; None where its launches have no such end."""
        if self._packed is None or not isinstance(x, TokenImage) or not self._takes_images(x):
            return None
        return packed_mlp_norm(x, *self._packed, self.activation, norm)

    def load_into_norm(self, orders: Sequence[int]) -> None:
        """Load every kernel that `into_norm` may launch for images in some orders."""
        if self._packed is not None and orders:
            load_packed_mlp(*self._packed, self.activation, orders)

    def load_normed(self) -> None:
        """Load every kernel that a call with the image of a product's norm may launch."""
        if self._packed is None:
            self.gate_up.load_normed()
        else:
            load_packed_mlp(*self._packed, self.activation, is_scaled=True)

    def _takes_images(self, x: Tensor | TokenImage) -> bool:
        return all(part.image_orders(x.shape[0]) for part in (self.gate_up, self.down))


def _packed(gate_up: Linear, down: Linear) -> tuple[PackedWeight, PackedWeight] | None:
    """Both matrices, if one op multiplies by both."""
    parts = [*gate_up.weight.segments, *down.weight.segments]
    packed = [part for part in parts if isinstance(part, PackedWeight)]
    linears = (gate_up, down)
    is_plain = all(
        linear.bias is None
        and linear.group.size == 1
        and linear.out_dtype is None
        and linear.image_orders()
        for linear in linears
    )
    if not is_plain or len(parts) != 2 or len(packed) != 2 or mlp_refusal(*packed):
        return None
    return packed[0], packed[1]
