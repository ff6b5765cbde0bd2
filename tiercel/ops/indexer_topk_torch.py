"""Indexer scores and a running top-k with PyTorch operators on any device.

A score and its entry form one int64: the float's bits, ordered as an integer, in the upper half and
the complement of the entry in the lower half. No two keys are equal, so a top-k of them resolves
ties by the lower entry on any device. Entries come in pieces: the best keys so far and the keys of
the next piece give the best keys so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.ops.block_quantize_torch import dequantize_fp4

PIECE_ENTRIES = 4096
WORKSPACE_BYTES = 1 << 28  # of the entries and products of some tokens; at least one token
_LEAST = -(1 << 63)  # below the key of any score
_LOW = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """Index keys in blocks.

    Attributes:
        keys: (num_blocks, entries_per_block, d) float, or (..., d / 2) uint8 for packed E2M1; with
            any strides.
        scales: (num_blocks, entries_per_block, d / 32) uint8 for packed keys, otherwise None.
        block_tables: (sequences, columns) integer, blocks of each sequence in order.
        seq_ids: (T,) integer, each token's row of `block_tables`.
    """

    keys: Tensor
    scales: Tensor | None
    block_tables: Tensor
    seq_ids: Tensor


def piece_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Sum over heads of weights * d^-0.5 * heads^-0.5 * relu(q . k): (T, n) float32.

    q is (T, heads, d), weights (T, heads) and keys (T, n, d), all float32.
    """
    dots = torch.bmm(q, keys.transpose(1, 2)).relu_()
    factors = weights * (q.shape[1] * q.shape[2]) ** -0.5
    return torch.bmm(factors.unsqueeze(1), dots).squeeze(1)


def gather_piece(paged: PagedKeys, tokens: slice, columns: slice) -> Tensor:
    """Keys of some columns of the tokens' block tables, (T, entries, d) float32."""
    rows = paged.seq_ids[tokens].long()
    blocks = paged.block_tables[:, columns].long().clamp(min=0)[rows]
    keys = paged.keys[blocks]
    if paged.scales is None:
        return keys.flatten(1, 2).float()
    return dequantize_fp4(keys, paged.scales[blocks]).flatten(1, 2)


def sort_keys(scores: Tensor, first: int, visible: Tensor) -> Tensor:
    """int64 keys of (T, n) scores of the entries from `first` on."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0: they tie
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    entries = torch.arange(first, first + scores.shape[1], device=scores.device)
    keys = (ordered << 32) | (_LOW - entries)
    return torch.where(entries < visible.unsqueeze(1), keys, _LEAST)


def entries_of(best: Tensor) -> Tensor:
    """Entries (T, topk) int32 of sort keys, ascending, -1 at the end."""
    entries = torch.where(best == _LEAST, _LOW, _LOW - (best & _LOW)).sort(dim=1).values
    return torch.where(entries == _LOW, -1, entries).int()


def all_entries(visible: Tensor, topk: int) -> Tensor:
    """The entries of tokens that see no more than `topk`."""
    entries = torch.arange(topk, dtype=torch.int32, device=visible.device)
    return torch.where(entries < visible.unsqueeze(1), entries, -1)


def tokens_of_a_pass(num_heads: int, head_dim: int, piece: int) -> int:
    """Tokens whose piece of keys and products fits the workspace. Pure."""
    per_entry = 12 * head_dim + 4 * num_heads + 64  # gather, decode, keys; products; sort keys
    return max(1, WORKSPACE_BYTES // (per_entry * max(1, piece)))


def best_entries(
    q: Tensor, weights: Tensor, paged: PagedKeys, visible: Tensor, topk: int, max_entries: int
) -> Tensor:
    """The `topk` best of each token's visible entries below `max_entries`, (T, topk) int32."""
    per_block = paged.keys.shape[1]
    columns = min(paged.block_tables.shape[1], -(-max_entries // per_block))
    step = max(1, PIECE_ENTRIES // per_block)
    seen = visible.clamp(max=max_entries)
    size = tokens_of_a_pass(q.shape[1], q.shape[2], min(step, columns) * per_block)
    found = []
    for start in range(0, q.shape[0], size):
        tokens = slice(start, start + size)
        rows, factors = q[tokens].float(), weights[tokens].float()
        best = torch.full((rows.shape[0], topk), _LEAST, dtype=torch.int64, device=q.device)
        for column in range(0, columns, step):
            keys = gather_piece(paged, tokens, slice(column, min(column + step, columns)))
            scores = piece_scores(rows, factors, keys)
            piece = sort_keys(scores, column * per_block, seen[tokens])
            best = torch.topk(torch.cat((best, piece), dim=1), topk, dim=1, sorted=False).values
        found.append(entries_of(best))
    return torch.cat(found)
