"""The indexer of DeepSeek-V4: scores of paged entries, then each token's best entries.

Scores go to a float32 workspace, tile by tile: a tile of keys is decoded once for a run of tokens
of one sequence. The choice is exact: the k-th largest score is found bit by bit, ties go to the
lower entry, and the chosen entries are compacted in order. Long rows are reduced to the best
entries of their pieces first, which does not change the choice.

Products are exact in bfloat16, sums float32, where keys are packed or bfloat16; queries of other
types are two bfloat16 numbers each, so that 16 bits of them count. Other keys take three products
of TF32, which keep 22 bits.

Floor: each sequence's keys are read once, 68 bytes an entry, and 2 FLOPs per head, channel, entry.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from tiercel.kernels.block.block_numbers import e8m0_values
from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_N = 128  # entries of a tile of scores; half of them where products are TF32
FEW_TOKENS = 16  # up to here a program has one token
MANY_TOKENS = 16  # of a program otherwise
PIECES = (2048, 8192)  # scores that a program chooses from
MOST_TOPK = PIECES[0]  # so that pieces shrink
_WARPS: Final = {PIECES[0]: 8, PIECES[1]: 16}


@triton.jit
def _load_keys(row_ptr, scale_ptr, is_entry, D: tl.constexpr):
    """Keys of some entries, (N, D) float32."""
    N: tl.constexpr = row_ptr.shape[0]
    if scale_ptr is None:
        key_ptr = row_ptr[:, None] + tl.arange(0, D)[None, :]
        keys = tl.load(key_ptr, mask=is_entry[:, None], other=0.0).to(tl.float32)
    else:
        group = tl.arange(0, D // 32)
        offset = group[:, None] * 16 + tl.arange(0, 16)[None, :]
        byte_ptr = row_ptr[:, None, None] + offset[None, :, :]
        data = tl.load(byte_ptr, mask=is_entry[:, None, None], other=0).to(tl.int32)
        scale = tl.load(scale_ptr[:, None] + group[None, :], mask=is_entry[:, None], other=127)
        codes = tl.reshape(tl.join(data & 15, data >> 4), (N, D // 32, 32))
        # The code's bits as those of a float32, times 2^126.
        bits = ((codes & 7) << 22) | ((codes & 8) << 28)
        values = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
        keys = tl.reshape(values * e8m0_values(scale)[:, :, None], (N, D))
    return keys


# Not specialised: a kernel for each divisibility of a count would be compiled between two steps.
@triton.jit(do_not_specialize=["factor", "num_tokens", "max_entries", "table_stride"])
def indexer_scores_kernel(
    scores_ptr,  # (T, max_entries) float32
    q_ptr,  # (T, H, D) float
    weights_ptr,  # (T, H) float
    keys_ptr,  # (blocks, entries, D) float, or (blocks, entries, D / 2) packed
    scales_ptr,  # (blocks, entries, D / 32) or None
    tables_ptr,  # (sequences, columns)
    seq_ids_ptr,  # (T,)
    visible_ptr,  # (T,)
    factor,
    num_tokens,
    max_entries,
    table_stride,
    Q_STRIDES: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr,
    KEY_STRIDES: tl.constexpr,  # of keys and scales: of blocks and entries
    PER_BLOCK: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # whether q is two numbers of type DOT
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Score one tile of entries for some tokens, run by run of one sequence."""
    wait_for_inputs(IS_DEPENDENT)
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * TOKENS
    end = tl.minimum(begin + TOKENS, num_tokens)
    head = tl.arange(0, BLOCK_H)
    is_head = head < H
    channel = tl.arange(0, D)
    token = begin
    while token < end:
        sequence = tl.load(seq_ids_ptr + token).to(tl.int64)
        member = begin + tl.arange(0, TOKENS)
        others = tl.load(seq_ids_ptr + member, mask=member < end, other=0)
        ends = tl.where((member > token) & (member < end) & (others != sequence), member, end)
        run_end = tl.min(ends, axis=0)
        is_run = (member >= token) & (member < run_end)
        most = tl.max(tl.load(visible_ptr + member, mask=is_run, other=0).to(tl.int32), axis=0)
        most = tl.minimum(most, max_entries)
        if most > tl.program_id(0) * BLOCK_N:
            is_entry = entry < most
            column = entry // PER_BLOCK
            table_ptr = tables_ptr + sequence * table_stride
            block = tl.load(table_ptr + column, mask=is_entry, other=0).to(tl.int64)
            index = entry % PER_BLOCK
            row_ptr = keys_ptr + block * KEY_STRIDES[0] + index * KEY_STRIDES[1]
            scale_ptr = None
            if scales_ptr is not None:
                scale_ptr = scales_ptr + block * KEY_STRIDES[2] + index * KEY_STRIDES[3]
            keys = _load_keys(row_ptr, scale_ptr, is_entry, D).to(DOT)
            for t in tl.range(token, run_end, num_stages=2):
                t64 = tl.full((), 0, tl.int64) + t
                head_ptr = q_ptr + t64 * Q_STRIDES[0] + head[:, None] * Q_STRIDES[1]
                q_tile = head_ptr + channel[None, :] * Q_STRIDES[2]
                q = tl.load(q_tile, mask=is_head[:, None], other=0.0)
                q_high = q.to(DOT)
                dots = tl.dot(keys, tl.trans(q_high), input_precision=PRECISION)
                if IS_SPLIT:
                    q_low = (q.to(tl.float32) - q_high.to(tl.float32)).to(DOT)
                    dots = tl.dot(keys, tl.trans(q_low), dots, input_precision=PRECISION)
                weight_ptr = weights_ptr + t64 * WEIGHT_STRIDES[0] + head * WEIGHT_STRIDES[1]
                weights = tl.load(weight_ptr, mask=is_head, other=0.0).to(tl.float32) * factor
                score = tl.sum(tl.maximum(dots, 0.0) * weights[None, :], axis=1)
                tl.store(scores_ptr + t64 * max_entries + entry, score, mask=is_entry)
        token = run_end


