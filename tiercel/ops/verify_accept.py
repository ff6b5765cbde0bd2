"""Verification of draft tokens: which ones are accepted, and the token that follows them.

Slot i of a row holds the model's logits after its text and its first i drafts. A token is chosen at
each slot, just as plain decoding would choose it at that position: the largest logit, or a sample
with the noise of that position (`ops/sample_tokens.py`). While it equals the draft, the logits of
the next slot belong to the text, so the choice there counts too. A row gets its accepted drafts and
one token more. Whatever the drafts were, these are the tokens that decoding one by one would have
sampled.

Drafts that were sampled from probabilities may be judged by rejection sampling instead
(`draft_probs`): the distribution of the answer stays that of plain decoding, but not each sample.
"""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.config import ACCEPTANCE_DECAY, RETRY_STEPS
from tiercel.errors import ArgumentError
from tiercel.kernels.speculation.verify_accept_columns import (
    NUM_COLUMNS,
    NUM_NEW,
    NUM_VERIFIED,
    PROBLEM,
)
from tiercel.ops.sample_tokens import (
    NONFINITE,
    OK,
    SampleRows,
    draw_torch,
    step_keys,
    uniform_noise,
)

UNSOUND_DRAFT = 3
"""A problem of a row besides those of `sample_tokens`: its tokens are good, but the logits after
one of its drafts were NaN or infinite, as the cached keys and values of that draft may be."""

REJECTION = -1  # steps a row's key to that of the noise of rejection sampling
LEAST_REST = 1e-10  # of max(0, p - q); below, p and q are equal but for rounding


class DraftRows(Struct, frozen=True):
    """Persistent columns of rows that draft; S rows, the last of them scratch.

    Attributes:
        draft_ids: (S, 1 + K) int32, drafts from column 1 on; column 0 is the caller's.
        num_computed: (S,) int32, tokens in the cache: after this op all but the last.
        draft_limit: (S,) int32, drafts in a step at most, 0 to K.
        num_wanted: (S,) int32, drafts that the row should make for the next step.
        acceptance: (S,) float32, estimated chance that a draft after right ones is right.
        num_idle: (S,) int32, steps without a draft.
    """

    draft_ids: Tensor
    num_computed: Tensor
    draft_limit: Tensor
    num_wanted: Tensor
    acceptance: Tensor
    num_idle: Tensor


class Verified(Struct, frozen=True):
    """The new tokens of R rows, as columns of one table: one copy brings them to the host.

    Attributes:
        table: (R, K + 4) int32; its columns are in verify_accept_columns.py.
        token_ids: (R, 1 + K), the choice at each slot that the step used, else 0.
        num_new: (R,), the number of new tokens at the front of token_ids, 1 or more.
        problems: (R,), the problem of the first slot, or `UNSOUND_DRAFT`.
        num_drafts: (R,), drafts that were verified.
    """

    table: Tensor

    @property
    def token_ids(self) -> Tensor:
        return self.table[:, :-NUM_COLUMNS]

    @property
    def num_new(self) -> Tensor:
        return self.table[:, NUM_NEW - NUM_COLUMNS]

    @property
    def problems(self) -> Tensor:
        return self.table[:, PROBLEM - NUM_COLUMNS]

    @property
    def num_drafts(self) -> Tensor:
        return self.table[:, NUM_VERIFIED - NUM_COLUMNS]


def split_drafts(joined: Tensor) -> tuple[Verified, Tensor]:
    """Split a table and the drafts that follow it in one tensor.

    joined: (R, K + 4 + 1 + K) int32: a table, and rows of `DraftRows.draft_ids`.
    """
    width = (joined.shape[1] - NUM_COLUMNS) // 2  # 1 + K
    table, draft_ids = joined.split((width + NUM_COLUMNS, width), dim=1)
    return Verified(table), draft_ids


