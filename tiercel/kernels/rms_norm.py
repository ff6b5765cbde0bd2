"""RMSNorm on the device: a program takes one long row or several short ones (heads), in one pass.

Floor: each element of x is read once and each of out written once. A row of up to 16384 elements
stays in registers, so there is no second read. A head of 128 alone is too little for a program: one
head each reached 18% of the floor (2,048 x 32 heads, H200, results/rms_norm_h200.json).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tiercel.errors import ArgumentError

MAX_HIDDEN = 16384  # one row in the registers of 8 warps
MIN_TILE = 2048  # elements of a program: 16 a thread in 4 warps
_WARPS_BY_HIDDEN = ((4096, 4), (MAX_HIDDEN, 8))


@dataclass(frozen=True, slots=True)
class RmsNormConfig:
    """Launch parameters: columns of a row, rows of a program, and its warps."""

    block: int
    places: int
    num_warps: int


def select_rms_norm(hidden: int) -> RmsNormConfig:
    """Choose the launch for a row length. Pure: equal in every process, readable by a test."""
    for limit, num_warps in _WARPS_BY_HIDDEN:
        if hidden <= limit:
            block = max(16, 1 << (hidden - 1).bit_length())
            return RmsNormConfig(block, max(1, MIN_TILE // block), num_warps)
    raise ArgumentError(
        f"rms_norm: a row of {hidden} does not fit one block.", hint=f"The limit is {MAX_HIDDEN}."
    )


@triton.jit(do_not_specialize=["count"])  # it would be compiled anew between two steps
def rms_norm_kernel(
    x_ptr,  # (rows, heads, hidden)
    weight_ptr,  # (hidden,) float32
    out_ptr,  # (rows, heads, hidden) contiguous
    x_row_stride,  # elements from one row of x to the next
    x_head_stride,  # elements from one head of x to the next
    count,  # rows * heads
    heads,
    hidden,
    eps,
    PLACES: tl.constexpr,  # (row, head) pairs of a program, power of two
    BLOCK: tl.constexpr,  # power of two, >= hidden
):
    """Write x / rms(x) * weight of PLACES heads."""
    # 64-bit: rows * stride passes 2**31 at 131072 tokens x 16384 hidden.
    place = tl.program_id(0).to(tl.int64) * PLACES + tl.arange(0, PLACES)
    row, head = place // heads, place % heads
    cols = tl.arange(0, BLOCK)
    mask = (place < count)[:, None] & (cols < hidden)[None, :]
    start = row * x_row_stride + head * x_head_stride
    x = tl.load(x_ptr + start[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    rms = tl.sqrt(tl.sum(x * x, axis=1) / hidden + eps)
    weight = tl.load(weight_ptr + cols, mask=cols < hidden, other=0.0)
    out = x / rms[:, None] * weight[None, :]
    target = out_ptr + place[:, None] * hidden + cols[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """Enqueue on the current stream; the op has checked and allocated. x: (rows, heads, hidden)."""
    rows, heads, hidden = x.shape
    count = rows * heads
    if count == 0:
        return
    config = select_rms_norm(hidden)
    rms_norm_kernel[(triton.cdiv(count, config.places),)](
        x,
        weight,
        out,
        x.stride(0),
        x.stride(1),
        count,
        heads,
        hidden,
        eps,
        PLACES=config.places,
        BLOCK=config.block,
        num_warps=config.num_warps,
    )
