"""N-gram drafts by a search on a CPU, and the two rules that make search and budget parallel.

One pass. The query of n tokens is the suffix of the query of max_ngram_size tokens, so a window
that ends at token i matches n tokens iff the longest common suffix of the haystack up to i and the
longest query has at least n. The wanted window (longest; prompt before generated; leftmost) has the
smallest of

    (max_ngram_size - matched) << 40 | kind << 39 | follower      kind 0: prompt, 1: generated

over all i with a follower i + 1. The search needs no budget: with room for one token or more the
same window is found.

One scan. Let c_i be a row's drafts without a budget, and

    R_i = T - u0 - (weight_0 + ... + weight_i) - (c_0 + ... + c_{i-1})

where T is the budget, u0 counts active rows, and weight_i >= 0 is the part of row i's tokens beyond
the part of the reserve it gives back. The serial rule gives row i min(c_i, R_i) drafts if R_i >= 2,
else none. R_i with uncut c may replace the serial room, because it never rises: all rows before one
with R_i >= 2 were not cut. A row that is cut leaves no room to the next row, and a row with R_i <=
1 takes none, so no later row drafts in either form.
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from tiercel.kernels.speculation.ngram_batch import NgramBatch, NgramLimits

KIND_SHIFT, SIZE_SHIFT = 39, 40  # of a key
NO_KEY = (1 << 62) - 1
_CHUNK_TOKENS = 1 << 22  # compared together: bounds the memory of texts where every token matches


class _Shares(Struct, frozen=True):
    """The part of each row in the budget, before any draft; (B,) each."""

    is_active: Tensor
    drafts: Tensor
    want: Tensor
    base: Tensor
    weight: Tensor


class _Haystack(Struct, frozen=True):
    """A token sequence of some rows: `tokens[r, start[r] : start[r] + lens[r]]`."""

    tokens: Tensor
    start: Tensor
    lens: Tensor
    kind: int


def draft_torch(batch: NgramBatch, limits: NgramLimits, threshold: int) -> None:
    """Search, divide the budget and write drafts and lengths, in place."""
    starts, steps, prompt_lens = _clamped(batch, limits)
    shares = _match_shares(batch) if batch.encoder is not None else _hybrid_shares(batch, limits)
    left = threshold - int(shares.is_active.sum())
    is_searched = shares.drafts & (shares.want > 0) & (steps >= limits.min_ngram_size)
    is_searched &= left - shares.weight.cumsum(0) >= 2
    rows = is_searched.nonzero().squeeze(1)
    found = torch.zeros_like(steps)
    is_generated, follower = torch.zeros_like(is_searched), torch.zeros_like(steps)
    if rows.numel():
        haystacks = (
            _Haystack(batch.prompt, torch.zeros_like(starts), prompt_lens, 0),
            _Haystack(batch.generated, starts, steps, 1),
        )
        key = _search(rows, haystacks, limits)
        is_generated = (key >> KIND_SHIFT) & 1 == 1
        follower = key & ((1 << KIND_SHIFT) - 1)
        length = torch.where(is_generated, steps, prompt_lens)
        room = batch.drafts.shape[1] - shares.base
        found = torch.minimum(torch.minimum(shares.want, length - follower), room)
        found = torch.where((key != NO_KEY) & (shares.base >= 0), found.clamp(min=0), 0)
    room = left - (shares.weight + found).cumsum(0) + found
    count = torch.where(room >= 2, torch.minimum(found, room), 0)
    _write_lens(batch, shares, count)
    for tokens, start, is_source in (
        (batch.prompt, torch.zeros_like(starts), ~is_generated),
        (batch.generated, starts, is_generated),
    ):
        place = start + follower
        _copy(tokens, place, torch.where(is_source, count, 0), batch.drafts, shares.base)


def _clamped(batch: NgramBatch, limits: NgramLimits) -> tuple[Tensor, Tensor, Tensor]:
    """Starts, steps and prompt lengths within their rooms, int64: garbage reads no foreign row."""
    room = batch.generated.shape[1]
    steps = batch.steps.long()
    start = batch.generated_start
    starts = torch.zeros_like(steps) if start is None else start.long().clamp(0, room)
    most = (room - starts - limits.query_shift).clamp(min=0)
    steps = torch.minimum(steps.clamp(min=0), most)
    return starts, steps, batch.prompt_lens.long().clamp(0, batch.prompt.shape[1])


def _match_shares(batch: NgramBatch) -> _Shares:
    assert batch.encoder is not None
    assert batch.draft_limit is not None
    is_prefill = batch.encoder > 0
    return _Shares(
        is_active=is_prefill | (batch.decoder > 0),
        drafts=~is_prefill & (batch.decoder != 0),
        want=torch.minimum(batch.draft_limit.long(), batch.max_dec.long() - batch.steps - 1),
        base=torch.ones_like(batch.steps, dtype=torch.int64),
        # A decoding row holds one token and gives one back; one in prefill gives nothing back.
        weight=torch.where(is_prefill, batch.lens, 0).long(),
    )


def _hybrid_shares(batch: NgramBatch, limits: NgramLimits) -> _Shares:
    base = batch.lens.long()
    limit = limits.max_draft_tokens + 1 - base
    want = torch.minimum(limit, batch.max_dec.long() - batch.steps - 1)
    drafts = (base != 0) & (want > 0)
    return _Shares(batch.decoder > 0, drafts, want, base, base - drafts.long())


def _write_lens(batch: NgramBatch, shares: _Shares, count: Tensor) -> None:
    lens = shares.base + count
    if batch.encoder is not None:
        kept = torch.where(batch.encoder > 0, batch.lens.long(), 0)  # idle rows get 0
        lens = torch.where(shares.drafts, lens, kept)
    batch.lens.copy_(lens)


def _search(rows: Tensor, haystacks: tuple[_Haystack, _Haystack], limits: NgramLimits) -> Tensor:
    """The best key of every row, `NO_KEY` outside `rows`."""
    generated = haystacks[1]
    best = torch.full_like(generated.lens, NO_KEY)
    ends = generated.start + generated.lens + (limits.query_shift - 1)
    back = torch.arange(limits.max_ngram_size, device=ends.device)
    # Last token first. Rows that are not searched may begin their text after the last column.
    places = (ends.unsqueeze(1) - back).clamp(0, generated.tokens.shape[1] - 1)
    query = generated.tokens.gather(1, places)
    for haystack in haystacks:
        low = int(haystack.start[rows].min())
        high = int((haystack.start + haystack.lens)[rows].max()) - 1  # no window ends there
        step = max(1, _CHUNK_TOKENS // max(1, high - low))
        for chunk in rows.split(step) if high > low else ():
            row, key = _matches(chunk, haystack, query, generated.lens, (low, high), limits)
            best.scatter_reduce_(0, row, key, "amin")
    return best


def _matches(
    rows: Tensor,
    haystack: _Haystack,
    query: Tensor,
    steps: Tensor,
    columns: tuple[int, int],
    limits: NgramLimits,
) -> tuple[Tensor, Tensor]:
    """Row and key of each window of `rows` whose last token is that of the query."""
    low, high = columns
    first, count = int(rows[0]), rows.numel()
    is_range = int(rows[-1]) - first == count - 1  # rows rise: a slice costs no copy
    tokens = haystack.tokens[first : first + count] if is_range else haystack.tokens[rows]
    equal = tokens[:, low:high] == query[rows, :1]
    # Among 2 M zeros NumPy finds a few ones in 0.28 ms, Tensor.nonzero in 0.80 (2 threads).
    places = torch.from_numpy(np.flatnonzero(equal.numpy()))
    row, column = rows[places // (high - low)], places % (high - low)
    end = column + low - haystack.start[row]
    has_follower = (end >= 0) & (end < haystack.lens[row] - 1)
    row, end = row[has_follower], end[has_follower]
    size = torch.ones_like(end)
    alive = torch.arange(end.numel(), device=end.device)  # windows that matched so far
    for back in range(1, limits.max_ngram_size):
        alive = alive[(end[alive] >= back) & (steps[row[alive]] > back)]
        line = row[alive]
        token = haystack.tokens[line, haystack.start[line] + end[alive] - back]
        alive = alive[token == query[line, back]]
        if not alive.numel():
            break
        size[alive] += 1
    key = ((limits.max_ngram_size - size) << SIZE_SHIFT) | (haystack.kind << KIND_SHIFT) | (end + 1)
    return row, torch.where(size >= limits.min_ngram_size, key, NO_KEY)


def _copy(tokens: Tensor, place: Tensor, count: Tensor, drafts: Tensor, base: Tensor) -> None:
    """drafts[r, base[r] + k] = tokens[r, place[r] + k] for k below count[r]."""
    slots = torch.arange(int(count.max()), device=count.device)
    row, slot = (slots < count.unsqueeze(1)).nonzero(as_tuple=True)
    drafts[row, base[row] + slot] = tokens[row, place[row] + slot]
