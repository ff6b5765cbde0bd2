"""Manifold-constrained hyper-connections (mHC): mixes of DeepSeek-V4's residual streams.

Floor: `pre` reads the streams and fn once and writes x; `post` reads the streams and y and writes
the streams; a step is the post of one block and the product of the next in one pass. A product is
split over columns of fn in pieces that depend on the shape alone, and summed in a fixed order, so a
token's bits do not depend on the others (few tokens), and a second launch forms the coefficients,
the sum over streams and the block's norm.
"""

import functools

import torch
import triton
import triton.language as tl

from tiercel.kernels.fused.mhc_mix_finish import finish_refusal, launch_mhc_mix_finish
from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs

FEW_TOKENS = 16  # up to here one program reads a piece of fn for a few tokens, without tensor cores
TOKENS = 4  # of such a program; one for a single token
FEW_PIECE, MANY_PIECE = 128, 1024  # columns of a stream that a program multiplies
# Channels of all streams that a program of a step has, for one token. 1, 8 and 16 tokens of 4,096
# channels: 6.2, 8.8 and 11.5 us; 32 channels and 4 tokens 6.8, 13.4 and 15.6 (H200, printed).
STEP_PIECE = 128
TILE_TOKENS, TILE_COLUMNS = 64, 64  # of a tensor core product
# Of a step of more: tokens and channels of a program, its columns in a turn, turns in flight. 64
# tokens of 4,096 channels take 17.7 us, 35.2 in three passes; 4,096 tokens take 448 us with the
# fastest of seven tiles, 205 in three passes (H200, printed).
SOME_TOKENS = 64
STEP_TOKENS, STEP_COLUMNS, STEP_STAGES = 16, 32, 2
COMB_TOKENS = 16  # whose coefficients a program forms, if they are many
POST_BLOCK = 1024  # channels that a program writes back
MAX_HIDDEN = 8192  # a token's streams in the registers of 16 warps


