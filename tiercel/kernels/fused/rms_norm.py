"""RMSNorm on the device, with the sum of the residual before it: one program per row, one pass.

Floor: x and the update are read once, the sum and the result written once. A row of up to
16384 elements stays in registers, so there is no second read.
"""

import functools

import torch
import triton
import triton.language as tl

from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs

MAX_HIDDEN = 16384  # one row in the registers of 16 warps
_WARPS_BY_HIDDEN = ((1024, 4), (8192, 8), (MAX_HIDDEN, 16))


def select_rms_norm(hidden: int) -> tuple[int, int]:
    """Columns of a program, a power of two, and its warps. Pure: readable by a test.

    Args:
        hidden: elements of a row, at most MAX_HIDDEN.
    """
    num_warps = next(warps for limit, warps in _WARPS_BY_HIDDEN if hidden <= limit)
    return triton.next_power_of_2(hidden), num_warps


@triton.jit
def scaled_to_unit(x, weight, eps, HIDDEN: tl.constexpr):
    """X / sqrt(mean(x^2) + eps) * weight of a row."""
    return x / tl.sqrt(tl.sum(x * x, axis=0) / HIDDEN + eps) * weight


@triton.jit(do_not_specialize=["eps"])
def rms_norm_kernel(
    x_ptr,  # (rows, HIDDEN); the sum is written there
    update_ptr,  # (rows, HIDDEN), contiguous, or None
    update_weight_ptr,  # (HIDDEN,) float32 or None
    weight_ptr,  # (HIDDEN,) float32
    out_ptr,  # (rows, HIDDEN) contiguous
    eps,
    X_STRIDE: tl.constexpr,  # elements from one row of x to the next
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, >= HIDDEN
    IS_DEPENDENT: tl.constexpr,
):
    """Write x / rms(x) * weight of one row, after x += update, which may be normed first."""
    # 64-bit: rows * stride passes 2**31 at 131072 tokens x 16384 hidden.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    # From cold memory, so before the wait: 1.2 us a layer with those of rotary_kv_write (H200).
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    wait_for_inputs(IS_DEPENDENT)
    place = x_ptr + row * X_STRIDE + cols
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if update_ptr is not None:
        update = tl.load(update_ptr + row * HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
        if update_weight_ptr is not None:
            update_weight = tl.load(update_weight_ptr + cols, mask=mask, other=0.0)
            update = scaled_to_unit(update, update_weight, eps, HIDDEN)
        x += update
        tl.store(place, x.to(x_ptr.dtype.element_ty), mask=mask)
    out = scaled_to_unit(x, weight, eps, HIDDEN)
    tl.store(out_ptr + row * HIDDEN + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _launch(hidden: int, x_stride: int) -> TritonLaunch:
    block, num_warps = select_rms_norm(hidden)
    constants = {"X_STRIDE": x_stride, "HIDDEN": hidden, "BLOCK": block}
    return TritonLaunch(rms_norm_kernel, num_warps, constants)


def launch_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    update: torch.Tensor | None = None,
    update_weight: torch.Tensor | None = None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated. x: (rows, hidden)."""
    rows, hidden = x.shape
    if rows == 0:
        return
    tensors = (x, update, update_weight, weight, out)
    _launch(hidden, x.stride(0))((rows, 1, 1), tensors, (eps,))
