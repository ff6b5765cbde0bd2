"""Linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.ops.block_quantize import round_fp8_g128
from tiercel.ops.linear import LinearWeight, image_orders, linear
from tiercel.ops.packed_gemm import (
    NextNorm,
    TokenImage,
    heads_refusal,
    load_packed_gemm,
    packed_gemm_norm,
)
from tiercel.ops.packed_matvec import PackedWeight
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

    def into_norm(self, x: Tensor | TokenImage, norm: NextNorm) -> TokenImage | None:
        """The residual += x @ W^T, and its norm, in one launch; None where there is no such one."""
        part = self._packed_alone()
        if part is None or not self.image_orders(x.shape[0]):
            return None
        return packed_gemm_norm(x, part, norm)

    def load_into_norm(self, orders: Sequence[int]) -> None:
        """Load every kernel that `into_norm` may launch for images in some orders."""
        part = self._packed_alone()
        if part is not None and orders and self.image_orders():
            load_packed_gemm(part, torch.float16, orders)

    def load_normed(self) -> None:
        """Load every kernel that a call with the image of `into_norm` may launch."""
        for part in self.weight.segments:
            if isinstance(part, PackedWeight) and self.image_orders():
                load_packed_gemm(part, torch.float16, is_scaled=True)

    def into_heads(self, head_dim: int, dtype: torch.dtype) -> tuple[PackedWeight, ...]:
        """The weights of `packed_gemm_heads`, which may do what follows a call; () if not.

        Args:
            head_dim: columns of a head.
            dtype: of the cache.
        """
        is_plain = self.bias is None and self.out_dtype is None and self.group.size == 1
        parts = tuple(part for part in self.weight.segments if isinstance(part, PackedWeight))
        if not is_plain or not self.image_orders() or heads_refusal(parts, head_dim, dtype):
            return ()
        return parts

    def _packed_alone(self) -> PackedWeight | None:
        """The weight, if packed and all that a call multiplies and adds."""
        is_plain = self.bias is None and self.out_dtype is None and self.group.size == 1
        part = self.weight.segments[0]
        is_alone = is_plain and len(self.weight.segments) == 1
        return part if is_alone and isinstance(part, PackedWeight) else None

    def __call__(self, x: Tensor | TokenImage, out: Tensor | None = None) -> Tensor:
        if self.rounds_input and isinstance(x, Tensor):
            x = round_fp8_g128(x)
        if self.group.size == 1:
            return linear(x, self.weight, self.bias, self.out_dtype, out)
        total = self.group.all_reduce(linear(x, self.weight, None, self.out_dtype))
        total = total if self.bias is None else total.add_(self.bias)
        return total if out is None else out.copy_(total)