@triton.jit(do_not_specialize=["num_tokens"])
def few_products_kernel(
    streams_ptr,  # (num_tokens, N, HIDDEN), inner stride 1
    fn_ptr,  # (ROWS, N * HIDDEN) float32
    out_ptr,  # (num_tokens, N * PIECES, COLUMNS) float32: products, then the sum of squares
    num_tokens,
    TOKEN_STRIDE: tl.constexpr,
    STREAM_STRIDE: tl.constexpr,
    N: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two above ROWS
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,  # of a stream
    TOKENS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One piece of fn times some tokens."""
    piece = tl.program_id(0)
    stream, part = piece // PIECES, piece % PIECES
    column = part * PIECE + tl.arange(0, PIECE)
    row = tl.arange(0, COLUMNS)
    mask = column < HIDDEN
    places = row[:, None] * (N * HIDDEN) + stream * HIDDEN + column[None, :]
    fn = tl.load(fn_ptr + places, mask=(row[:, None] < ROWS) & mask[None, :], other=0.0)
    wait_for_inputs(IS_DEPENDENT)
    for turn in tl.static_range(TOKENS):
        token = tl.program_id(1) * TOKENS + turn
        place = token.to(tl.int64) * TOKEN_STRIDE + stream * STREAM_STRIDE + column
        known = tl.where(token < num_tokens, HIDDEN, 0)
        u = tl.load(streams_ptr + place, mask=column < known, other=0.0).to(tl.float32)
        product = tl.sum(fn * u[None, :], axis=1)
        product = tl.where(row == ROWS, tl.sum(u * u, axis=0), product)
        out = out_ptr + (token.to(tl.int64) * (N * PIECES) + piece) * COLUMNS + row
        tl.store(out, product, mask=row < tl.where(token < num_tokens, ROWS + 1, 0))


@triton.jit
def step_kernel(
    streams_ptr,  # (num_tokens, N, HIDDEN), inner stride 1
    y_ptr,  # (num_tokens, HIDDEN), inner stride 1
    post_ptr,  # (num_tokens, N) float32, contiguous
    comb_ptr,  # (num_tokens, N, N) float32, contiguous
    fn_ptr,  # (ROWS, N * HIDDEN) float32
    out_ptr,  # (num_tokens, N, HIDDEN) contiguous
    parts_ptr,  # (num_tokens, PIECES, COLUMNS) float32: products, then the sum of squares
    TOKEN_STRIDE: tl.constexpr,
    STREAM_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    N: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two above ROWS
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """PIECE channels of all streams of a token: written back, and multiplied by fn."""
    piece = tl.program_id(0)
    channel = piece * PIECE + tl.arange(0, PIECE)
    stream = tl.arange(0, N)
    row = tl.arange(0, COLUMNS)
    mask = channel < HIDDEN
    places = row[:, None, None] * (N * HIDDEN) + stream[None, :, None] * HIDDEN
    is_known = (row[:, None, None] < ROWS) & mask[None, None, :]
    fn = tl.load(fn_ptr + places + channel[None, None, :], mask=is_known, other=0.0)
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(1).to(tl.int64)
    at = token * TOKEN_STRIDE + stream[:, None] * STREAM_STRIDE + channel[None, :]
    u = tl.load(streams_ptr + at, mask=mask[None, :], other=0.0).to(tl.float32)
    y = tl.load(y_ptr + token * Y_STRIDE + channel, mask=mask, other=0.0).to(tl.float32)
    post = tl.load(post_ptr + token * N + stream)
    comb = tl.load(comb_ptr + token * (N * N) + stream[:, None] * N + stream[None, :])
    new = tl.sum(comb[:, :, None] * u[:, None, :], axis=0) + post[:, None] * y[None, :]
    rounded = new.to(out_ptr.dtype.element_ty)
    out = out_ptr + (token * N + stream[:, None]) * HIDDEN + channel[None, :]
    tl.store(out, rounded, mask=mask[None, :])
    new = rounded.to(tl.float32)
    product = tl.sum(tl.sum(fn * new[None, :, :], axis=2), axis=1)
    square = tl.sum(tl.sum(new * new, axis=1), axis=0)
    parts = parts_ptr + (token * PIECES + piece) * COLUMNS + row
    tl.store(parts, tl.where(row == ROWS, square, product), mask=row <= ROWS)


@triton.jit
def in_three(x):
    """Three bfloat16 whose sum is a float32, but for its last bits."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit(do_not_specialize=["num_tokens"])
def many_products_kernel(
    streams_ptr,  # (num_tokens, N, HIDDEN) bfloat16, inner stride 1
    fn_ptr,  # (ROWS, N * HIDDEN) float32
    out_ptr,  # (num_tokens, N * PIECES, COLUMNS) float32: products, then the sum of squares
    num_tokens,
    TOKEN_STRIDE: tl.constexpr,
    STREAM_STRIDE: tl.constexpr,
    N: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two above ROWS, >= 16
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,  # of a stream
    TILE_TOKENS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    OPERAND: tl.constexpr,  # type of the products; the interpreter multiplies no bfloat16
    IS_DEPENDENT: tl.constexpr,
):
    """One piece of fn times a tile of tokens, in three bfloat16 products: float32 in effect."""
    piece = tl.program_id(0)
    stream, part = piece // PIECES, piece % PIECES
    token = tl.program_id(1) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    row = tl.arange(0, COLUMNS)
    is_token = token < num_tokens
    wait_for_inputs(IS_DEPENDENT)
    streams = streams_ptr + (token.to(tl.int64) * TOKEN_STRIDE + stream * STREAM_STRIDE)[:, None]
    weights = fn_ptr + row[:, None] * (N * HIDDEN) + stream * HIDDEN
    # The small parts have sums of their own: tensor cores cut a sum's last bits at each step.
    sums = tl.zeros((TILE_TOKENS, COLUMNS), tl.float32)
    small = tl.zeros((TILE_TOKENS, COLUMNS), tl.float32)
    squares = tl.zeros((TILE_TOKENS,), tl.float32)
    for start in range(0, PIECE, TILE_COLUMNS):
        column = part * PIECE + start + tl.arange(0, TILE_COLUMNS)
        mask = column < HIDDEN
        u = tl.load(streams + column[None, :], mask=is_token[:, None] & mask[None, :], other=0.0)
        fn = tl.load(
            weights + column[None, :], mask=(row[:, None] < ROWS) & mask[None, :], other=0.0
        )
        high, middle, low = in_three(fn)
        sums = tl.dot(u.to(OPERAND), tl.trans(high).to(OPERAND), sums)
        small = tl.dot(u.to(OPERAND), tl.trans(middle).to(OPERAND), small)
        small = tl.dot(u.to(OPERAND), tl.trans(low).to(OPERAND), small)
        wide = u.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
    sums += small
    sums = tl.where(row[None, :] == ROWS, squares[:, None], sums)
    out = (token.to(tl.int64) * (N * PIECES) + piece)[:, None] * COLUMNS + row[None, :]
    tl.store(out_ptr + out, sums, mask=is_token[:, None] & (row[None, :] <= ROWS))


@triton.jit
def way_back(post_ptr, comb_ptr, token, is_token, STREAM: tl.constexpr):
    """Weights of y and of the four old streams in a new one, for some tokens."""
    comb = comb_ptr + token * 16 + STREAM
    post = tl.load(post_ptr + token * 4 + STREAM, mask=is_token, other=0.0)
    c0 = tl.load(comb, mask=is_token, other=0.0)
    c1 = tl.load(comb + 4, mask=is_token, other=0.0)
    c2 = tl.load(comb + 8, mask=is_token, other=0.0)
    c3 = tl.load(comb + 12, mask=is_token, other=0.0)
    return post[:, None], c0[:, None], c1[:, None], c2[:, None], c3[:, None]


@triton.jit
def step_stream(
    weights,  # of `way_back`
    y,
    streams,  # the four old ones
    out_ptr,  # of the first channels
    fn_ptr,
    totals,  # products, their small parts, squares
    place,
    row,
    column,
    mask,
    STREAM: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Write some channels of a new stream of some tokens; the totals with their products."""
    new = weights[0] * y + weights[1] * streams[0] + weights[2] * streams[1]
    new += weights[3] * streams[2] + weights[4] * streams[3]
    rounded = new.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place + STREAM * HIDDEN, rounded, mask=mask)
    wide = rounded.to(tl.float32)
    fn_places = row[:, None] * (4 * HIDDEN) + STREAM * HIDDEN + column[None, :]
    is_known = (row[:, None] < ROWS) & (column < HIDDEN)[None, :]
    high, middle, low = in_three(tl.load(fn_ptr + fn_places, mask=is_known, other=0.0))
    operand = rounded.to(OPERAND)
    sums = tl.dot(operand, tl.trans(high).to(OPERAND), totals[0])
    small = tl.dot(operand, tl.trans(middle).to(OPERAND), totals[1])
    small = tl.dot(operand, tl.trans(low).to(OPERAND), small)
    return sums, small, totals[2] + tl.sum(wide * wide, axis=1)


@triton.jit(do_not_specialize=["num_tokens"])
def many_step_kernel(
    streams_ptr,  # (num_tokens, 4, HIDDEN) bfloat16, inner stride 1
    y_ptr,  # (num_tokens, HIDDEN), inner stride 1
    post_ptr,  # (num_tokens, 4) float32, contiguous
    comb_ptr,  # (num_tokens, 4, 4) float32, contiguous
    fn_ptr,  # (ROWS, 4 * HIDDEN) float32
    out_ptr,  # (num_tokens, 4, HIDDEN) bfloat16 contiguous
    parts_ptr,  # (num_tokens, PIECES, COLUMNS) float32: products, then the sum of squares
    num_tokens,
    TOKEN_STRIDE: tl.constexpr,
    STREAM_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two above ROWS, >= 16
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    OPERAND: tl.constexpr,  # type of the products; the interpreter multiplies no bfloat16
    IS_DEPENDENT: tl.constexpr,
):
    """PIECE channels of four streams of a tile of tokens: written back, and multiplied by fn."""
    wait_for_inputs(IS_DEPENDENT)
    token = (tl.program_id(1) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)).to(tl.int64)
    row = tl.arange(0, COLUMNS)
    is_token = token < num_tokens
    # Before the loop: its pipeline would hold copies of them.
    w0 = way_back(post_ptr, comb_ptr, token, is_token, 0)
    w1 = way_back(post_ptr, comb_ptr, token, is_token, 1)
    w2 = way_back(post_ptr, comb_ptr, token, is_token, 2)
    w3 = way_back(post_ptr, comb_ptr, token, is_token, 3)
    sums = tl.zeros((TILE_TOKENS, COLUMNS), tl.float32)
    small = tl.zeros((TILE_TOKENS, COLUMNS), tl.float32)  # as in `many_products_kernel`
    squares = tl.zeros((TILE_TOKENS,), tl.float32)
    for start in tl.range(0, PIECE, TILE_COLUMNS, num_stages=STAGES):
        column = tl.program_id(0) * PIECE + start + tl.arange(0, TILE_COLUMNS)
        mask = is_token[:, None] & (column < HIDDEN)[None, :]
        streams = streams_ptr + (token * TOKEN_STRIDE)[:, None] + column[None, :]
        u0 = tl.load(streams, mask=mask, other=0.0).to(tl.float32)
        u1 = tl.load(streams + STREAM_STRIDE, mask=mask, other=0.0).to(tl.float32)
        u2 = tl.load(streams + 2 * STREAM_STRIDE, mask=mask, other=0.0).to(tl.float32)
        u3 = tl.load(streams + 3 * STREAM_STRIDE, mask=mask, other=0.0).to(tl.float32)
        y = y_ptr + (token * Y_STRIDE)[:, None] + column[None, :]
        y = tl.load(y, mask=mask, other=0.0).to(tl.float32)
        old = (u0, u1, u2, u3)
        place = (token * (4 * HIDDEN))[:, None] + column[None, :]
        totals = (sums, small, squares)
        totals = step_stream(
            w0, y, old, out_ptr, fn_ptr, totals, place, row, column, mask, 0, HIDDEN, ROWS, OPERAND
        )
        totals = step_stream(
            w1, y, old, out_ptr, fn_ptr, totals, place, row, column, mask, 1, HIDDEN, ROWS, OPERAND
        )
        totals = step_stream(
            w2, y, old, out_ptr, fn_ptr, totals, place, row, column, mask, 2, HIDDEN, ROWS, OPERAND
        )
        totals = step_stream(
            w3, y, old, out_ptr, fn_ptr, totals, place, row, column, mask, 3, HIDDEN, ROWS, OPERAND
        )
        sums, small, squares = totals
    sums += small
    sums = tl.where(row[None, :] == ROWS, squares[:, None], sums)
    parts = parts_ptr + ((token * PIECES + tl.program_id(0)) * COLUMNS)[:, None] + row[None, :]
    tl.store(parts, sums, mask=is_token[:, None] & (row[None, :] <= ROWS))


@triton.jit
def inverse_rms(parts_ptr, token, split, SPLITS, COLUMNS, ROWS, SIZE, eps):
    """1 / rms of the streams of some tokens, from the sums of squares of all pieces."""
    place = (token.to(tl.int64) * SPLITS)[:, None] + split[None, :]
    parts = tl.load(parts_ptr + place * COLUMNS + ROWS, mask=split[None, :] < SPLITS, other=0.0)
    return 1.0 / tl.sqrt(tl.sum(parts, axis=1) / SIZE + eps)


@triton.jit
def products(parts_ptr, token, split, first, SPLITS, COLUMNS, COUNT: tl.constexpr):
    """COUNT products of some tokens from `first` on, summed over all pieces: (tokens, COUNT)."""
    place = (token.to(tl.int64) * SPLITS)[:, None] + split[None, :]
    column = first + tl.arange(0, COUNT)
    places = place[:, :, None] * COLUMNS + column[None, None, :]
    parts = tl.load(parts_ptr + places, mask=split[None, :, None] < SPLITS, other=0.0)
    return tl.sum(parts, axis=1)


@triton.jit
def sinkhorn(logits, eps, ITERS: tl.constexpr):
    """Row softmax of (tokens, N, N), then columns and rows in turn; the last step is on columns."""
    comb = tl.exp(logits - tl.max(logits, axis=2, keep_dims=True))
    comb = comb / tl.sum(comb, axis=2, keep_dims=True) + eps
    comb = comb * (1.0 / (tl.sum(comb, axis=1, keep_dims=True) + eps))
    for _ in range(ITERS - 1):
        comb = comb * (1.0 / (tl.sum(comb, axis=2, keep_dims=True) + eps))
        comb = comb * (1.0 / (tl.sum(comb, axis=1, keep_dims=True) + eps))
    return comb


@triton.jit(do_not_specialize=["num_tokens", "rms_eps", "hc_eps", "norm_eps"])
def finish_kernel(
    streams_ptr,  # (num_tokens, N, HIDDEN), inner stride 1
    parts_ptr,  # (num_tokens, SPLITS, COLUMNS) float32
    scale_ptr,  # float32
    base_ptr,  # (ROWS,) float32
    norm_ptr,  # (HIDDEN,) float32, or None for no norm
    x_ptr,  # (num_tokens, HIDDEN) contiguous
    post_ptr,  # (num_tokens, N) float32, or None: pre alone
    comb_ptr,  # (num_tokens, N, N) float32, or None
    num_tokens,
    rms_eps,
    hc_eps,
    norm_eps,
    TOKEN_STRIDE: tl.constexpr,
    STREAM_STRIDE: tl.constexpr,
    N: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two >= HIDDEN
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,  # a power of two >= SPLITS
    ITERS: tl.constexpr,
    COMB_TOKENS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """The first num_tokens programs sum a token's streams, the others form coefficients."""
    channel = tl.arange(0, BLOCK)
    mask = channel < HIDDEN
    if norm_ptr is not None:  # from cold memory, so before the wait
        weight = tl.load(norm_ptr + channel, mask=mask, other=0.0)
    wait_for_inputs(IS_DEPENDENT)
    program = tl.program_id(0)
    split = tl.arange(0, MOST_SPLITS)
    stream = tl.arange(0, N)
    if program < num_tokens:
        start = streams_ptr + program.to(tl.int64) * TOKEN_STRIDE
        places = start + stream[:, None] * STREAM_STRIDE + channel[None, :]
        u = tl.load(places, mask=mask[None, :], other=0.0)
        parts = parts_ptr + (program.to(tl.int64) * SPLITS + split) * COLUMNS
        squares = tl.sum(tl.load(parts + ROWS, mask=split < SPLITS, other=0.0), axis=0)
        inverse = 1.0 / tl.sqrt(squares / (N * HIDDEN) + rms_eps)
        pieces = tl.load(parts[None, :] + stream[:, None], mask=split[None, :] < SPLITS, other=0.0)
        mixed = tl.sum(pieces, axis=1) * inverse
        pre = tl.sigmoid(mixed * tl.load(scale_ptr) + tl.load(base_ptr + stream)) + hc_eps
        x = tl.sum(pre[:, None] * u.to(tl.float32), axis=0)
        if norm_ptr is not None:
            x = x / tl.sqrt(tl.sum(x * x, axis=0) / HIDDEN + norm_eps) * weight
        out = x_ptr + program.to(tl.int64) * HIDDEN + channel
        tl.store(out, x.to(x_ptr.dtype.element_ty), mask=mask)
    elif post_ptr is not None:
        tokens = (program - num_tokens) * COMB_TOKENS + tl.arange(0, COMB_TOKENS)
        is_token = tokens < num_tokens
        known = tl.minimum(tokens, num_tokens - 1)
        inverses = inverse_rms(parts_ptr, known, split, SPLITS, COLUMNS, ROWS, N * HIDDEN, rms_eps)
        sums = products(parts_ptr, known, split, N, SPLITS, COLUMNS, N) * inverses[:, None]
        bases = tl.load(base_ptr + N + stream)
        post = 2 * tl.sigmoid(sums * tl.load(scale_ptr + 1) + bases[None, :])
        at = tokens.to(tl.int64)[:, None] * N + stream[None, :]
        tl.store(post_ptr + at, post, mask=is_token[:, None])
        cell = tl.arange(0, N * N)
        cells = products(parts_ptr, known, split, 2 * N, SPLITS, COLUMNS, N * N)
        logits = cells * inverses[:, None] * tl.load(scale_ptr + 2)
        logits += tl.load(base_ptr + 2 * N + cell)[None, :]
        comb = sinkhorn(tl.reshape(logits, (COMB_TOKENS, N, N)), hc_eps, ITERS)
        comb = tl.reshape(comb, (COMB_TOKENS, N * N))
        places_of_cells = tokens.to(tl.int64)[:, None] * (N * N) + cell[None, :]
        tl.store(comb_ptr + places_of_cells, comb, mask=is_token[:, None])


@triton.jit
def post_kernel(
    streams_ptr,  # (tokens, N, HIDDEN), inner stride 1
    y_ptr,  # (tokens, HIDDEN), inner stride 1
    post_ptr,  # (tokens, N) float32, contiguous
    comb_ptr,  # (tokens, N, N) float32, contiguous
    out_ptr,  # (tokens, N, HIDDEN) contiguous
    TOKEN_STRIDE: tl.constexpr,
    STREAM_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    N: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BLOCK channels of all streams of a token."""
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, N)
    mask = channel < HIDDEN
    places = token * TOKEN_STRIDE + stream[:, None] * STREAM_STRIDE + channel[None, :]
    u = tl.load(streams_ptr + places, mask=mask[None, :], other=0.0).to(tl.float32)
    y = tl.load(y_ptr + token * Y_STRIDE + channel, mask=mask, other=0.0).to(tl.float32)
    for new in tl.static_range(N):
        comb = tl.load(comb_ptr + token * (N * N) + stream * N + new)
        x = tl.sum(comb[:, None] * u, axis=0) + tl.load(post_ptr + token * N + new) * y
        out = out_ptr + (token * N + new) * HIDDEN + channel
        tl.store(out, x.to(out_ptr.dtype.element_ty), mask=mask)


def select_pieces(num_tokens: int, num_streams: int, hidden: int) -> tuple[int, int]:
    """Columns of a piece of fn and pieces of all streams. Pure: readable by a test."""
    piece = FEW_PIECE if num_tokens <= FEW_TOKENS else MANY_PIECE
    return piece, num_streams * -(-hidden // piece)


def parts_shape(num_tokens: int, num_streams: int, hidden: int, rows: int) -> tuple[int, int, int]:
    """Shape of the workspace of `launch_mhc_mix`, float32."""
    splits = select_pieces(num_tokens, num_streams, hidden)[1]
    return num_tokens, splits, max(16, triton.next_power_of_2(rows + 1))


@functools.cache
def _product(
    tokens: int, strides: tuple[int, int], sizes: tuple[int, int, int], columns: int,
    operand: object,
) -> TritonLaunch:  # fmt: skip
    num_streams, hidden, rows = sizes
    is_few = tokens <= TOKENS
    piece = FEW_PIECE if is_few else MANY_PIECE
    constants = {
        "TOKEN_STRIDE": strides[0],
        "STREAM_STRIDE": strides[1],
        "N": num_streams,
        "HIDDEN": hidden,
        "ROWS": rows,
        "COLUMNS": columns,
        "PIECE": piece,
        "PIECES": -(-hidden // piece),
    }
    if is_few:
        return TritonLaunch(few_products_kernel, 4, constants | {"TOKENS": tokens})
    tile = {"TILE_TOKENS": tokens, "TILE_COLUMNS": TILE_COLUMNS, "OPERAND": operand}
    return TritonLaunch(many_products_kernel, 4, constants | tile)


@functools.cache
def _finish(
    strides: tuple[int, int], sizes: tuple[int, int, int], columns: int, splits: int, iters: int,
    comb_tokens: int,
) -> TritonLaunch:  # fmt: skip
    num_streams, hidden, rows = sizes
    block = max(16, triton.next_power_of_2(hidden))
    constants = {
        "TOKEN_STRIDE": strides[0],
        "STREAM_STRIDE": strides[1],
        "N": num_streams,
        "HIDDEN": hidden,
        "BLOCK": block,
        "ROWS": rows,
        "COLUMNS": columns,
        "SPLITS": splits,
        "MOST_SPLITS": triton.next_power_of_2(splits),
        "ITERS": iters,
        "COMB_TOKENS": comb_tokens,
    }
    return TritonLaunch(finish_kernel, 16 if block > 4096 else 8, constants)


def launch_mhc_mix(
    streams: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    parts: torch.Tensor,
    x: torch.Tensor,
    coefficients: tuple[torch.Tensor, torch.Tensor] | None,
    norm: torch.Tensor | None,
    eps: tuple[float, float, float],
    iters: int,
) -> None:
    """Enqueue two kernels on the current stream; the op has checked and allocated.

    weights: fn, scale, base. parts: see `parts_shape`. coefficients: post and comb, None to
    collapse. eps: of the root mean square, of the coefficients, of the norm.
    """
    num_tokens, num_streams, hidden = streams.shape
    if num_tokens == 0:
        return
    fn = weights[0]
    strides = (streams.stride(0), streams.stride(1))
    sizes = (num_streams, hidden, fn.shape[0])
    splits, columns = parts.shape[1:]
    is_few = num_tokens <= FEW_TOKENS
    tokens = TILE_TOKENS if not is_few else TOKENS if num_tokens > 1 else 1
    grid = (splits, -(-num_tokens // tokens), 1)
    operand = tl.bfloat16 if streams.is_cuda else tl.float32
    product = _product(tokens, strides, sizes, columns, operand)
    product(grid, (streams, fn, parts), (num_tokens,))
    _launch_finish(streams, weights, parts, x, coefficients, norm, eps, iters)


def _launch_finish(
    streams: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    parts: torch.Tensor,
    x: torch.Tensor,
    coefficients: tuple[torch.Tensor, torch.Tensor] | None,
    norm: torch.Tensor | None,
    eps: tuple[float, float, float],
    iters: int,
) -> None:
    is_whole = coefficients is not None and streams.is_cuda
    # 4,096 tokens take 209 us with it, 205 without (post, products and end; H200, printed).
    if is_whole and streams.shape[0] <= SOME_TOKENS and not finish_refusal(streams, x):
        assert coefficients is not None
        launch_mhc_mix_finish(streams, parts, weights[1:], x, coefficients, norm, eps, iters)
        return
    num_tokens, num_streams, hidden = streams.shape
    splits, columns = parts.shape[1:]
    comb_tokens = 1 if num_tokens <= FEW_TOKENS else COMB_TOKENS
    others = 0 if coefficients is None else -(-num_tokens // comb_tokens)
    post, comb = coefficients or (None, None)
    strides = (streams.stride(0), streams.stride(1))
    sizes = (num_streams, hidden, weights[0].shape[0])
    finish = _finish(strides, sizes, columns, splits, iters, comb_tokens)
    tensors = (streams, parts, *weights[1:], norm, x, post, comb)
    finish((num_tokens + others, 1, 1), tensors, (num_tokens, *eps))


def step_parts_shape(num_tokens: int, num_streams: int, hidden: int) -> tuple[int, int, int]:
    """Shape of the workspace of `launch_mhc_mix_step`, float32."""
    columns = triton.next_power_of_2(num_streams * (2 + num_streams) + 1)
    return num_tokens, -(-hidden // STEP_PIECE), max(16, columns)


@functools.cache
def _many_step(
    strides: tuple[int, int, int], sizes: tuple[int, int], columns: int, operand: object
) -> TritonLaunch:
    hidden, rows = sizes
    constants = {
        "TOKEN_STRIDE": strides[0],
        "STREAM_STRIDE": strides[1],
        "Y_STRIDE": strides[2],
        "HIDDEN": hidden,
        "ROWS": rows,
        "COLUMNS": columns,
        "PIECE": STEP_PIECE,
        "PIECES": -(-hidden // STEP_PIECE),
        "TILE_TOKENS": STEP_TOKENS,
        "TILE_COLUMNS": STEP_COLUMNS,
        "STAGES": STEP_STAGES,
        "OPERAND": operand,
    }
    return TritonLaunch(many_step_kernel, 4, constants)


@functools.cache
def _step(
    strides: tuple[int, int, int], sizes: tuple[int, int, int], columns: int, pieces: int
) -> TritonLaunch:
    num_streams, hidden, rows = sizes
    constants = {
        "TOKEN_STRIDE": strides[0],
        "STREAM_STRIDE": strides[1],
        "Y_STRIDE": strides[2],
        "N": num_streams,
        "HIDDEN": hidden,
        "ROWS": rows,
        "COLUMNS": columns,
        "PIECE": STEP_PIECE,
        "PIECES": pieces,
    }
    return TritonLaunch(step_kernel, 4, constants)


def launch_mhc_mix_step(
    before: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    parts: torch.Tensor,
    out: torch.Tensor,
    x: torch.Tensor,
    coefficients: tuple[torch.Tensor, torch.Tensor],
    norm: torch.Tensor | None,
    eps: tuple[float, float, float],
    iters: int,
) -> None:
    """Enqueue two kernels on the current stream; the op has checked and allocated.

    Args:
        before: streams, y, post and comb of `launch_mhc_mix_post`.
        weights: fn, scale and base of the next block.
        parts: see `step_parts_shape`.
        out: (tokens, N, hidden) contiguous, the streams between the blocks.
        x: as for `launch_mhc_mix`, as are the others.
        coefficients: post and comb of the next block.
        norm: of the next block.
        eps: of the root mean square, of the coefficients, of the norm.
        iters: of Sinkhorn.
    """
    streams, y, post, comb = before
    num_tokens, num_streams, hidden = streams.shape
    if num_tokens == 0:
        return
    strides = (streams.stride(0), streams.stride(1), y.stride(0))
    pieces, columns = parts.shape[1:]
    sizes = (num_streams, hidden, weights[0].shape[0])
    tensors = (streams, y, post, comb, weights[0], out, parts)
    if num_tokens <= FEW_TOKENS:
        _step(strides, sizes, columns, pieces)((pieces, num_tokens, 1), tensors)
    else:
        operand = tl.bfloat16 if streams.is_cuda else tl.float32
        step = _many_step(strides, sizes[1:], columns, operand)
        step((pieces, -(-num_tokens // STEP_TOKENS), 1), tensors, (num_tokens,))
    _launch_finish(out, weights, parts, x, coefficients, norm, eps, iters)


@functools.cache
def _post(num_streams: int, hidden: int, strides: tuple[int, int, int]) -> TritonLaunch:
    constants = {
        "TOKEN_STRIDE": strides[0],
        "STREAM_STRIDE": strides[1],
        "Y_STRIDE": strides[2],
        "N": num_streams,
        "HIDDEN": hidden,
        "BLOCK": POST_BLOCK,
    }
    return TritonLaunch(post_kernel, 4, constants)


def launch_mhc_mix_post(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated."""
    num_tokens, num_streams, hidden = streams.shape
    if num_tokens == 0:
        return
    strides = (streams.stride(0), streams.stride(1), y.stride(0))
    grid = (num_tokens, -(-hidden // POST_BLOCK), 1)
    _post(num_streams, hidden, strides)(grid, (streams, y, post, comb, out))
