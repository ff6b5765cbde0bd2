"""Oracle of an MLP of K-quantised matrices, in float64 without a rounding between its products."""

from __future__ import annotations

from torch import Tensor

from tiercel.reference.act_mul import act_mul
from tiercel.reference.packed_matvec import packed_matvec


def packed_mlp(
    x: Tensor, gate_up: tuple[Tensor, str], down: tuple[Tensor, str], activation: str
) -> Tensor:
    """Wdown (act(Wgate x) * Wup x).

    Args:
        x: (tokens, hidden) on any device.
        gate_up: rows of gate, then of up, in the layout of the file, and their type.
        down: likewise.
        activation: of `ops/act_mul.py`.

    Returns:
        (tokens, hidden) float64 on the CPU.
    """
    return packed_matvec(act_mul(packed_matvec(x, *gate_up), activation), *down)
