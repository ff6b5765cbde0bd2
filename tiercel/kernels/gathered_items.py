"""Attention over items behind a prefix with PyTorch, one request after the other: the CPU's way.

The prefix is gathered once per request; each item attends to it and to itself, end to end, which is
exactly the sequence that the item would be alone.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.kernels.attention_lengths import ScoreRule, StepLengths
from tiercel.kernels.gathered_attention import attend_one, first_key, gather_cache, place_mask


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

    def attend(rows: slice, k: Tensor, v: Tensor, base: int = 0) -> None:
        if rule.softcap or lse is not None:
            out[rows], sums = _attend_openly(q[rows], k, v, rule, base)
            if lse is not None:
                lse[rows] = sums
        else:
            out[rows] = attend_one(q[rows], k, v, rule.scale, rule.window, base)

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
            attend(slice(at, split), k_prefix, v_prefix, prefix - len(k_prefix))
        for start, begin, end in _runs(lengths.item_start, split, at + new):
            rows = slice(at + start - first, end)
            if rows.start == end and not prefix:
                out[begin:end] = 0.0
                if lse is not None:
                    lse[begin:end] = float("-inf")
                continue
            k, v = torch.cat((k_prefix, k_new[rows])), torch.cat((v_prefix, v_new[rows]))
            attend(slice(begin, end), k, v)
        at += new


def _attend_openly(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, base: int
) -> tuple[Tensor, Tensor]:
    """What fused operators do not tell or do: sums and soft-caps, in float32."""
    queries, keys = len(q), base + len(k)
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = rule.scale * torch.einsum("qhd,khd->hqk", q.float(), k)
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    mask = place_mask(torch.arange(keys - queries, keys), torch.arange(base, keys), rule.window)
    scores = scores.masked_fill_(~mask, float("-inf"))
    # A delimiter may begin a run, and sees nothing: 0 instead of 0 / 0.
    out = torch.einsum("hqk,khd->qhd", scores.softmax(dim=2).masked_fill_(~mask, 0.0), v)
    return out.to(q.dtype), scores.logsumexp(dim=2).t()


def _runs(
    item_start: npt.NDArray[np.int32] | None, begin: int, end: int
) -> list[tuple[int, int, int]]:
    """(item_start, first row, row behind) of the runs of one item in rows [begin, end)."""
    if item_start is None or begin == end:
        return []
    own = item_start[begin:end]
    cuts = [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), end - begin]
    return [(int(own[a]), begin + a, begin + b) for a, b in itertools.pairwise(cuts)]
