"""Normalisation with weights."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.rms_norm import rms_norm


class RMSNorm:
    """x / rms(x) * weight over the last dimension; see ops/rms_norm.py."""

    def __init__(self, weight: Tensor, eps: float, out_dtype: torch.dtype) -> None:
        self.weight = weight
        self.eps = eps
        self.out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.out_dtype)
