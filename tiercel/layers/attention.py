"""Attention of a dense decoder: where keys and values are written and read.

Order matters: q and k are normed per head (if the model does), then rotated, then k and v go to
their cache slots, then every new token attends over the cache. So a chunk's own keys are read back
from the cache, for whole prompts, chunks and single tokens alike. Two ops read it. Decode attention
serves up to 16 new tokens a request, where the cost is reading the cache; prefill attention serves
more tokens, where the cost is multiplying. Items to score take prefill attention, which reads their
own keys from this step's projections.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.batch import Batch, PackedItems
from tiercel.cache.spec import KVCacheSpec, attention_spec
from tiercel.config import MAX_DECODE_QUERIES
from tiercel.env import (
    has_attention_image,
    has_fused_gemm_heads,
    has_fused_gemm_norm,
    prefetched_keys,
)
from tiercel.layers.linear import Linear
from tiercel.ops.decode_attention import (
    decode_attention,
    decode_attention_image,
    prepare_decode_attention,
    writes_image,
)
from tiercel.ops.packed_gemm import (
    TokenImage,
    keys_ahead,
    load_packed_gemm,
    packed_gemm_heads,
)
from tiercel.ops.packed_matvec import PackedWeight
from tiercel.ops.prefill_attention import (
    plan_prefill_attention,
    prefill_attention,
    tile_prefill_attention,
)
from tiercel.ops.prefill_attention_plan import PlannedTiles, PrefillAttentionPlan
from tiercel.ops.rotary_kv_write import rotary_kv_write


class AttentionShape(Struct, frozen=True):
    """Heads and masks of one layer; window 0 is full attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int


class PromptPlan(Struct, frozen=True):
    """Attention metadata that layers of one shape and cache group share in a step of long queries.

    Attributes:
        tiles: of prefill attention; None on a CPU.
        tables: (R, max_blocks) int32, the block table of each request.
    """

    tiles: PrefillAttentionPlan | None
    tables: Tensor


class HeadNorms(Struct, frozen=True):
    """Weights of the norms of query and key heads, (head_dim,) float32, and their eps."""

    q: Tensor
    k: Tensor
    eps: float


