"""RMSNorm over the last dimension, of rows or of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError


def rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """Normalise the last dimension to unit root mean square, times weight.

    Args:
        x: (rows, hidden) or (rows, heads, hidden), float32, bfloat16 or float16; unit inner stride.
        weight: (hidden,) float32, same device.
        eps: added to the mean square, > 0.
        out_dtype: dtype of the result; None for that of x.

    Returns:
        The shape of x, contiguous. Sums are float32, rounded once.

    Raises:
        ArgumentError: the shapes disagree, weight is not float32, or the inner stride is not 1.

    Source: "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    hidden = x.shape[-1]
    if weight.shape != (hidden,) or weight.dtype != torch.float32:
        raise ArgumentError(
            f"rms_norm: weight is {weight.dtype} {tuple(weight.shape)} but x has {hidden} columns.",
            hint=f"Pass a float32 weight of shape ({hidden},).",
        )
    if x.dim() not in (2, 3):
        raise ArgumentError(f"rms_norm: x has {x.dim()} dimensions.", hint="Pass 2 or 3.")
    if x.stride(-1) != 1 and hidden > 1:
        raise ArgumentError(f"rms_norm: x has inner stride {x.stride(-1)}.", hint="Pass 1.")
    if not x.is_cuda:
        normed = torch.nn.functional.rms_norm(x.float(), (hidden,), weight, eps)
        return normed.to(out_dtype or x.dtype)
    from tiercel.kernels.rms_norm import launch_rms_norm

    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    launch_rms_norm(x if x.dim() == 3 else x.unsqueeze(1), weight, out, eps)
    return out