@triton.jit(do_not_specialize=["max_entries", "num_candidates", "out_stride"])
def indexer_select_kernel(
    out_ptr,  # (T, pieces, TOPK) int32
    scores_ptr,  # (T, max_entries) float32
    candidates_ptr,  # (T, num_candidates) int32 ascending with -1 between; None: all entries
    visible_ptr,  # (T,)
    max_entries,
    num_candidates,
    out_stride,  # of tokens
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,  # power of two, no less than TOPK
    IS_DEPENDENT: tl.constexpr,
):
    """Choose the best of one piece of a token's entries, in ascending order, then -1."""
    wait_for_inputs(IS_DEPENDENT)
    piece = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    place = piece * BLOCK + tl.arange(0, BLOCK)
    if candidates_ptr is None:
        seen = tl.minimum(tl.load(visible_ptr + token).to(tl.int32), max_entries)
        is_valid = place < seen
        entry = place
    else:
        candidate_ptr = candidates_ptr + token * num_candidates + place
        entry = tl.load(candidate_ptr, mask=place < num_candidates, other=-1)
        is_valid = entry >= 0
    score = tl.load(scores_ptr + token * max_entries + entry, mask=is_valid, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(is_valid, order, -2147483648)
    count = tl.sum(is_valid.to(tl.int32), axis=0)
    bound = -2147483648 + piece * 0  # the largest with at least TOPK scores that reach it
    for i in range(tl.where(count > TOPK, 32, 0)):
        # From below: the sign's bit is inverted, so the first step tries 0.
        trial = bound ^ (tl.full((), 1, tl.int32) << (31 - i))
        reached = tl.sum((order >= trial).to(tl.int32), axis=0)
        bound = tl.where(reached >= TOPK, trial, bound)
    is_above = is_valid & (order > bound)
    is_equal = is_valid & (order == bound)
    ranks = tl.cumsum(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16), axis=0)
    above, equal = ranks & 0xFFFF, ranks >> 16
    rest = TOPK - tl.sum(is_above.to(tl.int32), axis=0)
    is_chosen = is_above | (is_equal & (equal <= rest))
    row_ptr = out_ptr + token * out_stride + piece * TOPK
    tl.store(row_ptr + above + tl.minimum(equal, rest) - 1, entry, mask=is_chosen)
    empty = tl.arange(0, PLACES)
    none = tl.full((PLACES,), -1, tl.int32)
    tl.store(row_ptr + empty, none, mask=(empty >= count) & (empty < TOPK))


