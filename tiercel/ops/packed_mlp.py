"""A gated MLP of packed matrices for some dozens of tokens, without an activation of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_mlp as kernel
from tiercel.kernels.packed.packed_gemm import NormOutputs, image_shape
from tiercel.ops.act_mul import ACTIVATIONS, act_mul
from tiercel.ops.packed_gemm import (
    NextNorm,
    TokenImage,
    check_tokens,
    column_order,
    has_packed_gemm,
    is_read,
    make_image,
    packed_gemm,
)
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
    types = gate_up.tensor.kernel_type, down.tensor.kernel_type
    return types, (gate_up.tensor.shape[1], down.tensor.shape[1])


def load_packed_mlp(
    gate_up: PackedWeight,
    down: PackedWeight,
    activation: str,
    orders: Sequence[int] = (),
    *,
    is_scaled: bool = False,
) -> None:
    """Load every kernel that `packed_mlp` may launch for matrices on a GPU.

    Args:
        gate_up: from `prepare_packed`.
        down: likewise.
        activation: of `ops/act_mul.py`.
        orders: of images, for `packed_mlp_norm`.
        is_scaled: whether tokens are an image of such a product.
    """
    device = gate_up.tensor.ordered_planes()[0].device
    if has_packed_gemm(device):
        types, sizes = _types_and_sizes(gate_up, down)
        kernel.load_packed_mlp(types, sizes, activation, device, tuple(orders), is_scaled=is_scaled)


def packed_mlp(
    x: Tensor | TokenImage, gate_up: PackedWeight, down: PackedWeight, activation: str
) -> Tensor:
    """Wdown (act(Wgate x) * Wup x).

    Args:
        x: (tokens, hidden) float16, contiguous, on the weights' device; or an image for `gate_up`.
        gate_up: from `prepare_packed`, in layout SOA or STEP: rows of gate, then of up.
        down: likewise.
        activation: of `ops/act_mul.py`.

    Returns:
        (tokens, hidden) float16. Weights as in `packed_gemm`; sums in float32, act(gate) * up and
        the result rounded once each.

    Raises:
        ArgumentError: the shapes or dtypes disagree, or the activation is unknown.
    """
    check_tokens("packed_mlp", x, gate_up)
    reason = mlp_refusal(gate_up, down)
    if reason or activation not in ACTIVATIONS:
        raise ArgumentError(
            f"packed_mlp: {reason or f'activation {activation!r} is unknown'}.",
            hint=f"Pass gate and up with their down, and one of {ACTIVATIONS}.",
        )
    if isinstance(x, Tensor) and not x.is_cuda:
        return packed_gemm(act_mul(packed_gemm(x, gate_up, torch.float32), activation).half(), down)
    shape, device = (x.shape[0], down.tensor.shape[0]), gate_up.tensor.ordered_planes()[0].device
    out = prepare_result("packed_mlp", shape, device, None, None)
    if x.shape[0]:
        image = make_image(x, gate_up) if isinstance(x, Tensor) else x
        _launch(image, gate_up, down, activation, out)
    return out


def packed_mlp_norm(
    x: TokenImage, gate_up: PackedWeight, down: PackedWeight, activation: str, norm: NextNorm
) -> TokenImage:
    """The residual += the MLP of x, and its norm for the next product; see `packed_gemm_norm`.

    Args:
        x: at least one token, an image for `gate_up`.
        gate_up: as in `packed_mlp`.
        down: likewise.
        activation: likewise.
        norm: of the residual.

    Raises:
        ArgumentError: the shapes or dtypes disagree.
    """
    check_tokens("packed_mlp_norm", x, gate_up)
    reason = mlp_refusal(gate_up, down)
    if reason or norm.x.shape != (x.shape[0], down.tensor.shape[0]):
        raise ArgumentError(
            f"packed_mlp_norm: {reason or f'the residual is {tuple(norm.x.shape)}'}.",
            hint="Pass gate and up with their down, and a residual of its shape.",
        )
    written, normed = norm.make_outputs()
    _launch(x, gate_up, down, activation, written)
    return normed


def _launch(
    image: TokenImage,
    gate_up: PackedWeight,
    down: PackedWeight,
    activation: str,
    out: Tensor | NormOutputs,
) -> None:
    types, sizes = _types_and_sizes(gate_up, down)
    planes = gate_up.tensor.ordered_planes(), down.tensor.ordered_planes()
    given = image.tensors[column_order(gate_up)]
    kernel.launch_packed_mlp(
        given,
        kernel.MlpMatrices(types, sizes, *planes, (gate_up.exponent, down.exponent)),
        activation,
        given.new_empty(image_shape(image.shape[0], sizes[1])),
        out,
        kernel.select_packed_mlp(types, sizes, image.shape[0]),
        image.scaled,
        is_dependent=gate_up.is_dependent and down.is_dependent,
    )
