"""Linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.block_quantize import round_fp8_g128
from tiercel.ops.linear import LinearWeight, linear


class Linear:
    """x @ W^T + b; see ops/linear.py."""

    def __init__(
        self,
        weight: LinearWeight,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        *,
        rounds_input: bool = False,
    ) -> None:
        """Take the weights.

        Args:
            weight: (out, in).
            bias: (out,); None for none.
            out_dtype: of the result; None for that of x.
            rounds_input: whether x is rounded to FP8 in groups of 128, as a model was trained.
        """
        self.weight = weight
        self.bias = bias
        self.out_dtype = out_dtype
        self.rounds_input = rounds_input

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.rounds_input:
            x = round_fp8_g128(x)
        return linear(x, self.weight, self.bias, self.out_dtype, out)
