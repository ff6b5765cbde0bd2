"""RMSNorm into images of tokens for packed_gemm, with the sum of the residual before it.

One launch in place of the norm and of an image for each order of columns; a CTA has a token.

Floor: x and the update read once, the sum and the images written once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from tiercel.kernels.packed.packed_gemm import TOKEN_CLASSES, tile_tokens
from tiercel.kernels.packed.packed_types import UNIT_COLUMNS
from tiercel.kernels.runtime import rtc

MOST_COLUMNS: Final = 64 * UNIT_COLUMNS  # 16 of a thread
MOST_IMAGES: Final = 2
_WARP: Final = 32


@functools.cache
def norm_source(
    columns: int, tile: int, orders: tuple[int, ...], *, has_update: bool
) -> rtc.KernelSource:
    """The kernel for rows of a length, tokens of a tile, and orders of columns."""
    macros = (
        ("COLS", columns),
        ("TOKENS", tile),
        ("ORDER", orders[0]),
        ("SECOND", orders[1] if len(orders) > 1 else 0),
        ("HAS_UPDATE", int(has_update)),
    )
    return rtc.KernelSource("packed_norm", macros)


def _threads(columns: int) -> int:
    return -(-columns // (16 * _WARP)) * _WARP


def _smem_bytes(columns: int) -> int:
    return 2 * columns + _threads(columns) // _WARP * 4


def load_packed_norm(columns: int, orders: tuple[int, ...], device: torch.device) -> None:
    """Load what one tile of tokens may need."""
    sources = [
        norm_source(columns, tile, orders, has_update=has_update)
        for tile in TOKEN_CLASSES
        for has_update in (False, True)
    ]
    rtc.fill_cache(sources, rtc.device_arch(device))
    for source in sources:
        rtc.load_kernel(source, device, _smem_bytes(columns))


def launch_packed_norm(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    eps: float,
    images: Mapping[int, Tensor],
    roots: Tensor,
    *,
    is_dependent: bool,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        x: (tokens, columns) float32, contiguous; the sum is written there.
        update: of the same shape, float16, contiguous; None for none.
        weight: (columns,) float32.
        eps: added to the mean square.
        images: by order of columns, at most `MOST_IMAGES`, of `image_shape`, overwritten.
        roots: (tokens,) float32, what rows are multiplied by before the weight, overwritten.
        is_dependent: see `rtc.launch`; the kernel ahead may write x and update.
    """
    tokens, columns = x.shape
    orders, tensors = tuple(images), list(images.values())
    tile = tile_tokens(tokens)
    source = norm_source(columns, tile, orders, has_update=update is not None)
    kernel = rtc.load_kernel(source, x.device, _smem_bytes(columns))
    pointers = (x, x if update is None else update, weight, tensors[0], tensors[-1], roots)
    arguments = [
        *map(rtc.pointer, pointers),
        ctypes.c_int(tokens),
        ctypes.c_float(eps),
    ]
    grid = tensors[0].shape[0] * tile
    rtc.launch(kernel, grid, _threads(columns), arguments, is_dependent=is_dependent)
