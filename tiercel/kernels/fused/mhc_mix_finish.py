"""The end of a mix of residual streams in one launch, from its products.

cuda/fused/mhc_mix_finish.cu: a CTA takes a token; 16 warps add up its products, mix the streams
into x and norm it, and another one forms the weights of the way back meanwhile. A token's bits
depend on no other token.

Floor: the streams once, x once; of few tokens a read from the L2, two barriers and Sinkhorn's
iteration, whose 39 steps depend on each other.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Final

import torch
from torch import Tensor

from tiercel.kernels.runtime import rtc

STREAMS: Final = 4
_ROWS: Final = 24  # of fn; then comes the sum of squares
_CHANNELS: Final = 8  # of a lane at a time
_WARPS: Final = 16  # that mix
_THREADS: Final = 32 * (_WARPS + 1)
_SMEM_BYTES: Final = 4 * _WARPS * (32 + 1)  # sums of warps: of products, of squares
_MOST_HIDDEN: Final = 8192  # a lane's channels of four streams stay in registers


def finish_refusal(streams: Tensor, x: Tensor) -> str:
    """Why the kernel does not take streams (T, n, hidden) on a GPU; "" if it does."""
    _, num_streams, hidden = streams.shape
    reasons = (
        (num_streams != STREAMS, f"there are {num_streams} streams"),
        (
            hidden % _CHANNELS != 0 or not 0 < hidden <= _MOST_HIDDEN,
            f"{hidden} channels are no multiple of {_CHANNELS} up to {_MOST_HIDDEN}",
        ),
        (streams.dtype != torch.bfloat16 or x.dtype != torch.bfloat16, "not bfloat16"),
        (
            any(stride % _CHANNELS for stride in streams.stride()[:2])
            or streams.data_ptr() % 16 != 0,
            "the rows of the streams are not aligned",
        ),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


@functools.cache
def cuda_source(hidden: int, splits: int, columns: int) -> rtc.KernelSource:
    """The kernel for some channels, and parts of products as `parts_shape` has them."""
    macros = (("IS_BF16", 1), ("HIDDEN", hidden), ("SPLITS", splits), ("COLUMNS", columns))
    return rtc.KernelSource("mhc_mix_finish", macros)


def launch_mhc_mix_finish(
    streams: Tensor,
    parts: Tensor,
    weights: tuple[Tensor, Tensor],
    x: Tensor,
    coefficients: tuple[Tensor, Tensor],
    norm: Tensor | None,
    eps: tuple[float, float, float],
    iters: int,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        streams: (tokens, 4, hidden) bfloat16, inner stride 1.
        parts: (tokens, splits, columns) float32 contiguous: products, then the sum of squares.
        weights: scale and base, contiguous.
        x: (tokens, hidden) bfloat16 contiguous.
        coefficients: post and comb, contiguous.
        norm: (hidden,) float32, or None for no norm.
        eps: of the root mean square, of the coefficients, of the norm.
        iters: of Sinkhorn.
    """
    num_tokens, _, hidden = streams.shape
    if num_tokens == 0:
        return
    rtc.launch(
        rtc.load_kernel(cuda_source(hidden, *parts.shape[1:]), streams.device, _SMEM_BYTES),
        num_tokens,
        _THREADS,
        [
            *map(rtc.pointer, (x, *coefficients, streams, parts, *weights)),
            ctypes.c_void_p(None if norm is None else norm.data_ptr()),
            *map(ctypes.c_int64, streams.stride()[:2]),
            ctypes.c_int(iters),
            *map(ctypes.c_float, eps),
        ],
        is_dependent=rtc.is_dependent(streams.device),
    )
