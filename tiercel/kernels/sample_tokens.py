"""Sampling on the device: programs find the best token of parts of a row, one more picks from them.

Floor: each logit is read once. Noise is made where it is used: 64-bit integers and two float64
logarithms a token, for rows that draw only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

PART = 2048  # columns of one program
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNSOUND = tl.constexpr(-2)  # instead of an id: a logit of the part is NaN or infinite


@triton.jit
def finalise(value):
    """The finaliser of SplitMix64 on uint64."""
    value = (value ^ (value >> 30)) * tl.full((), _MIX_1, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full((), _MIX_2, tl.uint64)
    return value ^ (value >> 31)


@triton.jit
def gumbel_noise(key, length, cols):
    """Gumbel noise of a draw at place `length`, for the token ids `cols`; float64."""
    gamma = tl.full((), _GAMMA, tl.uint64)
    key = finalise((key ^ length.to(tl.uint64)) + gamma)
    bits = finalise(key + (cols + 1).to(tl.uint64) * gamma)
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=["vocab_size", "parts"])
def best_of_part_kernel(
    logits_ptr,  # (L, vocab_size) float32
    rows_ptr,  # (L,) int32
    num_tokens_ptr,  # (S,) int32
    temperature_ptr,  # (S,) float32
    key_ptr,  # (S,) int64
    is_banned_ptr,  # (vocab_size,) uint8
    scores_ptr,  # (L, parts) float64
    ids_ptr,  # (L, parts) int32
    vocab_size,
    parts,
    CHECKS: tl.constexpr,  # whether the logits are the raw ones
    PART: tl.constexpr,
):
    """The best token of one part of one row."""
    line = tl.program_id(0).to(tl.int64)  # L * vocab_size passes 2**31
    part = tl.program_id(1)
    row = tl.load(rows_ptr + line)
    temperature = tl.load(temperature_ptr + row)
    cols = part * PART + tl.arange(0, PART)
    mask = cols < vocab_size
    logits = tl.load(logits_ptr + line * vocab_size + cols, mask=mask, other=0.0)
    is_unsound = False
    if CHECKS:
        is_unsound = tl.max((~(tl.abs(logits) < float("inf"))).to(tl.int32), axis=0) > 0
    is_banned = tl.load(is_banned_ptr + cols, mask=mask, other=1) != 0
    is_out = is_banned | (logits == float("-inf"))
    if temperature > 0:
        noise = gumbel_noise(
            tl.load(key_ptr + row).to(tl.uint64), tl.load(num_tokens_ptr + row), cols
        )
        scores = (logits / temperature).to(tl.float64) + noise
        scores = tl.where(is_out, float("-inf"), scores)
        best = tl.max(scores, axis=0)
        token = tl.min(tl.where(scores == best, cols, vocab_size), axis=0)
    else:  # float32 compares twice as fast
        plain = tl.where(is_out, float("-inf"), logits)
        largest = tl.max(plain, axis=0)
        best = largest.to(tl.float64)
        # The lowest id of the best: a row of bans alone gives the part's first one, with -inf.
        token = tl.min(tl.where(plain == largest, cols, vocab_size), axis=0)
    tl.store(scores_ptr + line * parts + part, best)
    tl.store(ids_ptr + line * parts + part, tl.where(is_unsound, _UNSOUND, token))


@triton.jit(do_not_specialize=["parts", "token_stride", "scratch"])
def append_best_kernel(
    rows_ptr,  # (L,) int32
    token_ids_ptr,  # (S, token_stride) int32
    num_tokens_ptr,  # (S,) int32
    is_sound_ptr,  # (L,) uint8, read unless CHECKS
    scores_ptr,  # (L, parts) float64
    ids_ptr,  # (L, parts) int32
    out_ptr,  # (L,) int32
    problems_ptr,  # (L,) uint8
    parts,
    token_stride,
    scratch,  # the last row
    CHECKS: tl.constexpr,
    PARTS: tl.constexpr,  # power of two, >= parts
):
    """The best token of one row, appended to it."""
    line = tl.program_id(0)
    row = tl.load(rows_ptr + line).to(tl.int64)  # S * token_stride passes 2**31
    index = tl.arange(0, PARTS)
    mask = index < parts
    scores = tl.load(scores_ptr + line * parts + index, mask=mask, other=float("-inf"))
    ids = tl.load(ids_ptr + line * parts + index, mask=mask, other=2147483647)
    is_sound = tl.min(ids, axis=0) >= 0 if CHECKS else tl.load(is_sound_ptr + line) != 0
    best = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == best, ids, 2147483647), axis=0)
    problem = tl.where(best > float("-inf"), 0, 2)
    problem = tl.where(is_sound, problem, 1)
    token = tl.where(problem == 0, token, 0)
    tl.store(out_ptr + line, token)
    tl.store(problems_ptr + line, problem.to(tl.uint8))
    is_real = row != scratch
    length = tl.load(num_tokens_ptr + row)
    tl.store(token_ids_ptr + row * token_stride + length, token, mask=is_real)
    tl.store(num_tokens_ptr + row, length + 1, mask=is_real)


def num_parts(vocab_size: int) -> int:
    """Programs of one row."""
    return max(1, -(-vocab_size // PART))


def launch_sample_tokens(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    temperature: Tensor,
    key: Tensor,
    is_banned: Tensor,
    is_sound: Tensor | None,
    scores: Tensor,
    ids: Tensor,
    out: Tensor,
    problems: Tensor,
) -> None:
    """Enqueue both kernels on the current stream; the op has checked and allocated.

    Shapes are those at the kernels' parameters; scores and ids, (L, num_parts), are overwritten.
    """
    lines, vocab_size = logits.shape
    if lines == 0:
        return
    parts, checks = num_parts(vocab_size), is_sound is None
    best_of_part_kernel[(lines, parts)](
        logits,
        rows,
        num_tokens,
        temperature,
        key,
        is_banned,
        scores,
        ids,
        vocab_size,
        parts,
        CHECKS=checks,
        PART=PART,
        num_warps=4,
    )
    append_best_kernel[(lines,)](
        rows,
        token_ids,
        num_tokens,
        out if is_sound is None else is_sound,
        scores,
        ids,
        out,
        problems,
        parts,
        token_ids.shape[1],
        token_ids.shape[0] - 1,
        CHECKS=checks,
        PARTS=triton.next_power_of_2(parts),
        num_warps=1,
    )
