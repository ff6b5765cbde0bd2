"""Products of a few tokens with weights in block formats, read once, as stored.

Tensor cores multiply x by E4M3 widened to the dtype of x, exactly; a block's scale is a factor of
the float32 sum over 128 columns. E2M1 takes its scales before the product: a bfloat16 holds it
times any of them. Where few rows leave processors idle, the columns are split and a second kernel
adds the parts in order. Up to 64 tokens the order of sums follows from the weight's shape alone, so
a token's bits do not depend on their number.

Floor: the planes and x read once, the result written once.
"""

import functools
from typing import NamedTuple

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

COLS = 128  # of a step: the columns of one scale of FP8
# Tokens of a program: one or two tiles of mma.sync, or, from `MANY` on, wgmma, whose operand in
# registers are the weights. A program of 128 tokens is one for each processor.
FEW_TOKENS, SOME_TOKENS, MANY_TOKENS = 16, 32, 128
MANY = 64
# Rows of a tile by the least number of weights: many to a warp spare instructions (31, 24 and 19
# bytes a cycle and processor if each cycle issues; HBM3e has 20), few to a warp end sooner.
TILE_ROWS = ((1 << 24, 128), (1 << 23, 64), (0, 32))
# Two programs of four warps for each of an H200's 132 processors are 264: a split at most doubles
# the programs while they are no more than this.
MOST_PROGRAMS, MOST_MANY_PROGRAMS = 400, 132
MOST_SPLITS = 16
LEAST_STEPS = 2  # of a program
STAGES = {32: 8, 64: 6, 128: 5}  # of a tile's rows: 28, 40 and 64 KB of weights in flight
WARPS, MANY_WARPS, MANY_STAGES = 4, 8, 3
SUM_COLS = 512  # of a program that adds parts


class Tiles(NamedTuple):
    """Rows and tokens of a program, and how many programs share a row's columns."""

    rows: int
    tokens: int
    splits: int


def select_tiles(num_groups: int, rows: int, cols: int, num_tokens: int) -> Tiles:
    """The tiles of a product; splits follow from the weight's shape alone up to 64 tokens.

    Args:
        num_groups: groups of rows with inputs of their own.
        rows: of a group.
        cols: inputs of a row.
        num_tokens: rows of x; 64 for the tiles of as few where there are more.
    """
    is_many = num_tokens > MANY
    weights = num_groups * rows * cols
    tile = 128 if is_many else next(size for least, size in TILE_ROWS if weights >= least)
    programs, steps = num_groups * -(-rows // tile), -(-cols // COLS)
    most = MOST_MANY_PROGRAMS if is_many else MOST_PROGRAMS
    splits = 1
    while (
        2 * splits <= MOST_SPLITS
        and 2 * splits * programs <= most
        and 2 * splits * LEAST_STEPS <= steps
    ):
        splits *= 2
    if is_many:
        return Tiles(tile, MANY_TOKENS, splits)
    return Tiles(tile, FEW_TOKENS if num_tokens <= FEW_TOKENS else SOME_TOKENS, splits)


@triton.jit
def widen_e4m3(byte, DTYPE: tl.constexpr, IS_ASM: tl.constexpr):
    """uint8 E4M3 to bfloat16 or float16, exactly; NaN counts as 480 on a GPU.

    The bits of four go to the top of 16-bit numbers in two permutations, their exponents are moved
    into place, and the difference of the exponents' offsets, 2^120 or 2^8, is a factor. Weights are
    2.5 instructions each; PyTorch's conversion has a quarter of that rate.
    """
    if not IS_ASM:
        value = e4m3_values(byte).to(DTYPE)
    elif DTYPE.is_bf16():
        value = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, f, z;
            mov.b32 f, 0x7B807B80;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            and.b32 c, c, 0x07F007F0;
            and.b32 d, d, 0x07F007F0;
            lop3.b32 c, a, z, c, 0xEA;
            lop3.b32 d, b, z, d, 0xEA;
            fma.rn.bf16x2 $0, c, f, z;
            fma.rn.bf16x2 $1, d, f, z;
            }
            """,
            "=r,=r,r",
            [byte],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        value = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, f, z;
            mov.b32 f, 0x5C005C00;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 1;
            shr.u32 d, b, 1;
            and.b32 c, c, 0x3F803F80;
            and.b32 d, d, 0x3F803F80;
            lop3.b32 c, a, z, c, 0xEA;
            lop3.b32 d, b, z, d, 0xEA;
            mul.f16x2 $0, c, f;
            mul.f16x2 $1, d, f;
            }
            """,
            "=r,=r,r",
            [byte],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return value


