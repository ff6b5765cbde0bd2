"""The post of one block and the pre of the next for few tokens, in one launch of clusters.

cuda/fused/mhc_mix_step.cu: a cluster of 16 CTAs takes a token and exchanges its sums through shared
memory, so streams, products and norm need no second launch and no memory in between, and a token's
bits depend on no other token.

Floor: fn once, 1.6 MB for 4,096 channels, which is on its way before the kernel ahead ends; then
latency: one read from the L2 and three barriers of a cluster.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Final

import torch
from torch import Tensor

from tiercel.kernels.runtime import rtc

CAPABILITY: Final = (9, 0)  # clusters
STREAMS: Final = 4
CLUSTER: Final = 16  # CTAs, more than every GPU with clusters grants unasked
_LEAST_CHANNELS: Final = 32  # of a CTA: a warp for each 8 times 4 channels of the streams
_MOST_THREADS: Final = 512  # 128 registers each
_PARTS: Final = 32  # products of a CTA and the sum of squares, rounded up


def mhc_mix_step_refusal(streams: Tensor, y: Tensor, out_dtype: torch.dtype) -> str:
    """Why the kernel does not take arguments on any device; "" if it does."""
    _, num_streams, hidden = streams.shape
    unit = CLUSTER * _LEAST_CHANNELS
    aligned = (*streams.stride()[:2], y.stride(0))
    reasons = (
        (num_streams != STREAMS, f"there are {num_streams} streams"),
        (
            hidden % unit != 0 or hidden // CLUSTER > _MOST_THREADS or not hidden,
            f"{hidden} channels are no multiple of {unit} up to {CLUSTER * _MOST_THREADS}",
        ),
        (
            streams.dtype != torch.bfloat16 or out_dtype != torch.bfloat16,
            "streams or x are not bfloat16",
        ),
        (y.dtype not in (torch.bfloat16, torch.float32), f"y is {y.dtype}"),
        (
            any(stride % 4 for stride in aligned)
            or streams.data_ptr() % 8 != 0
            or y.data_ptr() % (4 * y.itemsize) != 0,
            "rows are not aligned",
        ),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def smem_bytes(hidden: int) -> int:
    """Dynamic shared memory of a CTA, as the kernel lays it out."""
    channels = hidden // CLUSTER
    warps = channels // 32
    return 4 * (_PARTS * CLUSTER + warps * CLUSTER + _PARTS * warps + STREAMS * channels)


@functools.cache
def cuda_source(hidden: int, *, has_float_y: bool) -> rtc.KernelSource:
    """The kernel for a number of channels and a type of y."""
    channels = hidden // CLUSTER
    macros = (
        ("IS_BF16", 1),
        ("CLUSTER", CLUSTER),
        ("QUADS", channels // 4),
        ("IS_FLOAT_Y", int(has_float_y)),
        ("CTAS", 2 if channels <= _MOST_THREADS // 2 else 1),
    )
    return rtc.KernelSource("mhc_mix_step", macros)


def launch_mhc_mix_step(
    before: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    x: Tensor,
    coefficients: tuple[Tensor, Tensor],
    norm: Tensor,
    eps: tuple[float, float, float],
    iters: int,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        before: streams, y, post and comb, the last two contiguous.
        weights: fn, scale and base of the next block, contiguous.
        out: (tokens, 4, hidden) contiguous, the streams between the blocks.
        x: (tokens, hidden) contiguous.
        coefficients: post and comb of the next block, contiguous.
        norm: (hidden,) float32, of the next block.
        eps: of the root mean square, of the coefficients, of the norm.
        iters: of Sinkhorn.
    """
    streams, y, *_ = before
    num_tokens, _, hidden = streams.shape
    if num_tokens == 0:
        return
    source = cuda_source(hidden, has_float_y=y.dtype == torch.float32)
    rtc.launch(
        rtc.load_kernel(source, streams.device, smem_bytes(hidden)),
        CLUSTER,
        hidden // CLUSTER,
        [
            *map(rtc.pointer, (out, x, *coefficients, *before, *weights, norm)),
            *map(ctypes.c_int64, (*streams.stride()[:2], y.stride(0))),
            ctypes.c_int(iters),
            *map(ctypes.c_float, eps),
        ],
        grid_y=num_tokens,
        is_dependent=rtc.is_dependent(streams.device),
    )
