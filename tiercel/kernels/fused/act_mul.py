"""Gated activation act(gate) * up, element by element; SwiGLU may be clamped.

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
    gate_ptr,  # (rows, inner), inner stride 1
    up_ptr,  # (rows, inner), inner stride 1
    out_ptr,  # (rows, inner) contiguous
    GATE_STRIDE: tl.constexpr,  # elements from one row to the next
    UP_STRIDE: tl.constexpr,
    INNER: tl.constexpr,
    IS_GELU: tl.constexpr,
    LIMIT: tl.constexpr,  # of gate above, and of up on both sides; 0 for none
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write BLOCK columns of one row."""
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)  # 64-bit: rows * stride passes 2**31
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < INNER
    gate = tl.load(gate_ptr + row * GATE_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * UP_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    if LIMIT > 0:  # NaN stays NaN
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if IS_GELU:
        # tanh(u) = 2 sigmoid(2u) - 1, so 0.5 y (1 + tanh(u)) = y sigmoid(2u); 1.5957691 = 2 sqrt(2
        # / pi)
        act = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        act = gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * INNER + cols, (act * up).to(out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _launch(
    inner: int, strides: tuple[int, int], activation: str, limit: float | None
) -> TritonLaunch:
    constants = {
        "GATE_STRIDE": strides[0],
        "UP_STRIDE": strides[1],
        "INNER": inner,
        "IS_GELU": activation == "gelu_tanh",
        "LIMIT": limit or 0.0,
        "BLOCK": BLOCK,
    }
    return TritonLaunch(act_mul_kernel, 4, constants)


def launch_act_mul(
    gate: torch.Tensor,
    up: torch.Tensor,
    out: torch.Tensor,
    activation: str,
    limit: float | None = None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    limit: of the clamped SwiGLU, > 0; None for no clamp.
    """
    rows, inner = out.shape
    if rows == 0:
        return
    grid = (rows, -(-inner // BLOCK), 1)
    launch = _launch(inner, (gate.stride(0), up.stride(0)), activation, limit)
    launch(grid, (gate, up, out))
