"""Normalisation with weights."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.rms_norm import rms_norm


class RMSNorm:
    """x / rms(x) * weight of rows, after adding an update to x; see ops/rms_norm.py."""

    def __init__(
        self,
        weight: Tensor,
        eps: float,
        out_dtype: torch.dtype,
        update_weight: Tensor | None = None,
    ) -> None:
        """Take the weights.

        Args:
            weight: (hidden,) float32.
            eps: added to the mean square.
            out_dtype: dtype of the result.
            update_weight: of the norm that an update passes before it is added; None for none.
        """
        self.weight = weight
        self.eps = eps
        self.out_dtype = out_dtype
        self.update_weight = update_weight

    def __call__(self, x: Tensor, update: Tensor | None = None) -> Tensor:
        """x: (rows, hidden), update: of the same shape, added to x in place."""
        update_weight = None if update is None else self.update_weight
        return rms_norm(
            x, self.weight, self.eps, self.out_dtype, update=update, update_weight=update_weight
        )