def verify_accept(
    logits: Tensor,
    starts: Tensor,
    rows: Tensor,
    num_drafts: Tensor,
    state: SampleRows,
    drafts: DraftRows,
    is_banned: Tensor,
    theta: Tensor,
    is_sound: Tensor | None = None,
    draft_probs: Tensor | None = None,
) -> Verified:
    """Choose a token at each slot, accept drafts that equal it, append, and plan the next drafts.

    A row's estimate of acceptance is updated by each draft up to and with the first wrong one. The
    row wants as many drafts as there are j with acceptance^j > theta, within its limit. A row that
    wants none tries one every 32 steps.

    On a GPU: two launches (four with `draft_probs`), no wait; safe to capture in a graph.

    Args:
        logits: (L, vocab_size) float32, contiguous; -inf bans a token.
        starts: (R + 1,) int32; slot i of request r is logits row starts[r] + i.
        rows: (R,) int32, the engine row of each; none twice but for scratch.
        num_drafts: (R,) int32, drafts that the step took of each, 0 to K; logits rows after
            them are unread.
        state: mutated: tokens are appended.
        drafts: mutated, but for its ids and limits.
        is_banned: (vocab_size,) uint8, 1 for tokens that no answer may hold.
        theta: (1,) float32, the chance from which a draft is worth its time; 0: all are.
        is_sound: (L,) uint8, 0 for rows whose raw logits were not finite; None if `logits` are the
            raw ones, to find that out here.
        draft_probs: (R, K, vocab_size) float32, the probabilities that each draft was sampled from,
            with noise of other keys; None: drafts are accepted where they equal the choice. Greedy
            rows always go by equality.

    Returns:
        New tensors.

    Raises:
        ArgumentError: shapes or dtypes disagree.

    Sources: "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192, for
    `draft_probs`; "Coupling without Communication and Drafter-Invariant Speculative Decoding",
    arXiv 2408.07978, for drafts sampled with the row's own noise.
    """
    _check(logits, starts, rows, num_drafts, state, drafts, is_banned, draft_probs)
    if logits.is_cuda:
        from tiercel.kernels.speculation.verify_accept import launch_verify_accept

        width = drafts.draft_ids.shape[1]
        table = rows.new_empty((rows.shape[0], width + NUM_COLUMNS))
        launch_verify_accept(
            logits,
            starts,
            rows,
            num_drafts,
            (state.token_ids, state.num_tokens, state.temperature, state.key),
            (
                drafts.draft_ids,
                drafts.num_computed,
                drafts.draft_limit,
                drafts.num_wanted,
                drafts.acceptance,
                drafts.num_idle,
            ),
            is_banned,
            theta,
            is_sound,
            draft_probs,
            table,
            make_scratch(logits, rows.shape[0] * width, has_probs=draft_probs is not None),
        )
        return Verified(table)
    return _verify(
        logits, starts, rows, num_drafts, state, drafts, is_banned, theta, is_sound, draft_probs
    )


