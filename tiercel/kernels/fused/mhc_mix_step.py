"""A step of residual streams between two blocks of few tokens in one launch.

cuda/fused/mhc_mix_step.cu: a CTA takes `PIECE` channels of a token's streams, writes a block's
output back and multiplies the new streams by its part of fn. The last CTA of a token to finish adds
up the products, and mixes and norms the next block's input, as `mhc_mix_finish` does. A token's
bits depend on no other token.

Floor: fn, the streams and the output once, the streams and x once; of few tokens reads from the L2,
a counter, and Sinkhorn's iteration.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Final

import torch
from torch import Tensor

from tiercel.kernels.fused.mhc_mix_finish import SMEM_BYTES, THREADS, finish_refusal
from tiercel.kernels.runtime import rtc

MOST_TOKENS: Final = 16
"""Of a launch, and counters that it needs."""
PIECE: Final = 128
"""Channels of a CTA, as of `mhc_mix.STEP_PIECE`."""
_LANE_BYTES: Final = {torch.bfloat16: 8, torch.float32: 16}  # of four channels of the output


def step_refusal(streams: Tensor, y: Tensor, x: Tensor) -> str:
    """Why the kernel does not take streams (T, 4, hidden) and a block's output; "" if it does."""
    lane = _LANE_BYTES.get(y.dtype)
    if streams.shape[0] > MOST_TOKENS or lane is None:
        return f"{streams.shape[0]} tokens, an output of {y.dtype}"
    if y.data_ptr() % lane or y.stride(0) % 4 or y.stride(1) != 1:
        return "the rows of the output are not aligned"
    return finish_refusal(streams, x)


@functools.cache
def cuda_source(hidden: int, columns: int, *, is_float: bool) -> rtc.KernelSource:
    """The kernel for some channels, and for outputs of float32 or bfloat16."""
    macros = (("IS_BF16", 1), ("HIDDEN", hidden), ("SPLITS", -(-hidden // PIECE)))
    return rtc.KernelSource(
        "mhc_mix_step", (*macros, ("COLUMNS", columns), ("IS_FLOAT_Y", int(is_float)))
    )


def launch_mhc_mix_step(
    before: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    parts: Tensor,
    tickets: Tensor,
    out: Tensor,
    x: Tensor,
    coefficients: tuple[Tensor, Tensor],
    norm: Tensor | None,
    eps: tuple[float, float, float],
    iters: int,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        before: streams, y, post and comb of `mhc_mix.launch_mhc_mix_post`.
        weights: fn, scale and base of the next block, contiguous.
        parts: see `mhc_mix.step_parts_shape`.
        tickets: int32 zeros of at least the tokens, which are zeros again afterwards.
        out: (tokens, 4, hidden) bfloat16 contiguous, the streams between the blocks.
        x: (tokens, hidden) bfloat16 contiguous.
        coefficients: post and comb of the next block.
        norm: of the next block.
        eps: of the root mean square, of the coefficients, of the norm.
        iters: of Sinkhorn.
    """
    streams, y, post, comb = before
    num_tokens, _, hidden = streams.shape
    if num_tokens == 0:
        return
    pieces, columns = parts.shape[1:]
    source = cuda_source(hidden, columns, is_float=y.dtype == torch.float32)
    tensors = (x, *coefficients, out, parts, tickets, streams, y, post, comb, *weights)
    rtc.launch(
        rtc.load_kernel(source, streams.device, SMEM_BYTES),
        pieces,
        THREADS,
        [
            *map(rtc.pointer, tensors),
            ctypes.c_void_p(None if norm is None else norm.data_ptr()),
            *map(ctypes.c_int64, (*streams.stride()[:2], y.stride(0))),
            ctypes.c_int(iters),
            *map(ctypes.c_float, eps),
        ],
        grid_y=num_tokens,
        is_dependent=rtc.is_dependent(streams.device),
    )
