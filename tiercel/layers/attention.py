"""Attention of a dense decoder: where keys and values are written and read.

Order matters: q and k are normed per head (if the model does), then rotated, then k and v go to
their cache slots, then every new token attends over the cache. So a chunk's own keys are read back
from the cache, whole prompts, chunks and single tokens alike. Two ops read it: one for up to 16
new tokens a request, whose cost is reading the cache, and one for more, whose cost is multiplying.
Items to score take the second one, which reads their own keys from this step's projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tiercel.batch import Batch, PackedItems
from tiercel.cache.spec import KVCacheSpec, attention_spec
from tiercel.layers.linear import Linear
from tiercel.layers.norm import RMSNorm
from tiercel.ops.kv_write import kv_write
from tiercel.ops.multi_item_attention import (
    multi_item_attention,
    plan_multi_item_attention,
    tile_multi_item_attention,
)
from tiercel.ops.paged_attention import MAX_DECODE_QUERIES, paged_attention
from tiercel.ops.rotary import rotary_

if TYPE_CHECKING:
    from tiercel.kernels.attention_tiles import MultiItemAttentionPlan, PlannedTiles


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and masks of one layer; window 0 is full attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int


class Attention:
    """Wo softmax(scale * q k^T) v over the paged cache."""

    def __init__(
        self,
        shape: AttentionShape,
        qkv: Linear,
        output: Linear,
        rope_table: Tensor,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self.shape = shape
        self.qkv = qkv
        self.output = output
        self.rope_table = rope_table
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.k_cache = self.v_cache = torch.empty(0)  # set by bind_cache
        self.group = 0

    def cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """What this layer keeps per token."""
        shape = self.shape
        return attention_spec(shape.num_kv_heads, shape.head_dim, dtype, shape.window)

    def bind_cache(self, planes: dict[str, Tensor], group: int) -> None:
        """Take the planes that this layer writes and reads, found through a group's tables."""
        self.k_cache, self.v_cache, self.group = planes["k"], planes["v"], group

    def plan(self, batch: Batch) -> MultiItemAttentionPlan | None:
        """Tiles of a step with long queries, the same for all layers of this shape; or None."""
        if _is_short(batch):
            return None
        if batch.plans is not None:
            return batch.plans[self.shape]
        items = batch.items
        return plan_multi_item_attention(
            batch.query_lens,
            batch.context_lens,
            num_heads=self.shape.num_heads,
            k_cache=self.k_cache,
            window=self.shape.window,
            prefix_len=None if items is None else items.prefix_len,
            item_start=None if items is None else items.item_start,
        )

    def tiles(
        self, query_lens: Sequence[int], context_lens: Sequence[int], items: PackedItems
    ) -> PlannedTiles:
        """What `plan` would upload, for whoever keeps plans in a buffer."""
        return tile_multi_item_attention(
            query_lens,
            context_lens,
            num_heads=self.shape.num_heads,
            k_cache=self.k_cache,
            window=self.shape.window,
            prefix_len=items.prefix_len,
            item_start=items.item_start,
        )

    def __call__(self, x: Tensor, batch: Batch, plan: MultiItemAttentionPlan | None) -> Tensor:
        """x: (T, hidden); plan: of this step and shape. Returns (T, hidden)."""
        shape = self.shape
        heads = self.qkv(x).view(x.shape[0], -1, shape.head_dim)
        rotating = shape.num_heads + shape.num_kv_heads
        v = heads[:, rotating:]
        if self.q_norm is not None and self.k_norm is not None:
            q = rotary_(self.q_norm(heads[:, : shape.num_heads]), batch.positions, self.rope_table)
            k = rotary_(
                self.k_norm(heads[:, shape.num_heads : rotating]), batch.positions, self.rope_table
            )
        else:
            rotated = rotary_(heads[:, :rotating], batch.positions, self.rope_table)
            q, k = rotated[:, : shape.num_heads], rotated[:, shape.num_heads :]
        kv_write(k, v, self.k_cache, self.v_cache, batch.slot_mapping[self.group])
        return self.output(self._attend(q, k, v, batch, plan))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, plan: MultiItemAttentionPlan | None
    ) -> Tensor:
        shape, caches = self.shape, (self.k_cache, self.v_cache)
        if _is_short(batch):
            return paged_attention(
                q, *caches, batch, shape.scale, group=self.group, window=shape.window
            )
        items = batch.items
        tables = batch.block_tables[self.group].index_select(0, batch.rows)
        return multi_item_attention(
            q,
            *caches,
            tables,
            batch.query_lens,
            batch.context_lens,
            shape.scale,
            window=shape.window,
            prefix_len=None if items is None else items.prefix_len,
            item_start=None if items is None else items.item_start,
            k_new=None if items is None else k,
            v_new=None if items is None else v,
            plan=plan,
        )


def _is_short(batch: Batch) -> bool:
    """Whether every request has few new tokens and no items."""
    return batch.items is None and batch.max_query_len <= MAX_DECODE_QUERIES
