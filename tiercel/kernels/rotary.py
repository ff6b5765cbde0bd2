"""Rotary embedding in place: one program per token, all its heads, pairs (i, i + half).

Floor: the rotating dimensions of each head are read and written once.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def rotary_kernel(
    x_ptr,  # (tokens, heads, head_dim), rotated in place
    positions_ptr,  # (tokens,) int32
    table_ptr,  # (positions, 2, half) float32: cos, then sin
    x_row_stride,  # elements from one token of x to the next
    x_head_stride,  # elements from one head of x to the next
    heads,
    half,  # pairs that rotate
    HEADS: tl.constexpr,  # power of two, >= heads
    HALF: tl.constexpr,  # power of two, >= half
):
    """Rotate every head of one token."""
    # 64-bit: tokens * stride passes 2**31 at 131072 tokens x 16384 columns.
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    pair = tl.arange(0, HALF)
    head = tl.arange(0, HEADS)
    row = table_ptr + position * 2 * half
    cos = tl.load(row + pair, mask=pair < half, other=0.0)[None, :]
    sin = tl.load(row + half + pair, mask=pair < half, other=0.0)[None, :]
    place = x_ptr + token * x_row_stride + head[:, None] * x_head_stride + pair[None, :]
    mask = (head < heads)[:, None] & (pair < half)[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=mask, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    tl.store(place, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(place + half, (second * cos + first * sin).to(dtype), mask=mask)


def launch_rotary(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """Enqueue on the current stream; the op has checked. x: (tokens, heads, head_dim), in place."""
    tokens, heads, _ = x.shape
    if tokens == 0:
        return
    half = table.shape[2]
    rotary_kernel[(tokens,)](
        x,
        positions,
        table,
        x.stride(0),
        x.stride(1),
        heads,
        half,
        HEADS=triton.next_power_of_2(heads),
        HALF=triton.next_power_of_2(half),
        num_warps=4,
    )
