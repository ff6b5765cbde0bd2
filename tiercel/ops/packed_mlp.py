"""A gated MLP of packed matrices for some dozens of tokens, without an activation of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_mlp as kernel
from tiercel.ops.act_mul import ACTIVATIONS, act_mul
from tiercel.ops.packed_gemm import has_packed_gemm, is_read, packed_gemm
from tiercel.ops.packed_matvec import PackedWeight, prepare_result


def mlp_refusal(gate_up: PackedWeight, down: PackedWeight) -> str:
    """Why `packed_mlp` does not read two matrices, without a full stop; "" if it does. Pure."""
    (rows, hidden), (columns, inner) = gate_up.tensor.shape, down.tensor.shape
    if not (is_read(gate_up) and is_read(down)):
        return "packed_gemm does not read a matrix"
    if (rows, columns) != (2 * inner, hidden):
        return f"{rows} x {hidden} and {columns} x {inner} are no MLP"
    return ""


def _types_and_sizes(
    gate_up: PackedWeight, down: PackedWeight
) -> tuple[tuple[str, str], tuple[int, int]]:
    types = gate_up.tensor.qtype.name, down.tensor.qtype.name
    return types, (gate_up.tensor.shape[1], down.tensor.shape[1])


def load_packed_mlp(gate_up: PackedWeight, down: PackedWeight, activation: str) -> None:
    """Load every kernel that `packed_mlp` may launch for matrices on a GPU."""
    device = gate_up.tensor.ordered_planes()[0].device
    if has_packed_gemm(device):
        types, sizes = _types_and_sizes(gate_up, down)
        kernel.load_packed_mlp(types, sizes, activation, device)


def packed_mlp(x: Tensor, gate_up: PackedWeight, down: PackedWeight, activation: str) -> Tensor:
    """Wdown (act(Wgate x) * Wup x).

    Args:
        x: (tokens, hidden) float16, contiguous, on the weights' device.
        gate_up: from `prepare_packed`, in layout SOA: rows of gate, then of up.
        down: likewise.
        activation: of `ops/act_mul.py`.

    Returns:
        (tokens, hidden) float16. Weights as in `packed_gemm`; sums in float32, act(gate) * up and
        the result rounded once each.

    Raises:
        ArgumentError: the shapes or dtypes disagree, or the activation is unknown.
    """
    reason = mlp_refusal(gate_up, down)
    hidden = gate_up.tensor.shape[1]
    is_input = x.dim() == 2 and x.shape[1] == hidden and x.is_contiguous()
    if reason or not is_input or x.dtype != torch.float16 or activation not in ACTIVATIONS:
        raise ArgumentError(
            f"packed_mlp: x is {tuple(x.shape)} {x.dtype}, activation {activation!r}"
            f"{reason and f'; {reason}'}.",
            hint=f"Pass contiguous (tokens, {hidden}) float16 and one of {ACTIVATIONS}.",
        )
    if not x.is_cuda:
        return packed_gemm(act_mul(packed_gemm(x, gate_up, torch.float32), activation).half(), down)
    out = prepare_result("packed_mlp", x, hidden, None, None)
    if x.shape[0]:
        types, sizes = _types_and_sizes(gate_up, down)
        configs = kernel.select_packed_mlp(types, sizes, x.shape[0])
        shapes = kernel.image_shapes(x.shape[0], sizes, configs)
        images = x.new_empty(shapes[0]), x.new_empty(shapes[1])
        planes = gate_up.tensor.ordered_planes(), down.tensor.ordered_planes()
        kernel.launch_packed_mlp(
            x,
            kernel.MlpMatrices(types, sizes, *planes),
            activation,
            images,
            out,
            configs,
            is_dependent=gate_up.is_dependent and down.is_dependent,
        )
    return out
