"""Routed experts on a GPU: tiles of one expert, weights decoded on their way to the tensor cores.

    moe_tiles     sorts few pairs (token, slot) by expert into tiles of ROWS rows: one program
    gate_up       of a tile: silu(clamped gate) * clamped up * weight of the pair, (pairs, inter)
    down          of a tile: (pairs, hidden) float32
    sum_slots     of a token: its slots in their order

A program multiplies BLOCK_N output rows by all rows of a tile and reads its weights once, so an
expert is read once for each ROWS of its tokens. Weights are the left operand, tokens the right one:
up to 16 tokens fill a tensor core's columns, and a token's sums do not depend on the others. Sums
are float32. Formats: MXFP4, NVFP4, Q2_K in the file's blocks, FP8 with square blocks, floats.

Floor: the weights of each expert in use are read once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from tiercel.kernels.block.block_numbers import e8m0_values
from tiercel.kernels.moe.stack_planes import StackPlanes
from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs

_SORT_CHUNK: Final = 32
_SUM_BLOCK: Final = 1024
FORMATS: Final = {"MXFP4": 0, "NVFP4": 1, "Q2_K": 2, "FP8_BLOCK": 3, "FLOAT": 4}


@triton.jit
def moe_tiles_kernel(
    experts_ptr,  # (tiles,) int64: written, -1 for a tile that nothing fills
    pairs_ptr,  # (tiles, ROWS) int64: written, num_pairs for a row of padding
    ids_ptr,  # (num_pairs,) int64
    first_ptr,  # (experts,) int32: scratch
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,  # a power of two, num_pairs or more
    EXPERTS: tl.constexpr,  # a power of two, NUM_EXPERTS or more
    CHUNK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Sort pairs by expert, in their order within an expert."""
    wait_for_inputs(IS_DEPENDENT)
    expert = tl.arange(0, EXPERTS)
    pair = tl.arange(0, PAIRS)
    own = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=EXPERTS).to(tl.int32)
    counts = tl.zeros((EXPERTS,), tl.int32)
    rank = tl.zeros((PAIRS,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        other = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + other, mask=other < num_pairs, other=EXPERTS).to(tl.int32)
        counts += tl.sum((ids[None, :] == expert[:, None]).to(tl.int32), axis=1)
        is_before = (ids[None, :] == own[:, None]) & (other[None, :] < pair[:, None])
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    tiles = (counts + ROWS - 1) // ROWS
    first = tl.cumsum(tiles, axis=0) - tiles
    tl.store(first_ptr + expert, first, mask=expert < NUM_EXPERTS)
    for start in range(0, num_tiles * ROWS, PAIRS):
        place = start + pair
        tl.store(pairs_ptr + place, num_pairs + tl.zeros((PAIRS,), tl.int64),
                 mask=place < num_tiles * ROWS)  # fmt: skip
        tl.store(experts_ptr + place, tl.full((PAIRS,), -1, tl.int64), mask=place < num_tiles)
    tl.debug_barrier()
    is_pair = (pair < num_pairs) & (own >= 0)  # -1: another rank's
    tile = tl.load(first_ptr + own, mask=is_pair, other=0) + rank // ROWS
    tl.store(pairs_ptr + tile * ROWS + rank % ROWS, pair.to(tl.int64), mask=is_pair)
    tl.store(experts_ptr + tile, own.to(tl.int64), mask=is_pair)


@triton.jit
def _e2m1(words, scale, SIGN: tl.constexpr, SIZE: tl.constexpr):
    """Bfloat16 of E2M1 codes (n, groups, bytes) times scales (n, groups), 2^-26 of them, exact.

    As float32 bits a code is its value times 2^-126; a conversion of integers would take longer.

    Args:
        words: int32 with the codes.
        scale: float32, times 2^100.
        SIGN: shift that brings the sign to bit 31.
        SIZE: shift that brings the other bits to bits 24 to 22.
    """
    bits = ((words << SIGN) & -2147483648) | ((words << SIZE) & 0x01C00000)
    return (bits.to(tl.float32, bitcast=True) * scale[:, :, None]).to(tl.bfloat16)


@triton.jit
def _tokens(x_ptr, offsets, is_row, k, COLS: tl.constexpr):
    """Columns k of the rows of a tile, (columns, rows)."""
    mask = is_row[:, None] & (k < COLS)[None, :]
    return tl.trans(tl.load(x_ptr + offsets[:, None] + k[None, :], mask=mask, other=0.0))


@triton.jit
def _add_mxfp4(
    acc, q_ptr, scale_ptr, x_ptr, offsets, is_row, n, start,
    OUT: tl.constexpr, COLS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    is_out = (n < OUT)[:, None]
    byte = start // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
    group = start // 32 + tl.arange(0, BLOCK_K // 32)[None, :]
    x = _tokens(x_ptr, offsets, is_row, start + tl.arange(0, BLOCK_K), COLS)
    q_ptrs = q_ptr + n[:, None] * (COLS // 2) + byte
    q = tl.load(q_ptrs, mask=is_out & (byte < COLS // 2), other=0)
    scale_ptrs = scale_ptr + n[:, None] * (COLS // 32) + group
    scale = tl.load(scale_ptrs, mask=is_out & (group < COLS // 32), other=0)
    kind: tl.constexpr = "bf16" if x_ptr.dtype.element_ty == tl.bfloat16 else "fp16"
    # Without a check of each scale for NaN: files with one are refused.
    return tl.dot_scaled(q, scale, "e2m1", x, None, kind, acc, fast_math=True)


@triton.jit
def _add_nvfp4(
    acc, q_ptr, scale_ptr, x_ptr, offsets, is_row, n, start,
    OUT: tl.constexpr, COLS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    group = start // 16 + tl.arange(0, BLOCK_K // 16)
    byte = (group[:, None] * 8 + tl.arange(0, 8)[None, :])[None, :, :]
    is_out = n < OUT
    q_ptrs = q_ptr + n[:, None, None] * (COLS // 2) + byte
    q = tl.load(q_ptrs, mask=is_out[:, None, None] & (byte < COLS // 2), other=0)
    scale_ptrs = scale_ptr + n[:, None] * (COLS // 16) + group[None, :]
    is_group = is_out[:, None] & (group < COLS // 16)[None, :]
    scale = tl.load(scale_ptrs, mask=is_group, other=0.0).to(tl.float32)
    scale *= 1267650600228229401496703205376.0  # 2^100
    words = q.to(tl.int32)
    even = tl.reshape(_e2m1(words, scale, 28, 22), (BLOCK_N, BLOCK_K // 2))
    odd = tl.reshape(_e2m1(words, scale, 24, 18), (BLOCK_N, BLOCK_K // 2))
    column = start + 2 * tl.arange(0, BLOCK_K // 2)
    acc = tl.dot(even, _tokens(x_ptr, offsets, is_row, column, COLS), acc)
    return tl.dot(odd, _tokens(x_ptr + 1, offsets, is_row, column, COLS), acc)


@triton.jit
def _add_q2_k(
    acc, q_ptr, x_ptr, offsets, is_row, n, start,
    OUT: tl.constexpr, COLS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Half a block of 256: 128 columns."""
    is_out = n < OUT
    block_ptrs = q_ptr + n * (COLS // 256 * 84) + start // 256 * 84
    half = start % 256 // 128
    d = _float16_at(block_ptrs + 80, is_out)
    dmin = _float16_at(block_ptrs + 82, is_out)
    byte = tl.arange(0, 32)
    code_ptrs = block_ptrs[:, None] + 16 + 32 * half + byte[None, :]
    codes = tl.load(code_ptrs, mask=is_out[:, None], other=0).to(tl.int32)
    for shift in tl.static_range(4):
        pair_ptrs = block_ptrs[:, None] + 8 * half + 2 * shift + tl.arange(0, 2)[None, :]
        packed = tl.load(pair_ptrs, mask=is_out[:, None], other=0)
        # A code c in the mantissa's first bits is 1 + c / 4, without a conversion of integers.
        scale = 4.0 * d[:, None] * (packed & 15).to(tl.float32)
        low = scale + dmin[:, None] * (packed >> 4).to(tl.float32)
        bits = ((codes << (21 - 2 * shift)) & 0x600000) | 0x3F800000
        code = tl.reshape(bits, (BLOCK_N, 2, 16)).to(tl.float32, bitcast=True)
        w = code * scale[:, :, None] - low[:, :, None]
        w = tl.reshape(w, (BLOCK_N, 32)).to(x_ptr.dtype.element_ty)
        x = _tokens(x_ptr, offsets, is_row, start + 32 * shift + byte, COLS)
        acc = tl.dot(w, x, acc)
    return acc


@triton.jit
def _float16_at(ptrs, mask):
    """Float32 of float16 numbers at any address."""
    low = tl.load(ptrs, mask=mask, other=0).to(tl.uint16)
    high = tl.load(ptrs + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _add_floats(
    acc, w_ptr, scale_ptr, x_ptr, offsets, is_row, n, start,
    OUT: tl.constexpr, COLS: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_FP8: tl.constexpr, FP8_ROWS: tl.constexpr, FP8_COLS: tl.constexpr,
):  # fmt: skip
    """E4M3 with a scale for FP8_COLS columns, which BLOCK_K divides, or floats without."""
    is_out = n < OUT
    k = start + tl.arange(0, BLOCK_K)
    w_mask = is_out[:, None] & (k < COLS)[None, :]
    w = tl.load(w_ptr + n[:, None] * COLS + k[None, :], mask=w_mask, other=0.0)
    x = _tokens(x_ptr, offsets, is_row, k, COLS)
    w = w.to(tl.float32).to(x.dtype)
    if not IS_FP8:
        return tl.dot(w, x, acc)
    columns: tl.constexpr = (COLS + FP8_COLS - 1) // FP8_COLS
    scale_ptrs = scale_ptr + n // FP8_ROWS * columns + start // FP8_COLS
    scale = tl.load(scale_ptrs, mask=is_out, other=0)
    if scale_ptr.dtype.element_ty == tl.uint8:
        scale = e8m0_values(scale)
    return acc + tl.dot(w, x) * scale[:, None]


@triton.jit
def _add_product(
    acc,  # (BLOCK_N, rows) float32
    q_ptr,  # of the expert's matrix
    scale_ptr,
    x_ptr,
    offsets,  # (rows,) of the tokens' first elements
    is_row,  # (rows,)
    n,  # (BLOCK_N,) output rows
    start,  # first column
    OUT: tl.constexpr,
    COLS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8_ROWS: tl.constexpr,
    FP8_COLS: tl.constexpr,
):
    """Add the product of BLOCK_K columns."""
    if FORMAT == 0:
        acc = _add_mxfp4(acc, q_ptr, scale_ptr, x_ptr, offsets, is_row, n, start,
                         OUT, COLS, BLOCK_K)  # fmt: skip
    elif FORMAT == 1:
        acc = _add_nvfp4(acc, q_ptr, scale_ptr, x_ptr, offsets, is_row, n, start,
                         OUT, COLS, BLOCK_N, BLOCK_K)  # fmt: skip
    elif FORMAT == 2:
        acc = _add_q2_k(acc, q_ptr, x_ptr, offsets, is_row, n, start, OUT, COLS, BLOCK_N)
    else:
        acc = _add_floats(acc, q_ptr, scale_ptr, x_ptr, offsets, is_row, n, start,
                          OUT, COLS, BLOCK_K, FORMAT == 3, FP8_ROWS, FP8_COLS)  # fmt: skip
    return acc


@triton.jit
def _raised(acc, total_ptr, expert, FORMAT: tl.constexpr, IS_DIVISOR: tl.constexpr):
    """Sums with the factor of the whole matrix."""
    if FORMAT == 1:
        total = tl.load(total_ptr + expert)
        acc = acc * 67108864.0  # 2^26, which `_e2m1` leaves out
        acc = acc / total if IS_DIVISOR else acc * total
    return acc


@triton.jit
def moe_gate_up_kernel(
    h_ptr,  # (num_pairs, INTER): written
    x_ptr,  # (tokens, HIDDEN), rows x_stride apart
    experts_ptr,
    pairs_ptr,
    weights_ptr,  # (num_pairs,) float32
    gate_ptr, gate_scale_ptr, gate_total_ptr,
    up_ptr, up_scale_ptr, up_total_ptr,
    num_pairs,
    x_stride,
    limit,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    Q_STRIDE: tl.constexpr,  # elements of an expert's matrix
    SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_DIVISOR: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8_ROWS: tl.constexpr,
    FP8_COLS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of gate and up of one tile."""
    wait_for_inputs(IS_DEPENDENT)
    tile = tl.program_id(1)
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    pair = tl.load(pairs_ptr + tile * ROWS + tl.arange(0, ROWS))
    is_row = pair < num_pairs
    offsets = pair // TOPK * x_stride
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    gate_ptr += expert * Q_STRIDE
    up_ptr += expert * Q_STRIDE
    gate_scale_ptr += expert * SCALE_STRIDE
    up_scale_ptr += expert * SCALE_STRIDE
    for start in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        gate = _add_product(gate, gate_ptr, gate_scale_ptr, x_ptr, offsets, is_row, n, start,
                            INTER, HIDDEN, FORMAT, BLOCK_N, BLOCK_K,
                            FP8_ROWS, FP8_COLS)  # fmt: skip
        up = _add_product(up, up_ptr, up_scale_ptr, x_ptr, offsets, is_row, n, start,
                          INTER, HIDDEN, FORMAT, BLOCK_N, BLOCK_K, FP8_ROWS, FP8_COLS)  # fmt: skip
    gate = _raised(gate, gate_total_ptr, expert, FORMAT, IS_DIVISOR)
    up = _raised(up, up_total_ptr, expert, FORMAT, IS_DIVISOR)
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
    weight = tl.load(weights_ptr + pair, mask=is_row, other=0.0)
    h = gate * tl.sigmoid(gate) * up * weight[None, :]
    place = pair[None, :] * INTER + n[:, None]
    tl.store(
        h_ptr + place, h.to(h_ptr.dtype.element_ty), mask=is_row[None, :] & (n < INTER)[:, None]
    )


@triton.jit
def moe_down_kernel(
    y_ptr,  # (num_pairs, HIDDEN) float32: written
    h_ptr,  # (num_pairs, INTER)
    experts_ptr,
    pairs_ptr,
    q_ptr, scale_ptr, total_ptr,
    num_pairs,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_DIVISOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8_ROWS: tl.constexpr,
    FP8_COLS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of down of one tile."""
    wait_for_inputs(IS_DEPENDENT)
    tile = tl.program_id(1)
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    pair = tl.load(pairs_ptr + tile * ROWS + tl.arange(0, ROWS))
    is_row = pair < num_pairs
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    q_ptr += expert * Q_STRIDE
    scale_ptr += expert * SCALE_STRIDE
    for start in tl.range(0, INTER, BLOCK_K, num_stages=STAGES):
        acc = _add_product(acc, q_ptr, scale_ptr, h_ptr, pair * INTER, is_row, n, start,
                           HIDDEN, INTER, FORMAT, BLOCK_N, BLOCK_K, FP8_ROWS, FP8_COLS)  # fmt: skip
    acc = _raised(acc, total_ptr, expert, FORMAT, IS_DIVISOR)
    place = pair[None, :] * HIDDEN + n[:, None]
    tl.store(y_ptr + place, acc, mask=is_row[None, :] & (n < HIDDEN)[:, None])


@triton.jit
def moe_sum_kernel(
    out_ptr,  # (tokens, HIDDEN): written
    y_ptr,  # (tokens * TOPK, HIDDEN) float32
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Add a token's slots in their order."""
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    total = tl.load(y_ptr + token * TOPK * HIDDEN + column, mask=mask, other=0.0)
    for slot in tl.static_range(1, TOPK):
        total += tl.load(y_ptr + (token * TOPK + slot) * HIDDEN + column, mask=mask, other=0.0)
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a product is cut: output rows and columns of a step, warps, stages."""

    n: int
    k: int
    warps: int
    stages: int


# The fastest of 16 (Q2_K: 8) cuts on an H200 at Flash's shapes, by rows of a tile; for few rows the
# best compromise of 1, 8 and 64 tokens.
_FEW: Final = {"MXFP4": Blocks(32, 256, 2, 3), "NVFP4": Blocks(32, 128, 2, 3)}
_MANY: Final = {"MXFP4": Blocks(128, 64, 4, 3)}
_OTHER: Final = Blocks(64, 128, 4, 3)


def select_blocks(kind: str, rows: int) -> Blocks:
    """The cut of products for tiles of `rows` rows. Pure."""
    return (_FEW if rows <= 16 else _MANY).get(kind, _OTHER)


def launch_moe_tiles(experts: Tensor, pairs: Tensor, ids: Tensor, first: Tensor) -> None:
    """Enqueue the sort; the op has checked and allocated.

    Args:
        experts: (tiles,) int64, written.
        pairs: (tiles, rows) int64, written.
        ids: (num_pairs,) int64, up to `MAX_SORTED`, contiguous.
        first: (experts of the stack,) int32 scratch.
    """
    num_pairs = ids.shape[0]
    key = (first.shape[0], pairs.shape[1], max(16, triton.next_power_of_2(num_pairs)))
    _tiles(*key)((1, 1, 1), (experts, pairs, ids, first), (num_pairs, pairs.shape[0]))


@functools.cache
def _tiles(num_experts: int, rows: int, pairs: int) -> TritonLaunch:
    constants = {
        "NUM_EXPERTS": num_experts,
        "ROWS": rows,
        "PAIRS": pairs,
        "EXPERTS": max(16, triton.next_power_of_2(num_experts)),
        "CHUNK": _SORT_CHUNK,
    }
    return TritonLaunch(moe_tiles_kernel, 8, constants)


def launch_moe_experts(
    out: Tensor,
    x: Tensor,
    tiles: tuple[Tensor, Tensor],
    weights: Tensor,
    stacks: Sequence[StackPlanes],
    limit: float | None,
    workspace: tuple[Tensor, Tensor],
    blocks: Blocks | None = None,
) -> None:
    """Enqueue the products; the op has checked and allocated.

    Args:
        out: (T, hidden) float, written.
        x: (T, hidden) bfloat16 or float16 with unit inner stride.
        tiles: experts (tiles,) and pairs (tiles, rows) int64.
        weights: (T, topk) float32, contiguous.
        stacks: w1, w3 and w2, the first two of one kind.
        limit: of the clamped SwiGLU; None for no clamp.
        workspace: (T * topk, inter) in the dtype of x, and (T * topk, hidden) float32.
        blocks: for tests and sweeps; None: `select_blocks`.
    """
    gate, up, down = stacks
    experts, pairs = tiles
    h, y = workspace
    num_tiles, rows = pairs.shape
    topk, hidden, inter = weights.shape[1], x.shape[1], h.shape[1]
    first = blocks or select_blocks(gate.kind, rows)
    _gate_up(topk, hidden, inter, rows, _key(gate), limit is not None, first)(
        (-(-inter // first.n), num_tiles, 1),
        (h, x, experts, pairs, weights, *gate.tensors, *up.tensors),
        (h.shape[0], x.stride(0), 0.0 if limit is None else float(limit)),
    )
    second = blocks or select_blocks(down.kind, rows)
    _down(hidden, inter, rows, _key(down), second)(
        (-(-hidden // second.n), num_tiles, 1),
        (y, h, experts, pairs, *down.tensors),
        (h.shape[0],),
    )
    _sum(topk, hidden)((out.shape[0], -(-hidden // _SUM_BLOCK), 1), (out, y))


_Key = tuple[str, bool, tuple[int, int], tuple[int, int]]


def _key(stack: StackPlanes) -> _Key:
    return stack.kind, stack.is_divisor, stack.strides, stack.block


def _format(key: _Key) -> dict[str, object]:
    kind, is_divisor, (q_stride, scale_stride), _ = key
    return {
        "Q_STRIDE": q_stride,
        "SCALE_STRIDE": scale_stride,
        "FORMAT": FORMATS[kind],
        "IS_DIVISOR": is_divisor,
    }


def _cut(rows: int, blocks: Blocks, key: _Key) -> dict[str, object]:
    return {
        "ROWS": rows,
        "BLOCK_N": blocks.n,
        "BLOCK_K": blocks.k,
        "FP8_ROWS": key[3][0],
        "FP8_COLS": key[3][1],
        "STAGES": blocks.stages,
    }


@functools.cache
def _gate_up(
    topk: int, hidden: int, inter: int, rows: int, key: _Key, has_limit: bool, blocks: Blocks
) -> TritonLaunch:
    constants = {"TOPK": topk, "HIDDEN": hidden, "INTER": inter, **_format(key)}
    constants |= {"HAS_LIMIT": has_limit, **_cut(rows, blocks, key)}
    return TritonLaunch(moe_gate_up_kernel, blocks.warps, constants)


@functools.cache
def _down(hidden: int, inter: int, rows: int, key: _Key, blocks: Blocks) -> TritonLaunch:
    constants = {"HIDDEN": hidden, "INTER": inter, **_format(key), **_cut(rows, blocks, key)}
    return TritonLaunch(moe_down_kernel, blocks.warps, constants)


@functools.cache
def _sum(topk: int, hidden: int) -> TritonLaunch:
    constants = {"TOPK": topk, "HIDDEN": hidden, "BLOCK": _SUM_BLOCK}
    return TritonLaunch(moe_sum_kernel, 4, constants)
