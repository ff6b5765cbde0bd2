"""Gated activation: act(gate) * up of one fused projection, element by element.

Floor: gate and up are read once, the product written once.
"""

import functools

import torch
import triton
import triton.language as tl

from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs

BLOCK = 1024  # elements a program covers: 4 warps x 8 elements a thread


@triton.jit
def act_mul_kernel(
    x_ptr,  # (rows, 2 * inner): gate, then up
    out_ptr,  # (rows, inner) contiguous
    X_STRIDE: tl.constexpr,  # elements from one row of x to the next
    INNER: tl.constexpr,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write BLOCK columns of one row."""
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)  # 64-bit: rows * stride passes 2**31
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < INNER
    gate = tl.load(x_ptr + row * X_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * X_STRIDE + INNER + cols, mask=mask, other=0.0).to(tl.float32)
    if IS_GELU:
        # tanh(u) = 2 sigmoid(2u) - 1, so 0.5 y (1 + tanh(u)) = y sigmoid(2u); 1.5957691 = 2 sqrt(2
        # / pi)
        act = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        act = gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * INNER + cols, (act * up).to(out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _launch(inner: int, x_stride: int, activation: str) -> TritonLaunch:
    is_gelu = activation == "gelu_tanh"
    constants = {"X_STRIDE": x_stride, "INNER": inner, "IS_GELU": is_gelu, "BLOCK": BLOCK}
    return TritonLaunch(act_mul_kernel, 4, constants)


def launch_act_mul(x: torch.Tensor, out: torch.Tensor, activation: str) -> None:
    """Enqueue on the current stream; the op has checked and allocated."""
    rows, inner = out.shape
    if rows == 0:
        return
    grid = (rows, -(-inner // BLOCK), 1)
    _launch(inner, x.stride(0), activation)(grid, (x, out))
