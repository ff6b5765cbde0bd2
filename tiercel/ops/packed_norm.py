"""RMSNorm of tokens into the images that `packed_gemm` reads, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_norm as kernel
from tiercel.kernels.packed.packed_gemm import image_shape, tile_tokens
from tiercel.kernels.packed.packed_types import UNIT_COLUMNS
from tiercel.kernels.runtime.rtc import is_dependent
from tiercel.ops.packed_gemm import TokenImage


def norm_refusal(columns: int, orders: Sequence[int]) -> str:
    """Why rows of a length have no images in some orders, without a full stop; "" if. Pure."""
    if columns % UNIT_COLUMNS or columns > kernel.MOST_COLUMNS:
        return (
            f"{columns} columns are no units of {UNIT_COLUMNS}, or more than {kernel.MOST_COLUMNS}"
        )
    if not 1 <= len(set(orders)) == len(orders) <= kernel.MOST_IMAGES:
        return f"{len(orders)} orders of columns are not 1 to {kernel.MOST_IMAGES} different ones"
    return ""


def load_packed_norm(columns: int, orders: Sequence[int], device: torch.device) -> None:
    """Load every kernel that `packed_norm` may launch for some dozens of tokens."""
    kernel.load_packed_norm(columns, tuple(orders), device)


def packed_norm(
    x: Tensor, weight: Tensor, eps: float, orders: Sequence[int], update: Tensor | None = None
) -> TokenImage:
    """Normalise rows to unit root mean square, times weight; before that, x += update.

    Args:
        x: (tokens, columns) float32, contiguous, on a GPU; mutated where there is an update.
        weight: (columns,) float32, same device.
        eps: added to the mean square, > 0.
        orders: of the images' columns.
        update: (tokens, columns) float16, contiguous; None for none.

    Returns:
        The images. A row's bits do not depend on other rows; rounded to float16 once.

    Raises:
        ArgumentError: the shapes or dtypes disagree, or `norm_refusal` has a reason.
    """
    tokens, columns = x.shape
    reason = norm_refusal(columns, orders)
    is_row = weight.shape == (columns,) and weight.dtype == x.dtype == torch.float32
    if update is not None:
        is_update = update.shape == x.shape and update.dtype == torch.float16
        is_row = is_row and is_update and update.is_contiguous()
    if reason or not is_row or not x.is_contiguous():
        raise ArgumentError(
            f"packed_norm: x is {tuple(x.shape)} {x.dtype}{reason and f'; {reason}'}.",
            hint="Pass contiguous float32 rows, a weight of their length and a float16 update.",
        )
    shape = image_shape(tokens, columns)
    images = {order: torch.empty(shape, dtype=torch.float16, device=x.device) for order in orders}
    roots = torch.empty(shape[0] * tile_tokens(tokens), device=x.device)
    if tokens:
        dependent = is_dependent(x.device)
        kernel.launch_packed_norm(x, update, weight, eps, images, roots, is_dependent=dependent)
    return TokenImage(images, (tokens, columns), roots)