@triton.jit
def load_step_scales(scale_ptr, mask, col, NUM_COLS: tl.constexpr, STRIDE, BLOCK_COLS):
    """Scales of E4M3 for the columns from `col` on, or for the last columns."""
    block = tl.minimum(col, NUM_COLS - 1) // BLOCK_COLS
    return load_scales(scale_ptr + block * STRIDE, mask, IS_E4M3=False)


@triton.jit
def multiply_e4m3(
    x_row,  # (TOKENS, 1) pointers
    q_row,  # (ROWS,) pointers
    scale_ptr,  # a pointer for all rows, or (ROWS,)
    is_token,
    is_row,
    is_scale,  # as scale_ptr
    start,  # first column
    steps: tl.constexpr,
    NUM_COLS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    MANY: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_ASM: tl.constexpr,
):
    """Sums (TOKENS, ROWS) over `steps` times COLS columns; of many tokens (ROWS, TOKENS)."""
    is_many: tl.constexpr = TOKENS >= MANY  # the weights are the operand in registers
    sums = tl.zeros((ROWS, TOKENS) if is_many else (TOKENS, ROWS), tl.float32)
    # A step ahead of its use: the pipeline of the loop has x and the weights alone.
    scale = load_step_scales(scale_ptr, is_scale, start, NUM_COLS, SCALE_STRIDE, BLOCK_COLS)
    for step in tl.range(0, steps, num_stages=STAGES):
        first = start + step * COLS
        col = first + tl.arange(0, COLS)
        is_col = (col < NUM_COLS)[None, :]
        x = tl.load(x_row + col[None, :], mask=is_token[:, None] & is_col, other=0.0)
        byte = tl.load(q_row[:, None] + col[None, :], mask=is_row[:, None] & is_col, other=0)
        following = load_step_scales(
            scale_ptr, is_scale, first + COLS, NUM_COLS, SCALE_STRIDE, BLOCK_COLS
        )
        weights = widen_e4m3(byte, DTYPE, IS_ASM)
        if is_many:
            part = tl.dot(weights, x.to(DTYPE).T)
            sums += part * (scale if IS_EVEN else scale[:, None])
        else:
            part = tl.dot(x.to(DTYPE), weights.T)
            sums += part * (scale if IS_EVEN else scale[None, :])
        scale = following
    return sums