class Attention:
    """Wo softmax(scale * q k^T) v over the paged cache."""

    def __init__(
        self,
        shape: AttentionShape,
        qkv: Linear,
        output: Linear,
        rope_table: Tensor,
        head_norms: HeadNorms | None = None,
    ) -> None:
        self.shape = shape
        self.qkv = qkv
        self.output = output
        self.rope_table = rope_table
        self.head_norms = head_norms
        self.k_cache = self.v_cache = torch.empty(0)  # set by bind_cache
        self.group = 0
        self._writes_images = has_attention_image()
        self._joins_heads = has_fused_gemm_heads()
        self._prefetched = 0 if shape.window else prefetched_keys()
        self._is_scaled = has_fused_gemm_norm()  # whether inputs may be images of products
        self._head_weights: tuple[PackedWeight, ...] = ()  # of products that end with heads

    def cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """The keys and values that this layer keeps for each token."""
        shape = self.shape
        return attention_spec(shape.num_kv_heads, shape.head_dim, dtype, shape.window)

    def bind_cache(self, planes: dict[str, Tensor], group: int) -> None:
        """Take the planes that this layer writes and reads, found through a group's tables."""
        self.k_cache, self.v_cache, self.group = planes["k"], planes["v"], group
        prepare_decode_attention(self.k_cache, self.shape.num_heads, self._image_order())
        self._load_head_weights()

    def plan(self, batch: Batch) -> PromptPlan | None:
        """The plan for all layers of this shape and group; None where no query is long."""
        if _is_short(batch):
            return None
        tables = batch.block_tables[self.group].index_select(0, batch.rows)
        if batch.plans is not None:
            kept = batch.plans[self.shape]
            assert isinstance(kept, PrefillAttentionPlan), "made by `tiles`"
            return PromptPlan(kept, tables)
        items = batch.items
        tiles = plan_prefill_attention(
            batch.query_lens,
            batch.context_lens,
            num_heads=self.shape.num_heads,
            k_cache=self.k_cache,
            window=self.shape.window,
            prefix_len=None if items is None else items.prefix_len,
            item_start=None if items is None else items.item_start,
        )
        return PromptPlan(tiles, tables)

    def tiles(
        self, query_lens: Sequence[int], context_lens: Sequence[int], items: PackedItems
    ) -> PlannedTiles:
        """The tiles that `plan` uploads, for graphs to keep: one kernel for all lengths."""
        return tile_prefill_attention(
            query_lens,
            context_lens,
            num_heads=self.shape.num_heads,
            k_cache=self.k_cache,
            window=self.shape.window,
            prefix_len=items.prefix_len,
            item_start=items.item_start,
        )

    def __call__(self, x: Tensor | TokenImage, batch: Batch, plan: PromptPlan | None) -> Tensor:
        """x: (T, hidden); plan: of this step and shape. Returns (T, hidden)."""
        return self.output(self.heads(x, batch, plan))

    def heads(
        self, x: Tensor | TokenImage, batch: Batch, plan: PromptPlan | None
    ) -> Tensor | TokenImage:
        """The same before the last projection, (T, rows of q), as that is fastest from."""
        if plan is None and self._head_weights and self.qkv.image_orders(x.shape[0]):
            heads = self._queries(x, batch)
        else:
            heads = self._rotate(self.qkv(x), batch)
        q, order = heads[:, : self.shape.num_heads], self._image_order(heads.shape[0])
        if plan is not None or not order or not writes_image(q, self.k_cache, batch):
            return self.attend(heads, batch, plan)
        shape, caches = self.shape, (self.k_cache, self.v_cache)
        return decode_attention_image(
            q, *caches, batch, shape.scale, order, group=self.group, window=shape.window
        )

    def _image_order(self, rows: int | None = None) -> int:
        """Of the image that the last projection reads; 0 if it reads none, or several."""
        orders = self.output.image_orders(rows) if self._writes_images else ()
        return orders[0] if len(orders) == 1 else 0

    def _queries(self, x: Tensor | TokenImage, batch: Batch) -> Tensor:
        """The same as `_rotate` of the first projection, by it; (T, heads of q, head_dim)."""
        norms = self.head_norms
        return packed_gemm_heads(
            x,
            self._head_weights,
            batch.positions,
            self.rope_table,
            self.k_cache,
            self.v_cache,
            batch.slot_mapping[self.group],
            num_heads=self.shape.num_heads,
            norms=() if norms is None else (norms.q, norms.k),
            eps=0.0 if norms is None else norms.eps,
            prefetch=keys_ahead(
                batch.block_tables[self.group], batch.rows, batch.seq_lens, self._prefetched
            ),
        )

    def _load_head_weights(self) -> None:
        """Load every kernel that `_queries` may launch, if the first projection has them."""
        head_dim = self.shape.head_dim
        rotates_whole = 2 * self.rope_table.shape[2] == head_dim
        if not (self._joins_heads and rotates_whole and self.k_cache.is_cuda):
            return
        self._head_weights = self.qkv.into_heads(head_dim, self.k_cache.dtype)
        for index, part in enumerate(self._head_weights):
            kind = head_dim, self.head_norms is not None, index == 0 and self._prefetched > 0
            for is_scaled in {False, self._is_scaled}:
                load_packed_gemm(part, torch.float16, is_scaled=is_scaled, heads=kind)

    def rope_and_attend(self, heads: Tensor, batch: Batch, plan: PromptPlan | None) -> Tensor:
        """Norm and rotate q and k, write k and v to the cache, and attend: all between projections.

        Args:
            heads: (T, rows of q, k and v) from the first projection, mutated.
            batch: the step.
            plan: of this step and shape.

        Returns:
            (T, rows of q).
        """
        return self.attend(self._rotate(heads, batch), batch, plan)

    def _rotate(self, heads: Tensor, batch: Batch) -> Tensor:
        """Norm and rotate q and k, and write k and v. Returns (T, all heads, head_dim)."""
        heads = heads.view(heads.shape[0], -1, self.shape.head_dim)
        slots, norms = batch.slot_mapping[self.group], self.head_norms
        if norms is None:
            rotary_kv_write(
                heads, batch.positions, self.rope_table, self.k_cache, self.v_cache, slots
            )
        else:
            rotary_kv_write(
                heads,
                batch.positions,
                self.rope_table,
                self.k_cache,
                self.v_cache,
                slots,
                q_weight=norms.q,
                k_weight=norms.k,
                eps=norms.eps,
            )
        return heads

    def attend(self, heads: Tensor, batch: Batch, plan: PromptPlan | None) -> Tensor:
        """heads: (T, all heads, head_dim), rotated and in the cache. Returns (T, rows of q)."""
        shape, caches = self.shape, (self.k_cache, self.v_cache)
        q = heads[:, : shape.num_heads]
        if plan is None:
            return decode_attention(
                q, *caches, batch, shape.scale, group=self.group, window=shape.window
            )
        items = batch.items
        k = v = None
        if items is not None:
            k, v = heads[:, shape.num_heads :].chunk(2, dim=1)
        return prefill_attention(
            q,
            *caches,
            plan.tables,
            batch.query_lens,
            batch.context_lens,
            shape.scale,
            window=shape.window,
            prefix_len=None if items is None else items.prefix_len,
            item_start=None if items is None else items.item_start,
            k_new=k,
            v_new=v,
            plan=plan.tiles,
        )


def _is_short(batch: Batch) -> bool:
    """Whether every request has few new tokens and no items."""
    return batch.items is None and batch.max_query_len <= MAX_DECODE_QUERIES
