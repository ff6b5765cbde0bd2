"""Attention over gathered latent vectors with PyTorch operators on any device.

K and V are the same vector, shared by all heads. Each token has its own list of slots; -1 is no
key. All is float32; tokens go in passes, so that the gathered vectors fit a fixed workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.ops.block_quantize_torch import decode_kv

WORKSPACE_BYTES = 1 << 28  # of the vectors and scores of some tokens; at least one token


@dataclass(frozen=True, slots=True)
class PagedEntries:
    """Which entries of its sequence each token attends to: chosen ones, or the last of a run.

    Attributes:
        block_tables: (sequences, columns) int32 or int64, blocks of each sequence in order.
        seq_ids: (T,) int32 or int64, each token's row of `block_tables`.
        num_entries: most entries of a token.
        chosen: (T, num_entries) int32 or int64, -1 for none; None where `ends` is given.
        ends: (T,) int32 or int64: a token attends to the last `num_entries` entries before its
            end; None where `chosen` is given.
    """

    block_tables: Tensor
    seq_ids: Tensor
    num_entries: int
    chosen: Tensor | None = None
    ends: Tensor | None = None

    def slots(self, tokens: slice, per_block: int) -> Tensor:
        """Slots (tokens, num_entries) int64 in blocks of `per_block` entries; -1 for none."""
        if self.chosen is not None:
            number = self.chosen[tokens].long()
            is_seen = number >= 0
        else:
            assert self.ends is not None, "a list has chosen entries or ends"
            ends = self.ends[tokens].long().unsqueeze(1)
            place = torch.arange(self.num_entries, device=ends.device)
            number = (ends - self.num_entries).clamp(min=0) + place
            is_seen = number < ends
        number = torch.where(is_seen, number, 0)
        column = (number // per_block).clamp(max=self.block_tables.shape[1] - 1)
        blocks = self.block_tables[self.seq_ids[tokens].unsqueeze(1), column].long()
        return torch.where(is_seen, blocks * per_block + number % per_block, -1)


@dataclass(frozen=True, slots=True)
class SlottedKV:
    """Latent vectors in blocks, and which of them each token attends to.

    Attributes:
        cache: (num_blocks, entries_per_block, d) float, or (..., d + rotary_dim) uint8, the data
            bytes of encoded entries (see `encode_kv_entries`); with any strides.
        slots: (T, n) int32 or int64, block * entries_per_block + offset; -1 for no key. Or the
            entries of paged sequences, whose slots are found where they are read.
        scales: (num_blocks, entries_per_block, scale bytes) uint8 for encoded entries, else None.
        rotary_dim: bfloat16 channels of encoded entries.
    """

    cache: Tensor
    slots: Tensor | PagedEntries
    scales: Tensor | None = None
    rotary_dim: int = 0

    @property
    def head_dim(self) -> int:
        """Channels of a vector."""
        width = self.cache.shape[-1]
        return width - self.rotary_dim if self.cache.dtype == torch.uint8 else width

    @property
    def num_keys(self) -> int:
        """Most keys of a token."""
        slots = self.slots
        return slots.num_entries if isinstance(slots, PagedEntries) else slots.shape[1]

    def slots_of(self, tokens: slice) -> Tensor:
        """Slots of some tokens, (tokens, num_keys) int64."""
        if isinstance(self.slots, PagedEntries):
            return self.slots.slots(tokens, self.cache.shape[1])
        return self.slots[tokens].long()


def gather(keys: SlottedKV, slots: Tensor) -> Tensor:
    """Vectors of slots (T, n) int64, (T, n, d) float32; zeros where there is no key.

    Zeros instead of whatever slot 0 holds: weight 0 times NaN would be NaN.
    """
    is_key = (slots >= 0).unsqueeze(-1)
    slots = slots.clamp(min=0)
    per_block = keys.cache.shape[1]
    place = (slots // per_block, slots % per_block)
    rows = keys.cache[place]
    if keys.scales is not None:
        rows = decode_kv(rows, keys.scales[place], keys.rotary_dim)
    return torch.where(is_key, rows.float(), 0.0)


def softmax_sum(
    q: Tensor, kv: Tensor, is_key: Tensor, sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (T, heads, d) and log-sum-exp (T, heads) of q over kv (T, n, d), float32.

    The sink, (heads,), is part of the denominator and of the log-sum-exp.
    """
    scores = torch.bmm(q, kv.transpose(1, 2)) * scale
    scores = scores.masked_fill(~is_key.unsqueeze(1), -torch.inf)
    if sink is not None:
        extra = sink.float().view(1, -1, 1).expand(q.shape[0], -1, 1)
        scores = torch.cat((scores, extra), dim=2)
    top = scores.amax(dim=2, keepdim=True) if scores.shape[2] else q.new_full((1, 1, 1), -torch.inf)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=2, keepdim=True)
    out = torch.bmm(weights[..., : kv.shape[1]], kv)
    out = torch.where(total == 0, 0.0, out / total)
    return out, (top + total.log()).squeeze(2)


def tokens_of_a_pass(num_heads: int, head_dim: int, num_keys: int) -> int:
    """Tokens whose vectors and scores fit the workspace. Pure."""
    per_key = 12 * head_dim + 12 * num_heads  # rows, decoded rows, zeroed rows; scores, weights
    return max(1, WORKSPACE_BYTES // (per_key * max(1, num_keys)))


def attend(
    q: Tensor, parts: tuple[SlottedKV, ...], sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys of all parts in one softmax, float32."""
    num_tokens, num_heads, head_dim = q.shape
    num_keys = sum(part.num_keys for part in parts)
    step = tokens_of_a_pass(num_heads, head_dim, num_keys)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for start in range(0, num_tokens, step):
        tokens = slice(start, start + step)
        slots = [part.slots_of(tokens) for part in parts]
        kv = torch.cat([gather(*pair) for pair in zip(parts, slots, strict=True)], dim=1)
        is_key = torch.cat(slots, dim=1) >= 0
        out[tokens], lse[tokens] = softmax_sum(q[tokens].float(), kv, is_key, sink, scale)
    return out, lse


def merge(outs: Tensor, lses: Tensor, sink: Tensor | None) -> Tensor:
    """Join (parts, T, heads, d) outputs by their (parts, T, heads) log-sum-exp, float32."""
    top = lses.amax(dim=0)
    if sink is not None:
        top = torch.maximum(top, sink.float())
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    if sink is not None:
        total = total + torch.exp(sink.float() - top)
    weights = torch.where(weights == 0, 0.0, weights / total).unsqueeze(-1)
    # An empty part counts for nothing, whatever its output holds.
    return torch.where(weights == 0, 0.0, weights * outs.float()).sum(0)
