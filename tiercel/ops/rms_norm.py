"""RMSNorm of rows, and the sum of the residual that goes before it."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.native.forms import has_native
from tiercel.kernels.native.rows import launch_rms_norm as launch_native


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype | None = None,
    *,
    update: Tensor | None = None,
    update_weight: Tensor | None = None,
) -> Tensor:
    """Normalise rows to unit root mean square, times weight; before that, x += update.

    Row-invariant: a row's bits do not depend on other rows.

    Args:
        x: (rows, hidden), float32, bfloat16 or float16; unit inner stride. Mutated where there is
            an update.
        weight: (hidden,) float32, same device.
        eps: added to the mean square, > 0.
        out_dtype: dtype of the result; None for that of x.
        update: (rows, hidden) contiguous of any float dtype, added to x in float32; None for none.
        update_weight: (hidden,) float32: the update itself is normalised first, with this weight.

    Returns:
        The shape of x, contiguous. Sums are float32, rounded once.

    Raises:
        ArgumentError: the shapes disagree, a weight is not float32, the inner stride is not 1, or a
            row on a GPU has more than 16384 elements.

    Source: "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    hidden = x.shape[-1]
    for name, vector in (("weight", weight), ("update_weight", update_weight)):
        if vector is not None and (vector.shape != (hidden,) or vector.dtype != torch.float32):
            raise ArgumentError(
                f"rms_norm: {name} is {vector.dtype} {tuple(vector.shape)} but x has {hidden} "
                "columns.",
                hint=f"Pass a float32 {name} of shape ({hidden},).",
            )
    if x.dim() != 2:
        raise ArgumentError(f"rms_norm: x has {x.dim()} dimensions.", hint="Pass 2.")
    if x.stride(1) != 1 and hidden > 1:
        raise ArgumentError(f"rms_norm: x has inner stride {x.stride(1)}.", hint="Pass 1.")
    if update is not None and (update.shape != x.shape or not update.is_contiguous()):
        raise ArgumentError(
            f"rms_norm: the update is {tuple(update.shape)} but x is {tuple(x.shape)}.",
            hint="Pass a contiguous one of the same shape.",
        )
    if x.is_cuda:
        return _norm_on_gpu(x, weight, eps, out_dtype or x.dtype, update, update_weight)
    if _is_native(x, update):
        out = torch.empty_like(x)
        launch_native(x, weight, out, eps, update, update_weight)
        return out.to(out_dtype or x.dtype)
    if update is not None:
        x.add_(update if update_weight is None else _norm(update, update_weight, eps))
    return _norm(x, weight, eps).to(out_dtype or x.dtype)


def _is_native(x: Tensor, update: Tensor | None) -> bool:
    """Whether the native library takes the rows: PyTorch waits for its threads at each norm."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        return False
    return (update is None or update.dtype == torch.float32) and has_native()


def _norm_on_gpu(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    update: Tensor | None,
    update_weight: Tensor | None,
) -> Tensor:
    from tiercel.kernels.fused.rms_norm import MAX_HIDDEN, launch_rms_norm

    if x.shape[1] > MAX_HIDDEN:
        raise ArgumentError(
            f"rms_norm: a row of {x.shape[1]} does not fit one block.",
            hint=f"The limit is {MAX_HIDDEN}.",
        )
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    launch_rms_norm(x, weight, out, eps, update, update_weight)
    return out


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight, eps)