@functools.cache
def _launch_scores(
    shape: tuple[int, int],
    strides: tuple[tuple[int, ...], ...],
    per_block: int,
    tokens: int,
    dot: tuple[bool, object, str],
    block_n: int,
) -> TritonLaunch:
    num_heads, head_dim = shape
    q_strides, weight_strides, key_strides = strides
    constants = {
        "Q_STRIDES": q_strides,
        "WEIGHT_STRIDES": weight_strides,
        "KEY_STRIDES": key_strides,
        "PER_BLOCK": per_block,
        "H": num_heads,
        "D": head_dim,
        "BLOCK_H": max(16, triton.next_power_of_2(num_heads)),
        "BLOCK_N": block_n,
        "TOKENS": tokens,
        "IS_SPLIT": dot[0],
        "DOT": dot[1],
        "PRECISION": dot[2],
    }
    return TritonLaunch(indexer_scores_kernel, max(4, block_n // 16), constants)


@functools.cache
def _launch_select(topk: int, block: int) -> TritonLaunch:
    constants = {"TOPK": topk, "BLOCK": block, "PLACES": triton.next_power_of_2(topk)}
    return TritonLaunch(indexer_select_kernel, _WARPS.get(block, 4), constants)


def plan(max_entries: int, topk: int) -> list[tuple[int, int]]:
    """Pieces and scores per piece of each launch of the choice; the last has one piece. Pure."""
    levels: list[tuple[int, int]] = []
    count = max_entries
    while not levels or levels[-1][0] > 1:
        block = PIECES[0] if count <= PIECES[0] else PIECES[1]
        pieces = -(-count // block)
        levels.append((pieces, block))
        count = pieces * topk
    return levels


def _dot(q: Tensor, keys: Tensor) -> tuple[bool, object, str]:
    """Whether q is split, the type of products and their precision."""
    if not q.is_cuda:  # the interpreter has no bfloat16 products
        return q.dtype == torch.float32, tl.float32, "ieee"
    if keys.dtype in (torch.bfloat16, torch.uint8):
        return q.dtype != torch.bfloat16, tl.bfloat16, "ieee"
    return False, tl.float32, "tf32x3"


def launch_indexer_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,
    seq_ids: Tensor,
    visible: Tensor,
    scores: Tensor,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    scores: (T, max_entries) float32; written for the tiles that some token of a program sees.
    """
    num_tokens, num_heads, head_dim = q.shape
    scale_strides = (0, 0) if scales is None else scales.stride()[:2]
    strides = (q.stride(), weights.stride(), (*keys.stride()[:2], *scale_strides))
    tokens = 1 if num_tokens <= FEW_TOKENS else MANY_TOKENS
    dot = _dot(q, keys)
    block_n = BLOCK_N // 2 if dot[2] == "tf32x3" else BLOCK_N
    launch = _launch_scores(
        (num_heads, head_dim),
        strides,
        keys.shape[1],
        tokens,
        dot,
        block_n,
    )
    max_entries = scores.shape[1]
    tensors = [scores, q, weights, keys, scales, block_tables, seq_ids, visible]
    factor = (num_heads * head_dim) ** -0.5
    numbers = [factor, num_tokens, max_entries, block_tables.stride(0)]
    launch((-(-max_entries // block_n), -(-num_tokens // tokens), 1), tensors, numbers)


def launch_indexer_select(
    scores: Tensor,
    visible: Tensor,
    out: Tensor,
    topk: int,
    candidates: list[Tensor],
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    candidates: (T, pieces * topk) int32 of each level of the plan but the last.
    """
    num_tokens, max_entries = scores.shape
    given: Tensor | None = None
    for (pieces, block), into in zip(plan(max_entries, topk), [*candidates, out], strict=True):
        count = 0 if given is None else given.shape[1]
        launch = _launch_select(topk, block)
        tensors = [into, scores, given, visible]
        launch((pieces, num_tokens, 1), tensors, [max_entries, count, into.stride(0)])
        given = into
