"""Weights in block formats to a plain matrix or stack, at the speed of memory.

A program decodes 128 columns of some rows, whose scales are one number a row where blocks are
multiples of 128 columns wide. Values are formed in float32, in the order of
`ops/dequantize.py`, and rounded once: the two are bit-equal.

Floor: the planes read once and the result written once.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercel.kernels.block.block_numbers import (
    e2m1_values,
    e4m3_values,
    load_scales,
    raw_bytes,
)
from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs

ROWS, COLS = 64, 128  # of a program: 64 weights a thread


@triton.jit(do_not_specialize=["num_rows"])
def block_dequantize_kernel(
    out_ptr,  # (matrices, rows, cols) contiguous
    q_ptr,  # (matrices, rows, cols) E4M3, or (matrices, rows, cols / 2) of E2M1, bytes
    scale_ptr,  # (matrices, row blocks, column blocks): E8M0 or E4M3 bytes, or float32
    total_ptr,  # (matrices,) float32: global_scale or divisor; None without
    num_rows,
    NUM_COLS: tl.constexpr,
    Q_STRIDES: tl.constexpr,  # elements to the next matrix and row
    SCALE_STRIDES: tl.constexpr,  # to the next matrix, row and column
    TOTAL_STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # rows and columns of a scale
    BLOCK_COLS: tl.constexpr,
    IS_FP4: tl.constexpr,
    IS_DIVISOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Decode ROWS x COLS weights of one matrix."""
    wait_for_inputs(IS_DEPENDENT)
    col_tiles: tl.constexpr = (NUM_COLS + COLS - 1) // COLS
    tile = tl.program_id(0)
    matrix = tl.program_id(1).to(tl.int64)  # 64-bit: stacks pass 2**31 elements
    row = (tile // col_tiles * ROWS).to(tl.int64) + tl.arange(0, ROWS)
    first = tile % col_tiles * COLS
    is_row = (row < num_rows)[:, None]
    q_row = q_ptr + matrix * Q_STRIDES[0] + row[:, None] * Q_STRIDES[1]
    scale_row = (
        scale_ptr + matrix * SCALE_STRIDES[0] + (row // BLOCK_ROWS)[:, None] * (SCALE_STRIDES[1])
    )
    if IS_FP4:
        groups: tl.constexpr = COLS // BLOCK_COLS
        pair = first // 2 + tl.arange(0, COLS // 2)
        group = first // BLOCK_COLS + tl.arange(0, groups)
        scale_at = scale_row + group[None, :] * SCALE_STRIDES[2]
        packed = tl.load(q_row + pair[None, :], mask=is_row & (pair < NUM_COLS // 2), other=0)
        is_group = is_row & (group < NUM_COLS // BLOCK_COLS)[None, :]
        scale = load_scales(scale_at, is_group, IS_E4M3=BLOCK_COLS == 16)
        each = scale[:, :, None].broadcast_to((ROWS, groups, BLOCK_COLS // 2))
        each = each.reshape((ROWS, COLS // 2))
        value = tl.interleave(e2m1_values(packed & 15) * each, e2m1_values(packed >> 4) * each)
    else:
        col = first + tl.arange(0, COLS)
        mask = is_row & (col < NUM_COLS)[None, :]
        byte = tl.load(q_row + col[None, :], mask=mask, other=0)
        if BLOCK_COLS % COLS == 0:  # one scale for all columns of the program
            scale_at = scale_row + first // BLOCK_COLS * SCALE_STRIDES[2]
            scale = load_scales(scale_at, is_row, IS_E4M3=False)
        else:
            scale_at = scale_row + (col // BLOCK_COLS)[None, :] * SCALE_STRIDES[2]
            scale = load_scales(scale_at, mask, IS_E4M3=False)
        value = e4m3_values(byte) * scale
    if total_ptr is not None:
        total = tl.load(total_ptr + matrix * TOTAL_STRIDE)
        value = tl.div_rn(value, total + tl.zeros_like(value)) if IS_DIVISOR else value * total
    at = first + tl.arange(0, COLS)
    out = out_ptr + (matrix * num_rows + row[:, None]) * NUM_COLS + at[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=is_row & (at < NUM_COLS)[None, :])


@functools.cache
def _launch(
    num_cols: int,
    strides: tuple[tuple[int, int], tuple[int, int, int], int],
    block: tuple[int, int],
    is_fp4: bool,
    is_divisor: bool,
) -> TritonLaunch:
    q_strides, scale_strides, total_stride = strides
    constants = {
        "NUM_COLS": num_cols,
        "Q_STRIDES": q_strides,
        "SCALE_STRIDES": scale_strides,
        "TOTAL_STRIDE": total_stride,
        "BLOCK_ROWS": block[0],
        "BLOCK_COLS": block[1],
        "IS_FP4": is_fp4,
        "IS_DIVISOR": is_divisor,
        "ROWS": ROWS,
        "COLS": COLS,
    }
    return TritonLaunch(block_dequantize_kernel, 4, constants)


def launch_block_dequantize(
    q: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    out: Tensor,
    *,
    total: Tensor | None = None,
    is_divisor: bool = False,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        q: (rows, cols) or (matrices, rows, cols) float8_e4m3fn, or half as many columns of uint8,
            E2M1 in pairs; columns are contiguous, other strides any.
        scale: a number per block: uint8 E8M0, float32, or float8_e4m3fn with blocks of 16 columns;
            any strides.
        block: rows and columns of a scale; (1, 32) or (1, 16) for E2M1.
        out: contiguous, of the shape in weights, float32, bfloat16 or float16, with at most 65,535
            matrices.
        total: () or (matrices,) float32: a factor, or a divisor.
        is_divisor: which of the two.
    """
    if out.numel() == 0:
        return
    is_stack = out.dim() == 3
    num_rows, num_cols = out.shape[-2:]
    q_strides = (q.stride(0) if is_stack else 0, q.stride(-2))
    scale_strides = (scale.stride(0) if is_stack else 0, scale.stride(-2), scale.stride(-1))
    total_stride = total.stride(0) if total is not None and is_stack else 0
    is_fp4 = q.dtype == torch.uint8
    launch = _launch(num_cols, (q_strides, scale_strides, total_stride), block, is_fp4, is_divisor)
    tiles = -(-num_rows // ROWS) * -(-num_cols // COLS)
    tensors = (out, raw_bytes(q), raw_bytes(scale), total)
    launch((tiles, out.shape[0] if is_stack else 1, 1), tensors, (num_rows,))
