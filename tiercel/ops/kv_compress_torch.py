"""The compressors of DeepSeek-V4 with PyTorch operators on any device.

Entry e is a softmax, channel by channel, over the inputs of m tokens m e .. m e + m - 1. With
overlap (CSA) it has 2 m terms: the first half of the channels of the m tokens before, then the
second half of its own. A term's input is a row of this step, or, for a token of an earlier step, a
row of the cache: each term has at most one of the two, and a term before position 0 has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.ops.latent_rope_torch import normalise, rotate


@dataclass(frozen=True, slots=True)
class Terms:
    """Entries to form, and where their inputs are.

    Attributes:
        entries: (N,) int64, the entry's index in its sequence; -1 for a row without entry.
        fresh: (N, terms) int64, rows of this step in order of position; -1 if not of this step.
        stored: (N, terms) int64, slots of the cache, block * rows_per_block + offset; -1 for none.
    """

    entries: Tensor
    fresh: Tensor
    stored: Tensor


def find_completing(positions: Tensor, ratio: int, capacity: int) -> Tensor:
    """Rows of this step that complete an entry, in order, (capacity,) int64, -1 at the end."""
    is_last = (positions >= 0) & ((positions + 1) % ratio == 0)
    order = is_last.long().cumsum(0) - 1
    place = torch.where(is_last, order, capacity).clamp(max=capacity)
    found = torch.full((capacity + 1,), -1, dtype=torch.int64, device=positions.device)
    rows = torch.arange(positions.shape[0], device=positions.device)
    return found.scatter_(0, place, rows)[:capacity]


def make_terms(
    tokens: Tensor,
    positions: Tensor,
    seq_ids: Tensor,
    cu_seqlens_q: Tensor,
    block_tables: Tensor,
    sizes: tuple[int, int, int, int],
) -> Terms:
    """Terms of the entries that `tokens` complete; sizes: ratio, terms, block, rows per block."""
    ratio, num_terms, block_size, rows_per_block = sizes
    rows = tokens.clamp(min=0)
    last = positions.long()[rows]
    sequences = seq_ids.long()[rows]
    back = torch.arange(num_terms - 1, -1, -1, device=tokens.device)  # tokens before the last
    term = last.unsqueeze(1) - back
    row = rows.unsqueeze(1) - back
    is_term = (tokens >= 0).unsqueeze(1) & (term >= 0)
    is_fresh = row >= cu_seqlens_q.long()[sequences].unsqueeze(1)
    place = term.clamp(min=0)
    # Only the columns in use: the tables of all entries would grow with the context.
    blocks = block_tables[sequences.unsqueeze(1), place // block_size].long()
    slots = blocks * rows_per_block + place % block_size % rows_per_block
    return Terms(
        torch.where(tokens >= 0, last // ratio, -1),
        torch.where(is_term & is_fresh, row, -1),
        torch.where(is_term & ~is_fresh, slots, -1),
    )


def gather_terms(
    fresh: Tensor, stored: Tensor, terms: Terms, columns: slice, channels: slice
) -> Tensor:
    """Inputs (N, columns, channels) of some terms; undefined for a term without input."""
    new, old = terms.fresh[:, columns], terms.stored[:, columns]
    slots = old.clamp(min=0)
    per_block = stored.shape[1]
    from_cache = stored[..., channels][slots // per_block, slots % per_block]
    from_step = fresh[:, channels][new.clamp(min=0)]
    return torch.where((new >= 0).unsqueeze(-1), from_step, from_cache)


def compress(
    kv: tuple[Tensor, Tensor], gate: tuple[Tensor, Tensor], terms: Terms, width: int
) -> Tensor:
    """Softmax sums (N, width) float32 of (fresh, stored) inputs; rows without entry are NaN."""
    num_terms = terms.fresh.shape[1]
    halves = [(slice(0, num_terms), slice(0, width))]
    if kv[0].shape[1] == 2 * width:
        middle = num_terms // 2
        halves = [
            (slice(0, middle), slice(0, width)),
            (slice(middle, num_terms), slice(width, 2 * width)),
        ]
    is_term = ((terms.fresh >= 0) | (terms.stored >= 0)).unsqueeze(-1)
    gates = torch.cat([gather_terms(*gate, terms, *half) for half in halves], dim=1)
    weights = torch.softmax(gates.masked_fill(~is_term, -torch.inf), dim=1)
    values = torch.cat([gather_terms(*kv, terms, *half) for half in halves], dim=1)
    # Zeros for absent terms: weight 0 times a NaN of an unwritten slot would be NaN.
    return (weights * values.masked_fill(~is_term, 0.0)).sum(1)


def finish(
    sums: Tensor, entries: Tensor, ratio: int, weight: Tensor, eps: float, table: Tensor
) -> Tensor:
    """Norm and rotate entries at the position of their first token; zeros without entry."""
    first = entries.clamp(min=0) * ratio
    rows = rotate(normalise(sums, eps, weight), table[first], inverse=False)
    return torch.where((entries >= 0).unsqueeze(1), rows, 0.0)