@triton.jit
def multiply_e2m1(
    x_row,  # (TOKENS, 1) pointers
    q_row,  # (ROWS,) pointers
    scale_row,  # (ROWS,) pointers
    is_token,
    is_row,
    start,  # first column
    steps: tl.constexpr,
    NUM_COLS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Sums (TOKENS, ROWS) over `steps` times COLS columns, even ones and odd ones apart."""
    groups: tl.constexpr = COLS // BLOCK_COLS
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    for step in tl.range(0, steps, num_stages=3):
        first = start + step * COLS
        col = first + tl.arange(0, COLS)
        x_mask = is_token[:, None] & (col < NUM_COLS)[None, :]
        x = tl.load(x_row + col[None, :], mask=x_mask, other=0.0).to(DTYPE)
        even, odd = tl.split(x.reshape((TOKENS, COLS // 2, 2)))
        pair = first // 2 + tl.arange(0, COLS // 2)
        mask = is_row[:, None] & (pair < NUM_COLS // 2)[None, :]
        packed = tl.load(q_row[:, None] + pair[None, :], mask=mask, other=0)
        group = first // BLOCK_COLS + tl.arange(0, groups)
        scale = load_scales(
            scale_row[:, None] + group[None, :] * SCALE_STRIDE,
            is_row[:, None] & (group < NUM_COLS // BLOCK_COLS)[None, :],
            IS_E4M3=BLOCK_COLS == 16,
        )
        each = scale[:, :, None].broadcast_to((ROWS, groups, BLOCK_COLS // 2))
        each = each.reshape((ROWS, COLS // 2))
        low = (e2m1_values(packed & 15) * each).to(DTYPE)
        high = (e2m1_values(packed >> 4) * each).to(DTYPE)
        sums = tl.dot(even, low.T, sums)
        sums = tl.dot(odd, high.T, sums)
    return sums


# Not specialised: a kernel for each divisibility of a count would be compiled between two steps.
@triton.jit(do_not_specialize=["num_tokens", "out_stride"])
def block_matvec_kernel(
    out_ptr,  # (tokens, groups * rows), rows strided; if split (splits, tokens, groups * rows)
    x_ptr,  # (tokens, groups * cols), rows strided
    q_ptr,  # (groups * rows, cols) E4M3, or (groups * rows, cols / 2) of E2M1, bytes
    scale_ptr,  # (row blocks, column blocks): E8M0 or E4M3 bytes, or float32
    total_ptr,  # () float32: global_scale or divisor; None without
    num_tokens,
    out_stride,
    GROUPS: tl.constexpr,
    NUM_ROWS: tl.constexpr,  # of a group
    NUM_COLS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,  # to the next row and column
    BLOCK_ROWS: tl.constexpr,  # rows and columns of a scale
    BLOCK_COLS: tl.constexpr,
    IS_FP4: tl.constexpr,
    IS_DIVISOR: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    MANY: tl.constexpr,  # tokens from which on the weights are the operand in registers
    IS_ASM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One tile of a group's rows, by a share of its columns, for some tokens."""
    wait_for_inputs(IS_DEPENDENT)
    tiles: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    steps: tl.constexpr = (NUM_COLS + COLS * SPLITS - 1) // (COLS * SPLITS)
    # The interpreter multiplies no bfloat16.
    dtype: tl.constexpr = x_ptr.dtype.element_ty if IS_ASM else tl.float32
    group = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * ROWS
    split = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    in_group = first + tl.arange(0, ROWS)
    is_row = in_group < NUM_ROWS
    row = (group * NUM_ROWS + in_group).to(tl.int64)
    x_row = x_ptr + token[:, None].to(tl.int64) * X_STRIDE + group * NUM_COLS
    start = split * steps * COLS
    q_row = q_ptr + row * Q_STRIDE
    if IS_FP4:
        scale_row = scale_ptr + row * SCALE_STRIDES[0]
        sums = multiply_e2m1(
            x_row, q_row, scale_row, is_token, is_row, start, steps, NUM_COLS, SCALE_STRIDES[1],
            BLOCK_COLS, TOKENS, ROWS, COLS, dtype,
        )  # fmt: skip
        if total_ptr is not None:
            total = tl.load(total_ptr)
            sums = tl.div_rn(sums, total + tl.zeros_like(sums)) if IS_DIVISOR else sums * total
    else:
        # One scale a step and tile where no tile has rows of two blocks.
        is_even: tl.constexpr = BLOCK_ROWS % ROWS == 0 and (GROUPS == 1 or NUM_ROWS % ROWS == 0)
        if is_even:
            at = scale_ptr + (group * NUM_ROWS + first) // BLOCK_ROWS * SCALE_STRIDES[0]
            is_scale = first < NUM_ROWS
        else:
            at = scale_ptr + row // BLOCK_ROWS * SCALE_STRIDES[0]
            is_scale = is_row
        sums = multiply_e4m3(
            x_row, q_row, at, is_token, is_row, is_scale, start, steps, NUM_COLS, SCALE_STRIDES[1],
            BLOCK_COLS, TOKENS, ROWS, COLS, STAGES, MANY, dtype, is_even, IS_ASM,
        )  # fmt: skip
    if SPLITS > 1:
        out_row = out_ptr + (split.to(tl.int64) * num_tokens + token) * (GROUPS * NUM_ROWS)
    else:
        out_row = out_ptr + token.to(tl.int64) * out_stride
    sums = sums.to(out_ptr.dtype.element_ty)
    if TOKENS >= MANY and not IS_FP4:
        mask = is_row[:, None] & is_token[None, :]
        tl.store(out_row[None, :] + row[:, None], sums, mask=mask)
    else:
        mask = is_token[:, None] & is_row[None, :]
        tl.store(out_row[:, None] + row[None, :], sums, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "out_stride"])
