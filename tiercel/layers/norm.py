"""Normalisation with weights."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.env import has_fused_gemm_norm
from tiercel.layers.linear import Linear
from tiercel.ops.packed_gemm import NextNorm, TokenImage, norm_room
from tiercel.ops.packed_norm import load_packed_norm, norm_refusal, packed_norm
from tiercel.ops.rms_norm import rms_norm
from tiercel.parallel import SINGLE, Group


class RMSNorm:
    """x / rms(x) * weight of rows, after adding an update to x; see ops/rms_norm.py."""

    def __init__(
        self,
        weight: Tensor,
        eps: float,
        out_dtype: torch.dtype,
        update_weight: Tensor | None = None,
        group: Group = SINGLE,
    ) -> None:
        """Take the weights.

        Args:
            weight: (hidden,) float32.
            eps: added to the mean square.
            out_dtype: dtype of the result.
            update_weight: of the norm that an update passes before it is added; None for none.
            group: ranks whose updates are parts, which are added.
        """
        self.weight = weight
        self.eps = eps
        self.out_dtype = out_dtype
        self.update_weight = update_weight
        self.group = group
        self._is_joined = has_fused_gemm_norm()
        self._room = norm_room(weight) if self._is_joined else 0

    def __call__(self, x: Tensor, update: Tensor | None = None) -> Tensor:
        """x: (rows, hidden), update: of the same shape, added to x in place."""
        if update is not None and self.group.size > 1:
            small = self.group.small_sums
            is_plain = self.update_weight is None and self.out_dtype == update.dtype
            if small is not None and is_plain and update.is_cuda and small.norms(update):
                return small.add_norm(update, x, self.weight, self.eps)
            update = self.group.all_reduce(update)
        update_weight = None if update is None else self.update_weight
        return rms_norm(
            x, self.weight, self.eps, self.out_dtype, update=update, update_weight=update_weight
        )

    def for_reader(self, x: Tensor, update: Tensor | None, reader: Linear) -> Tensor | TokenImage:
        """The same in the form that the product with it is fastest from."""
        orders = reader.image_orders(x.shape[0])
        if not self._has_images(orders):
            return self(x, update)
        return packed_norm(x, self.weight, self.eps, orders, update)

    def after_product(self, x: Tensor, before: TokenImage, reader: Linear) -> NextNorm | None:
        """The norm as part of the product whose result x takes up; None where it is no such part.

        Args:
            x: (rows, hidden) float32, the residual.
            before: the image of the norm before.
            reader: of the normed rows.
        """
        orders = self.orders_after_product(reader, x.shape[0])
        if before.roots is None or not orders:
            return None
        return NextNorm(x, self.weight, self.eps, orders, before.roots, self._room)

    def load_for(self, reader: Linear) -> None:
        """Load every kernel that `for_reader` may launch besides those of a call."""
        orders = reader.image_orders()
        if self._has_images(orders):
            load_packed_norm(self.weight.shape[0], orders, self.weight.device)

    def orders_after_product(self, reader: Linear, rows: int | None = None) -> tuple[int, ...]:
        """Orders of the images that `after_product` may request; () for none.

        Args:
            reader: of the normed rows.
            rows: of them; None for any number.
        """
        orders = reader.image_orders(rows)
        return orders if self._is_joined and self._has_images(orders) else ()

    def _has_images(self, orders: tuple[int, ...]) -> bool:
        is_plain = self.update_weight is None and self.out_dtype == torch.float16
        is_plain = is_plain and self.group.size == 1
        return bool(orders) and is_plain and not norm_refusal(self.weight.shape[0], orders)
