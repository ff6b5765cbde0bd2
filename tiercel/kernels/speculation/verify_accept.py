"""Verification on the device: the best token of parts of a slot, then one program for each row.

Floor: each logit of a slot in use is read once; slots after a row's drafts cost an empty program.
For rejection sampling a first pass finds the sums of the softmax, a second one the best token by
max(0, p - q), with q the draft's own probabilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tiercel.config import ACCEPTANCE_DECAY, RETRY_STEPS
from tiercel.kernels.sampling.sample_tokens import (
    PART,
    WARPS,
    best_drawn,
    finalise,
    gumbel_noise,
    num_parts,
)
from tiercel.kernels.speculation import verify_accept_columns as columns

if TYPE_CHECKING:
    from torch import Tensor

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_REJECTION = tl.constexpr(0xFFFFFFFFFFFFFFFF)  # -1: see ops/verify_accept.py
_UNSOUND = tl.constexpr(-2)
_NO_ID = tl.constexpr(2147483647)
_LEAST_REST = tl.constexpr(1e-10)
_DECAY = tl.constexpr(ACCEPTANCE_DECAY)
_RETRY_STEPS = tl.constexpr(RETRY_STEPS)
_NUM_NEW = tl.constexpr(columns.NUM_NEW)
_PROBLEM = tl.constexpr(columns.PROBLEM)
_NUM_VERIFIED = tl.constexpr(columns.NUM_VERIFIED)
_NUM_COLUMNS = tl.constexpr(columns.NUM_COLUMNS)


@triton.jit
def rejection_key(key):
    """The key of a row's second stream of noise."""
    return finalise((key ^ _REJECTION) + tl.full((), _GAMMA, tl.uint64))


@triton.jit
def uniform_of(key, place, vocab_size):
    """The uniform number of a test: that of the id after the last one of the vocabulary."""
    gamma = tl.full((), _GAMMA, tl.uint64)
    key = finalise((key ^ place.to(tl.uint64)) + gamma)
    bits = finalise(key + (vocab_size + 1).to(tl.uint64) * gamma)
    return ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit(do_not_specialize=["parts", "width"])
def best_of_slot_kernel(
    logits_ptr,  # (L, vocab_size) float32
    starts_ptr,  # (R + 1,) int32
    rows_ptr,  # (R,) int32
    num_drafts_ptr,  # (R,) int32
    num_tokens_ptr,  # (S,) int32
    temperature_ptr,  # (S,) float32
    key_ptr,  # (S,) int64
    is_banned_ptr,  # (vocab_size,) uint8
    scores_ptr,  # (R * width, parts) float64
    ids_ptr,  # (R * width, parts) int32
    sums_ptr,  # (R * width, parts, 2) float32, maximum and sum of exponentials; if HAS_SUMS
    vocab_size,
    parts,
    width,
    CHECKS: tl.constexpr,  # whether the logits are the raw ones
    HAS_SUMS: tl.constexpr,
    PART: tl.constexpr,
):
    """The best token of one part of one slot, as `best_of_part_kernel` finds it."""
    place = tl.program_id(0).to(tl.int64)  # R * width * vocab_size passes 2**31
    part = tl.program_id(1)
    request, slot = place // width, place % width
    # Before the branch: one trip to memory for all three.
    line = tl.load(starts_ptr + request) + slot
    row = tl.load(rows_ptr + request)
    if slot <= tl.load(num_drafts_ptr + request):
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
            scaled = logits / temperature
            length = tl.load(num_tokens_ptr + row) + slot
            best, token = best_drawn(
                scaled, is_out, logits_ptr + line * vocab_size, temperature,
                tl.load(key_ptr + row).to(tl.uint64), length, cols, vocab_size,
            )  # fmt: skip
            if HAS_SUMS:
                plain = tl.where(is_out, float("-inf"), scaled)
                largest = tl.max(plain, axis=0)
                shift = tl.where(largest == float("-inf"), 0.0, largest)
                total = tl.sum(tl.exp(plain - shift), axis=0)
                tl.store(sums_ptr + (place * parts + part) * 2, largest)
                tl.store(sums_ptr + (place * parts + part) * 2 + 1, total)
        else:
            plain = tl.where(is_out, float("-inf"), logits)
            largest = tl.max(plain, axis=0)
            best = largest.to(tl.float64)
            token = tl.min(tl.where(plain == largest, cols, vocab_size), axis=0)
        tl.store(scores_ptr + place * parts + part, best)
        tl.store(ids_ptr + place * parts + part, tl.where(is_unsound, _UNSOUND, token))