def add_parts_kernel(
    out_ptr,  # (tokens, rows), rows strided
    parts_ptr,  # (splits, tokens, rows) float32
    num_tokens,
    out_stride,
    NUM_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Add the parts of COLS results of a token, in order, and round once."""
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * COLS + tl.arange(0, COLS)
    mask = row < NUM_ROWS
    sums = tl.zeros((COLS,), tl.float32)
    for split in tl.static_range(SPLITS):
        part_ptr = parts_ptr + (split * num_tokens + token) * NUM_ROWS
        sums += tl.load(part_ptr + row, mask=mask, other=0.0)
    tl.store(out_ptr + token * out_stride + row, sums.to(out_ptr.dtype.element_ty), mask=mask)


class Planes(NamedTuple):
    """A matrix in a block format, as the kernel takes it.

    Attributes:
        q: (rows, cols) float8_e4m3fn, or (rows, cols / 2) uint8 of E2M1 in pairs; columns are
            contiguous.
        scale: (row blocks, column blocks) uint8 E8M0, float32, or float8_e4m3fn; any strides.
        block: rows and columns of a scale; (1, 32) or (1, 16) for E2M1. Columns of E4M3 are a
            multiple of `COLS`.
        total: () float32, a factor or divisor of the matrix; None without.
        is_divisor: which of the two.
    """

    q: Tensor
    scale: Tensor
    block: tuple[int, int]
    total: Tensor | None
    is_divisor: bool


@functools.cache
def _launch(
    groups: int,
    shape: tuple[int, int],
    strides: tuple[int, int, tuple[int, int]],
    block: tuple[int, int],
    kind: tuple[bool, bool, bool],
    tiles: Tiles,
) -> TritonLaunch:
    is_fp4, is_divisor, is_asm = kind
    is_many = tiles.tokens >= MANY
    constants = {
        "GROUPS": groups,
        "NUM_ROWS": shape[0],
        "NUM_COLS": shape[1],
        "X_STRIDE": strides[0],
        "Q_STRIDE": strides[1],
        "SCALE_STRIDES": strides[2],
        "BLOCK_ROWS": block[0],
        "BLOCK_COLS": block[1],
        "IS_FP4": is_fp4,
        "IS_DIVISOR": is_divisor,
        "SPLITS": tiles.splits,
        "TOKENS": tiles.tokens,
        "ROWS": tiles.rows,
        "COLS": COLS,
        "STAGES": MANY_STAGES if is_many else STAGES[tiles.rows],
        "MANY": MANY,
        "IS_ASM": is_asm,
    }
    return TritonLaunch(block_matvec_kernel, MANY_WARPS if is_many else WARPS, constants)


@functools.cache
def _launch_sum(num_rows: int, splits: int) -> TritonLaunch:
    constants = {"NUM_ROWS": num_rows, "SPLITS": splits, "COLS": SUM_COLS}
    return TritonLaunch(add_parts_kernel, 4, constants)


def launch_block_matvec(
    x: Tensor,
    weight: Planes,
    num_groups: int,
    tiles: Tiles,
    out: Tensor,
    parts: Tensor | None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        x: (tokens, groups * cols) bfloat16 or float16; rows may be strided. E2M1: bfloat16.
        weight: of (groups * rows, cols).
        num_groups: groups of rows, each with inputs of its own.
        tiles: of `select_tiles`, which takes rows and columns of a group; E2M1: of at most 64
            tokens.
        out: (tokens, groups * rows), the dtype of x or float32; rows may be strided.
        parts: (splits, tokens, groups * rows) float32 contiguous, a workspace; None for a
            single split.
    """
    num_tokens, all_rows = out.shape
    if num_tokens == 0 or all_rows == 0:
        return
    rows, cols = all_rows // num_groups, x.shape[1] // num_groups
    x_stride = x.stride(0) if num_tokens > 1 else x.shape[1]  # of one row it means nothing
    strides = (x_stride, weight.q.stride(0), (weight.scale.stride(0), weight.scale.stride(1)))
    kind = (weight.q.dtype == torch.uint8, weight.is_divisor, x.is_cuda)
    launch = _launch(num_groups, (rows, cols), strides, weight.block, kind, tiles)
    grid = (num_groups * -(-rows // tiles.rows), tiles.splits, -(-num_tokens // tiles.tokens))
    planes = (raw_bytes(weight.q), raw_bytes(weight.scale), weight.total)
    target = out if parts is None else parts
    launch(grid, (target, x, *planes), (num_tokens, out.stride(0)))
    if parts is not None:
        grid = (-(-all_rows // SUM_COLS), num_tokens, 1)
        _launch_sum(all_rows, tiles.splits)(grid, (out, parts), (num_tokens, out.stride(0)))
