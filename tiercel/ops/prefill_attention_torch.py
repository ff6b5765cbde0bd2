"""Prefill attention with PyTorch, one request after the other: for a CPU.

The prefix is gathered once per request. Items attend to it and to themselves in blocks of some
hundred rows under one mask: a call for each item costs half as much as a call for twenty (11 and 24
ms for 25 and 512 rows of 9 bfloat16 heads on 512 keys, 2 cores). A masked key has a weight of
exactly zero, so no item changes a bit of another.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.ops.decode_attention_torch import (
    attend_masked,
    attend_one,
    first_key,
    gather_cache,
    place_mask,
)
from tiercel.ops.prefill_attention_plan import ScoreRule, StepLengths

BLOCK_ROWS = 256


def attend_items(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    out: Tensor,
    lse: Tensor | None,
    lengths: StepLengths,
    rule: ScoreRule,
) -> None:
    """Fill `out` (T, heads, head_dim) and, if given, `lse` (T, heads); tensors as in the op."""
    at = 0
    parts = zip(lengths.query, lengths.context, lengths.prefix, strict=True)
    for request, (new, length, prefix) in enumerate(parts):
        first = length - new
        # Items read from the sequence's start.
        seen = first_key(first, new, rule.window) if prefix == length else 0
        k_prefix, v_prefix = (
            gather_cache(cache, block_tables[request], prefix, seen)
            if prefix
            else cache.flatten(0, 1)[:0]
            for cache in (k_cache, v_cache)
        )
        split = at + max(0, prefix - first)
        if split > at:
            rows, base = slice(at, split), prefix - len(k_prefix)
            _attend_prompt(q, k_prefix, v_prefix, out, lse, rows, base, rule)
        for begin, end in _blocks(lengths.item_start, split, at + new):
            rows = slice(begin, end)
            k, v = torch.cat((k_prefix, k_new[rows])), torch.cat((v_prefix, v_new[rows]))
            assert lengths.item_start is not None, "a block has items"
            starts = torch.from_numpy(lengths.item_start[rows])
            mask = _item_mask(prefix, first + begin - at, starts, rule.window)
            if rule.softcap or lse is not None:
                out[rows], sums = _attend_openly(q[rows], k, v, mask, rule)
                if lse is not None:
                    lse[rows] = sums
            else:
                out[rows] = attend_masked(q[rows], k, v, mask, rule.scale)
        at += new


def _attend_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    rows: slice,
    base: int,
    rule: ScoreRule,
) -> None:
    """Rows of the prefix itself, whose last row is the last key; `base`: position of the first."""
    if not rule.softcap and lse is None:
        out[rows] = attend_one(q[rows], k, v, rule.scale, rule.window, base)
        return
    queries, keys = rows.stop - rows.start, base + len(k)
    places = torch.arange(keys - queries, keys), torch.arange(base, keys)
    out[rows], sums = _attend_openly(q[rows], k, v, place_mask(*places, rule.window), rule)
    if lse is not None:
        lse[rows] = sums


def _item_mask(prefix: int, first: int, starts: Tensor, window: int) -> Tensor:
    """(rows, P + rows) bool: the keys of prefix and items that rows from index `first` on see."""
    index = torch.arange(first, first + len(starts))
    own = (index <= index[:, None]) & (index >= starts[:, None])
    seen = torch.ones(len(starts), prefix, dtype=torch.bool)
    if window:
        own &= index > index[:, None] - window
        position = prefix + index - starts  # an item's positions continue after the prefix
        seen = torch.arange(prefix) > (position - window)[:, None]
    return torch.cat((seen, own), dim=1)


def _attend_openly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Attention with sums and soft-caps, which fused operators lack, in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = rule.scale * torch.einsum("qhd,khd->hqk", q.float(), k)
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill_(~mask, float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(dim=2).masked_fill_(~mask, 0.0), v)
    return out.to(q.dtype), scores.logsumexp(dim=2).t()


def _blocks(
    item_start: npt.NDArray[np.int32] | None, begin: int, end: int
) -> list[tuple[int, int]]:
    """Ranges [first, end) of rows of some whole items each, among rows [begin, end)."""
    if item_start is None or begin == end:
        return []
    own = item_start[begin:end]
    cuts = [*(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), end - begin]
    blocks, first, last = [], 0, 0
    for cut in cuts:
        if cut - first > BLOCK_ROWS and last > first:
            blocks.append((begin + first, begin + last))
            first = last
        last = cut
    return [*blocks, (begin + first, end)]