@triton.jit
def softmax_sums(sums_ptr, place, parts, PARTS: tl.constexpr):
    """Maximum and sum of exponentials of one slot from those of its parts."""
    index = tl.arange(0, PARTS)
    mask = index < parts
    base = sums_ptr + (place * parts + index) * 2
    largest = tl.load(base, mask=mask, other=float("-inf"))
    totals = tl.load(base + 1, mask=mask, other=0.0)
    top = tl.max(largest, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return shift, tl.sum(totals * tl.exp(largest - shift), axis=0)


@triton.jit(do_not_specialize=["vocab_size", "parts", "width"])
def best_of_rest_kernel(
    logits_ptr,  # (L, vocab_size) float32
    starts_ptr,  # (R + 1,) int32
    rows_ptr,  # (R,) int32
    num_drafts_ptr,  # (R,) int32
    num_tokens_ptr,  # (S,) int32
    temperature_ptr,  # (S,) float32
    key_ptr,  # (S,) int64
    is_banned_ptr,  # (vocab_size,) uint8
    draft_probs_ptr,  # (R, width - 1, vocab_size) float32
    sums_ptr,  # (R * width, parts, 2) float32
    rest_scores_ptr,  # (R * width, parts, 3) float64: best of p - q, best of p, sum of p - q
    rest_ids_ptr,  # (R * width, parts, 2) int32
    vocab_size,
    parts,
    width,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Of one part of one slot: the best token by max(0, p - q), and by p."""
    place = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    request, slot = place // width, place % width
    row = tl.load(rows_ptr + request)
    temperature = tl.load(temperature_ptr + row)
    num_drafts = tl.load(num_drafts_ptr + request)
    if (slot <= num_drafts) & (temperature > 0):
        line = tl.load(starts_ptr + request) + slot
        cols = part * PART + tl.arange(0, PART)
        mask = cols < vocab_size
        logits = tl.load(logits_ptr + line * vocab_size + cols, mask=mask, other=float("-inf"))
        is_banned = tl.load(is_banned_ptr + cols, mask=mask, other=1) != 0
        shift, total = softmax_sums(sums_ptr, place, parts, PARTS)
        scaled = tl.where(is_banned, float("-inf"), logits / temperature)
        probs = tl.exp(scaled - shift) / total
        own = (request * (width - 1) + slot) * vocab_size
        has_draft = slot < num_drafts
        # A scalar & a vector is no mask in the interpreter.
        shown = tl.where(has_draft, vocab_size, 0)
        q = tl.load(draft_probs_ptr + own + cols, mask=cols < shown, other=0.0)
        rest = tl.maximum(probs - q, 0.0)
        key = rejection_key(tl.load(key_ptr + row).to(tl.uint64))
        noise = gumbel_noise(key, tl.load(num_tokens_ptr + row) + slot, cols)
        out = place * parts + part
        by_rest = tl.where(rest > 0, tl.log(rest.to(tl.float64)) + noise, float("-inf"))
        by_probs = tl.where(probs > 0, tl.log(probs.to(tl.float64)) + noise, float("-inf"))
        best_rest, best_probs = tl.max(by_rest, axis=0), tl.max(by_probs, axis=0)
        tl.store(rest_scores_ptr + out * 3, best_rest)
        tl.store(rest_scores_ptr + out * 3 + 1, best_probs)
        tl.store(rest_scores_ptr + out * 3 + 2, tl.sum(rest, axis=0).to(tl.float64))
        first_rest = tl.min(tl.where(by_rest == best_rest, cols, vocab_size), axis=0)
        first_probs = tl.min(tl.where(by_probs == best_probs, cols, vocab_size), axis=0)
        tl.store(rest_ids_ptr + out * 2, first_rest)
        tl.store(rest_ids_ptr + out * 2 + 1, first_probs)


@triton.jit(do_not_specialize=["vocab_size", "parts", "width"])
def judge_kernel(
    logits_ptr,  # (L, vocab_size) float32
    starts_ptr,  # (R + 1,) int32
    rows_ptr,  # (R,) int32
    num_drafts_ptr,  # (R,) int32
    num_tokens_ptr,  # (S,) int32
    temperature_ptr,  # (S,) float32
    key_ptr,  # (S,) int64
    is_banned_ptr,  # (vocab_size,) uint8
    draft_probs_ptr,  # (R, width - 1, vocab_size) float32
    draft_ids_ptr,  # (S, width) int32
    sums_ptr,  # (R * width, parts, 2) float32
    rest_scores_ptr,  # (R * width, parts, 3) float64
    rest_ids_ptr,  # (R * width, parts, 2) int32
    scores_ptr,  # (R * width, parts) float64; part 0 is set to the judged token, others to -inf
    ids_ptr,  # (R * width, parts) int32; ids of other parts stay, to tell unsound ones
    vocab_size,
    parts,
    width,
    PARTS: tl.constexpr,
):
    """The token of one slot by rejection sampling, in place of the best one."""
    place = tl.program_id(0).to(tl.int64)
    request, slot = place // width, place % width
    row = tl.load(rows_ptr + request).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    num_drafts = tl.load(num_drafts_ptr + request)
    index = tl.arange(0, PARTS)
    mask = index < parts
    base = place * parts + index
    scores = tl.load(scores_ptr + base, mask=mask, other=float("-inf"))
    ids = tl.load(ids_ptr + base, mask=mask, other=_NO_ID)
    is_sound = tl.min(ids, axis=0) >= 0
    is_possible = tl.max(scores, axis=0) > float("-inf")
    is_drawn = (slot <= num_drafts) & (temperature > 0) & is_sound & is_possible
    if is_drawn:
        by_rest = tl.load(rest_scores_ptr + base * 3, mask=mask, other=float("-inf"))
        by_probs = tl.load(rest_scores_ptr + base * 3 + 1, mask=mask, other=float("-inf"))
        totals = tl.load(rest_scores_ptr + base * 3 + 2, mask=mask, other=0.0)
        rest_ids = tl.load(rest_ids_ptr + base * 2, mask=mask, other=_NO_ID)
        probs_ids = tl.load(rest_ids_ptr + base * 2 + 1, mask=mask, other=_NO_ID)
        has_rest = tl.sum(totals, axis=0) >= _LEAST_REST
        scores = tl.where(has_rest, by_rest, by_probs)
        ids = tl.where(has_rest, rest_ids, probs_ids)
        best = tl.max(scores, axis=0)
        token = tl.min(tl.where(scores == best, ids, _NO_ID), axis=0)
        has_draft = slot < num_drafts
        draft_id = tl.load(draft_ids_ptr + row * width + 1 + slot, mask=has_draft, other=0)
        shift, total = softmax_sums(sums_ptr, place, parts, PARTS)
        line = tl.load(starts_ptr + request) + slot
        logit = tl.load(logits_ptr + line * vocab_size + draft_id)
        is_out = tl.load(is_banned_ptr + draft_id) != 0
        p = tl.where(is_out, 0.0, tl.exp(logit / temperature - shift) / total)
        own = (request * (width - 1) + slot) * vocab_size
        q = tl.load(draft_probs_ptr + own + draft_id, mask=has_draft, other=1.0)
        key = rejection_key(tl.load(key_ptr + row).to(tl.uint64))
        u = uniform_of(key, tl.load(num_tokens_ptr + row) + slot, vocab_size)
        token = tl.where(has_draft & (u * q < p), draft_id, token)
        tl.store(scores_ptr + base, tl.where(index == 0, 0.0, float("-inf")), mask=mask)
        tl.store(ids_ptr + place * parts, token)


@triton.jit
def plan_drafts(
    right,  # drafts that were right
    used,  # of these
    row,
    is_real,
    width,
    draft_limit_ptr,  # (S,) int32
    num_wanted_ptr,  # (S,) int32
    acceptance_ptr,  # (S,) float32
    num_idle_ptr,  # (S,) int32
    theta,
):
    """Update a row's acceptance estimate and plan how many drafts it should make."""
    chance = tl.load(acceptance_ptr + row)
    for _ in range(right):
        chance = 1.0 - (1.0 - chance) * _DECAY
    chance = tl.where(right < used, chance * _DECAY, chance)
    limit = tl.load(draft_limit_ptr + row)
    wanted = right * 0
    power = chance * 0.0 + 1.0
    for j in range(1, width):
        power = power * chance
        wanted += tl.where((power > theta) & (j <= limit), 1, 0)
    idle = tl.where(used > 0, 0, tl.load(num_idle_ptr + row) + 1)
    is_retry = (wanted == 0) & (limit > 0) & (idle >= _RETRY_STEPS)
    tl.store(acceptance_ptr + row, chance, mask=is_real)
    tl.store(num_wanted_ptr + row, tl.where(is_retry, 1, wanted), mask=is_real)
    tl.store(num_idle_ptr + row, tl.where(is_retry, 0, idle), mask=is_real)


@triton.jit(do_not_specialize=["parts", "width", "token_stride", "scratch"])
def accept_kernel(
    starts_ptr,  # (R + 1,) int32
    rows_ptr,  # (R,) int32
    used_ptr,  # (R,) int32, drafts that were verified
    token_ids_ptr,  # (S, token_stride) int32
    num_tokens_ptr,  # (S,) int32
    num_computed_ptr,  # (S,) int32
    draft_ids_ptr,  # (S, width) int32
    draft_limit_ptr,  # (S,) int32
    num_wanted_ptr,  # (S,) int32
    acceptance_ptr,  # (S,) float32
    num_idle_ptr,  # (S,) int32
    theta_ptr,  # (1,) float32
    is_sound_ptr,  # (L,) uint8, read unless CHECKS
    scores_ptr,  # (R * width, parts) float64
    ids_ptr,  # (R * width, parts) int32
    table_ptr,  # (R, width + 3) int32, columns as in verify_accept_columns.py
    parts,
    width,
    token_stride,
    scratch,  # the last row
    CHECKS: tl.constexpr,
    PARTS: tl.constexpr,  # power of two, >= parts
    WIDTH: tl.constexpr,  # power of two, >= width
):
    """Accept, append and plan the next drafts of one row."""
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request).to(tl.int64)  # S * token_stride passes 2**31
    used = tl.load(used_ptr + request)
    slot = tl.arange(0, WIDTH)
    is_used = slot <= used
    index = tl.arange(0, PARTS)
    base = (request * width + slot)[:, None] * parts + index[None, :]
    mask = is_used[:, None] & (index < parts)[None, :]
    scores = tl.load(scores_ptr + base, mask=mask, other=float("-inf"))
    ids = tl.load(ids_ptr + base, mask=mask, other=_NO_ID)
    if CHECKS:
        is_sound = tl.min(ids, axis=1) >= 0
    else:
        line = tl.load(starts_ptr + request) + slot
        is_sound = tl.load(is_sound_ptr + line, mask=is_used, other=1) != 0
    best = tl.max(scores, axis=1)
    token = tl.min(tl.where(scores == best[:, None], ids, _NO_ID), axis=1)
    problem = tl.where(best > float("-inf"), 0, 2)
    problem = tl.where(is_sound, problem, 1)
    token = tl.where((problem == 0) & is_used, token, 0)
    draft_id = tl.load(draft_ids_ptr + row * width + 1 + slot, mask=slot < used, other=-1)
    is_right = (token == draft_id) & (problem == 0) & (slot < used)
    right = tl.min(tl.where(is_right, WIDTH, slot), axis=0)  # slot `used` never is
    last = tl.sum(tl.where(slot == right, problem, 0), axis=0)
    count = tl.where((last == 0) | (right == 0), right + 1, right)
    has_unsound = tl.max(tl.where(is_used & (problem == 1), 1, 0), axis=0) > 0
    first = tl.where(right == 0, last, 0)
    first = tl.where((first == 0) & has_unsound, 3, first)
    out = table_ptr + request * (width + _NUM_COLUMNS)
    tl.store(out + slot, token, mask=slot < width)
    tl.store(out + width + _NUM_NEW, count)
    tl.store(out + width + _PROBLEM, first)
    tl.store(out + width + _NUM_VERIFIED, used)

    is_real = row != scratch
    length = tl.load(num_tokens_ptr + row)
    token_ptr = token_ids_ptr + row * token_stride + length + slot
    tl.store(token_ptr, token, mask=slot < tl.where(is_real, count, 0))
    tl.store(num_tokens_ptr + row, length + count, mask=is_real)
    tl.store(num_computed_ptr + row, length + count - 1, mask=is_real)
    plan_drafts(
        right, used, row, is_real, width, draft_limit_ptr, num_wanted_ptr, acceptance_ptr,
        num_idle_ptr, tl.load(theta_ptr),
    )  # fmt: skip


def launch_verify_accept(
    logits: Tensor,
    starts: Tensor,
    rows: Tensor,
    num_drafts: Tensor,
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    drafts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    is_banned: Tensor,
    theta: Tensor,
    is_sound: Tensor | None,
    draft_probs: Tensor | None,
    table: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Shapes are those at the kernels' parameters.

    Args:
        logits: of all rows.
        starts: first logits row of each request.
        rows: of each request.
        num_drafts: of each request.
        state: token_ids, num_tokens, temperature, key; mutated.
        drafts: draft_ids, num_computed, draft_limit, num_wanted, acceptance, num_idle; mutated.
        is_banned: of each token.
        theta: chance of a draft worth making.
        is_sound: of each logits row, or None to check them here.
        draft_probs: for rejection sampling, or None.
        table: (R, width + 3) int32, overwritten; its columns are in verify_accept_columns.py.
        scratch: scores, ids, sums, rest_scores, rest_ids; overwritten.
    """
    token_ids, num_tokens, temperature, key = state
    draft_ids, num_computed, draft_limit, num_wanted, acceptance, num_idle = drafts
    num_reqs, width, vocab_size = rows.shape[0], draft_ids.shape[1], logits.shape[1]
    if num_reqs == 0:
        return
    parts, places = num_parts(vocab_size), num_reqs * width
    checks, has_probs = is_sound is None, draft_probs is not None
    scores, ids, sums, rest_scores, rest_ids = scratch
    padded = triton.next_power_of_2(parts)
    shared = (starts, rows, num_drafts, num_tokens, temperature, key, is_banned)
    best_of_slot_kernel[(places, parts)](
        logits, *shared, scores, ids, sums, vocab_size, parts, width,
        CHECKS=checks, HAS_SUMS=has_probs, PART=PART, num_warps=WARPS,
    )  # fmt: skip
    if draft_probs is not None:
        best_of_rest_kernel[(places, parts)](
            logits, *shared, draft_probs, sums, rest_scores, rest_ids, vocab_size, parts, width,
            PARTS=padded, PART=PART, num_warps=4,
        )  # fmt: skip
        judge_kernel[(places,)](
            logits, *shared, draft_probs, draft_ids, sums, rest_scores, rest_ids, scores, ids,
            vocab_size, parts, width, PARTS=padded, num_warps=1,
        )  # fmt: skip
    accept_kernel[(num_reqs,)](
        starts, rows, num_drafts, token_ids, num_tokens, num_computed, draft_ids, draft_limit,
        num_wanted, acceptance, num_idle, theta, starts if is_sound is None else is_sound, scores,
        ids, table, parts, width, token_ids.shape[1], token_ids.shape[0] - 1,
        CHECKS=checks, PARTS=padded, WIDTH=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
