"""Linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.linear import LinearWeight, linear


class Linear:
    """x @ W^T + b; see ops/linear.py."""

    def __init__(
        self, weight: LinearWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.out_dtype = out_dtype

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return linear(x, self.weight, self.bias, self.out_dtype, out)