def make_scratch(
    logits: Tensor, num_slots: int, *, has_probs: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Memory through which the kernels of one call pass results to each other."""
    from tiercel.kernels.sampling.sample_tokens import num_parts

    parts, device = num_parts(logits.shape[1]), logits.device

    def make(last: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty((num_slots, parts, *last), dtype=dtype, device=device)

    scores, ids = make((), torch.float64), make((), torch.int32)
    if not has_probs:
        return scores, ids, scores, scores, ids
    sums, rest_scores = make((2,), torch.float32), make((3,), torch.float64)
    return scores, ids, sums, rest_scores, make((2,), torch.int32)


def _verify(
    logits: Tensor,
    starts: Tensor,
    rows: Tensor,
    num_drafts: Tensor,
    state: SampleRows,
    drafts: DraftRows,
    is_banned: Tensor,
    theta: Tensor,
    is_sound: Tensor | None,
    draft_probs: Tensor | None,
) -> Verified:
    width, num_reqs = drafts.draft_ids.shape[1], rows.shape[0]
    slots = torch.arange(width)
    is_used = slots <= num_drafts.unsqueeze(1)
    request, slot = is_used.nonzero(as_tuple=True)
    line = starts.long()[request] + slot
    length = state.num_tokens.index_select(0, rows)
    ids, codes = draw_torch(
        logits[line],
        rows[request],
        length[request] + slot,
        state,
        is_banned,
        None if is_sound is None else is_sound[line],
    )
    result = Verified(torch.zeros((num_reqs, width + NUM_COLUMNS), dtype=torch.int32))
    problems = torch.zeros((num_reqs, width), dtype=torch.int32)
    result.token_ids[request, slot] = ids
    problems[request, slot] = codes.int()
    next_drafts = drafts.draft_ids.index_select(0, rows).roll(-1, 1)  # those after each slot
    is_right = result.token_ids == next_drafts
    if draft_probs is not None:
        allowed = logits.masked_fill(is_banned.view(torch.bool), float("-inf"))
        sampled = (state.temperature.index_select(0, rows)[request] > 0).nonzero().squeeze(1)
        for at in sampled.tolist():
            r, i = int(request[at]), int(slot[at])
            row = int(rows[r])
            probs = (allowed[line[at]] / state.temperature[row]).softmax(dim=0)
            draft_id = int(next_drafts[r, i]) if i < num_drafts[r] else None
            q = None if draft_id is None else draft_probs[r, i]
            token = _judge(probs, q, draft_id, state.key[row], int(length[r]) + i)
            is_right[r, i] = token == draft_id
            result.token_ids[r, i] = token if problems[r, i] == OK else 0
    is_right &= (slots < num_drafts.unsqueeze(1)) & (problems == OK)
    num_right = is_right.int().cumprod(dim=1).sum(dim=1)
    last = problems.gather(1, num_right.unsqueeze(1)).squeeze(1)
    result.num_new.copy_(torch.where((last == OK) | (num_right == 0), num_right + 1, num_right))
    has_unsound = (problems == NONFINITE).any(dim=1)
    first = torch.where(num_right == 0, last, OK)
    result.problems.copy_(torch.where((first == OK) & has_unsound, UNSOUND_DRAFT, first))
    result.num_drafts.copy_(num_drafts)
    _append(result, rows, length, state, drafts)
    _plan(num_right, num_drafts, rows, drafts, float(theta))
    return result


def _judge(probs: Tensor, q: Tensor | None, draft_id: int | None, key: Tensor, place: int) -> int:
    """The token of one slot by rejection sampling: the draft, or a sample from max(0, p - q)."""
    key = step_keys(step_keys(key.view(1), REJECTION), place)
    noise = uniform_noise(key, probs.shape[0] + 1)[0]  # the last is of no token: for the test
    if q is not None and draft_id is not None:
        if noise[-1] * q[draft_id] < probs[draft_id]:
            return draft_id
        rest = (probs - q).clamp_(min=0.0)
        if float(rest.sum()) >= LEAST_REST:
            probs = rest
    return int((probs.double().log() - noise[:-1].log().neg().log()).argmax())


def _append(
    result: Verified, rows: Tensor, length: Tensor, state: SampleRows, drafts: DraftRows
) -> None:
    is_real = rows < state.token_ids.shape[0] - 1
    slots = torch.arange(result.token_ids.shape[1])
    is_new = (slots < result.num_new.unsqueeze(1)) & is_real.unsqueeze(1)
    request, slot = is_new.nonzero(as_tuple=True)
    place = (length[request] + slot).long()
    state.token_ids[rows[request].long(), place] = result.token_ids[request, slot]
    real = rows[is_real].long()
    state.num_tokens[real] += result.num_new[is_real]
    drafts.num_computed[real] = state.num_tokens[real] - 1


def _plan(
    num_right: Tensor, num_drafts: Tensor, rows: Tensor, drafts: DraftRows, theta: float
) -> None:
    """Update the acceptance estimate and plan how many drafts to make."""
    chance = drafts.acceptance.index_select(0, rows)
    chance = 1.0 - (1.0 - chance) * ACCEPTANCE_DECAY ** num_right.float()
    chance = torch.where(num_right < num_drafts, chance * ACCEPTANCE_DECAY, chance)
    limit = drafts.draft_limit.index_select(0, rows)
    wanted, power = torch.zeros_like(limit), torch.ones_like(chance)
    for j in range(1, drafts.draft_ids.shape[1]):
        power = power * chance
        wanted += ((power > theta) & (j <= limit)).int()
    idle = torch.where(num_drafts > 0, 0, drafts.num_idle.index_select(0, rows) + 1)
    is_retry = (wanted == 0) & (limit > 0) & (idle >= RETRY_STEPS)
    wanted = torch.where(is_retry, 1, wanted)
    drafts.acceptance[rows] = chance
    drafts.num_wanted[rows] = wanted
    drafts.num_idle[rows] = torch.where(is_retry, 0, idle).int()


def _check(
    logits: Tensor,
    starts: Tensor,
    rows: Tensor,
    num_drafts: Tensor,
    state: SampleRows,
    drafts: DraftRows,
    is_banned: Tensor,
    draft_probs: Tensor | None,
) -> None:
    vocab_size, num_reqs = logits.shape[1], rows.shape[0]
    num_rows, width = drafts.draft_ids.shape
    fits = (
        starts.shape == (num_reqs + 1,)
        and num_drafts.shape == (num_reqs,)
        and is_banned.shape == (vocab_size,)
        and state.token_ids.shape[0] == num_rows
        and (draft_probs is None or draft_probs.shape == (num_reqs, width - 1, vocab_size))
    )
    is_plain = logits.dtype == torch.float32 and logits.is_contiguous()
    ints = (starts, rows, num_drafts, drafts.draft_ids)
    if not fits or not is_plain or any(t.dtype != torch.int32 for t in ints):
        shapes = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in (logits, *ints))
        raise ArgumentError(
            f"verify_accept: logits, starts, rows, counts and drafts {shapes} do not fit.",
            hint="Pass contiguous float32 logits and int32 for the other tensors, one row of "
            "drafts for each engine row.",
        )
