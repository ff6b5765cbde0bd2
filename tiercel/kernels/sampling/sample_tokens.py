"""Sampling on the device: programs find the best token of parts of a row, one more picks from them.

Floor: each logit is read once. Noise is made where it is used, for sampled rows only. A sample is
defined in float64, whose logarithms would take most of the time. So scores are float32 first, and
only tokens whose score is close enough to the best are computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tiercel.kernels.runtime.triton_launch import dependent_options, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

PART = 2048  # columns of one program
WARPS = 4
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
    """Gumbel noise of the sample at position `length`, for the token ids `cols`; float64."""
    gamma = tl.full((), _GAMMA, tl.uint64)
    key = finalise((key ^ length.to(tl.uint64)) + gamma)
    bits = finalise(key + (cols + 1).to(tl.uint64) * gamma)
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    return -tl.log(-tl.log(uniform))


@triton.jit
def rough_arrival(key, length, cols):
    """-log of the uniform numbers of `gumbel_noise`, float32, within 2^-16 of it."""
    gamma = tl.full((), _GAMMA, tl.uint64)
    key = finalise((key ^ length.to(tl.uint64)) + gamma)
    bits = (finalise(key + (cols + 1).to(tl.uint64) * gamma) >> 12).to(tl.int64)
    # The smaller one of u and 1 - u: near 1, float32 knows only the latter.
    is_high = bits >= 2251799813685248  # 2^51
    small = tl.where(is_high, 4503599627370495 - bits, bits).to(tl.float32)
    small = (small + 0.5) * 2.220446049250313e-16  # 2^-52
    series = 0.33333334 + small * (0.25 + small * 0.2)
    series = small * (1.0 + small * (0.5 + small * series))  # -log(1 - small), below 2^-4
    minus_log = -tl.log(tl.where(is_high, 1.0 - small, small))
    return tl.where(is_high & (small < 0.0625), series, minus_log)


@triton.jit
def best_drawn(scaled, is_out, logits_ptr, temperature, key, length, cols, vocab_size):
    """The largest of logit / temperature + noise of a part and its token, the lowest of equal ones.

    The noise is -log(arrival), so the largest score has the smallest arrival * exp(-scaled), which
    takes one logarithm. `logits_ptr` is that of the logits row. If all tokens are out: -inf, the
    first column.
    """
    plain = tl.where(is_out, float("-inf"), scaled)
    top = tl.max(plain, axis=0)
    is_infinite = tl.abs(top) == float("inf")
    shift = tl.where(is_infinite, 0.0, top)
    race = rough_arrival(key, length, cols) * tl.exp(shift - plain)
    race = tl.where(is_infinite, 0.0, race)
    # Where float64 no longer resolves noise beside the logits, all that are near may be equal.
    near = tl.where(tl.abs(top) > 1e9, 1e30, 1.0009765625)
    is_left = (race <= tl.min(race, axis=0) * near) & (plain > float("-inf"))
    is_left = (is_left & ((plain == top) | (is_infinite == 0))).to(tl.int32)
    best = tl.full((), float("-inf"), tl.float64)
    token = tl.min(cols, axis=0)
    for _ in range(tl.sum(is_left, axis=0)):  # one, as a rule
        col = tl.min(tl.where(is_left != 0, cols, vocab_size), axis=0)
        logit = tl.load(logits_ptr + col) / temperature
        score = logit.to(tl.float64) + gumbel_noise(key, length, col)
        token = tl.where(score > best, col, token)
        best = tl.where(score > best, score, best)
        is_left = tl.where(cols == col, 0, is_left)
    return best, token


@triton.jit(do_not_specialize=["parts"])
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
    IS_DEPENDENT: tl.constexpr,
):
    """The best token of one part of one row."""
    wait_for_inputs(IS_DEPENDENT)
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
        best, token = best_drawn(
            logits / temperature, is_out, logits_ptr + line * vocab_size, temperature,
            tl.load(key_ptr + row).to(tl.uint64), tl.load(num_tokens_ptr + row), cols, vocab_size,
        )  # fmt: skip
    else:
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
    IS_DEPENDENT: tl.constexpr,
):
    """The best token of one row, appended to it."""
    wait_for_inputs(IS_DEPENDENT)
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
    options = dependent_options(logits.device)
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
        num_warps=WARPS,
        **options,
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
        **options,
    )
