"""Linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.block_quantize import round_fp8_g128
from tiercel.ops.linear import LinearWeight, image_orders, linear
from tiercel.ops.packed_gemm import TokenImage
from tiercel.parallel import SINGLE, Group


class Linear:
    """x @ W^T + b; see ops/linear.py."""

    def __init__(
        self,
        weight: LinearWeight,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        *,
        rounds_input: bool = False,
        group: Group = SINGLE,
    ) -> None:
        """Take the weights.

        Args:
            weight: (out, in).
            bias: (out,); None for none.
            out_dtype: of the result; None for that of x.
            rounds_input: whether x is rounded to FP8 in groups of 128, as a model was trained.
            group: ranks that have other columns of W, and x: their products are added.
        """
        self.weight = weight
        self.bias = bias
        self.out_dtype = out_dtype
        self.rounds_input = rounds_input
        self.group = group

    def image_orders(self, rows: int | None = None) -> tuple[int, ...]:
        """As of ops/linear.py."""
        return () if self.rounds_input else image_orders(self.weight, rows)

    def __call__(self, x: Tensor | TokenImage, out: Tensor | None = None) -> Tensor:
        if self.rounds_input and isinstance(x, Tensor):
            x = round_fp8_g128(x)
        if self.group.size == 1:
            return linear(x, self.weight, self.bias, self.out_dtype, out)
        total = self.group.all_reduce(linear(x, self.weight, None, self.out_dtype))
        total = total if self.bias is None else total.add_(self.bias)
        return total if out is None else out.copy_(total)
