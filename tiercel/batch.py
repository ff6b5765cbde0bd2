"""One step of the engine as tensors: the only argument of a model's forward.

R requests with `query_len >= 1` new tokens each follow one another in T tokens: prefill chunks and
decode steps are the same varlen batch. Keys and values are found through `block_tables`, whose rows
are the engine's request rows; a batch names its rows in `rows`.

Items to score follow the tokens of their request. Each item sees the prefix and itself alone. Keys
and values of items come from the step's own projections and go to no slot. Causality uses the index
in the sequence, rotary embedding uses `positions`. The two differ only for items: the positions of
each item continue after the prefix.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from msgspec import Struct
from torch import Tensor


class PackedItems(Struct, frozen=True):
    """Where the items of a step begin, on the host: tiles are planned from it.

    Attributes:
        prefix_len: tokens before the items of each request; its length or more if it has none.
        item_start: (T,) int32 on a CPU: of an item token, the index of its item's first token.
    """

    prefix_len: tuple[int, ...]
    item_start: Tensor


class BatchLengths(Struct, frozen=True):
    """The lengths of a step as the host knows them; attention metadata is planned from them.

    Attributes:
        query_lens: new tokens of each request.
        context_lens: its length with them.
        items: of the step.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    items: PackedItems


@dataclass(frozen=True, slots=True)
class Batch:
    """R requests, T new tokens, G cache groups, S rows, L logits rows, all on one device.

    A CUDA graph records one batch and serves many steps: `num_tokens` and `num_reqs` are those of
    all of them, with padding, `max_query_len` and `max_seq_len` are bounds of all of them, and
    `query_lens` and `context_lens` tell of none. A model without plans takes lengths from the
    device, and sizes of tensors and launches from these counts and bounds.

    Attributes:
        input_ids: (T,) int32.
        positions: (T,) int32, for rotary embedding.
        cu_seqlens_q: (R + 1,) int32, the index of the first token of each request, then T.
        seq_lens: (R,) int32, context including this step, without items.
        rows: (R,) int32, the engine row of each request.
        logits_rows: (L,) int32, indices of the tokens whose logits are wanted.
        slot_mapping: (G, T) int64, cache slot of each new token; -1 writes nothing.
        block_tables: (G, S, max_blocks) int32, read through `rows`; 0 is the null block.
        query_lens: new tokens of each request, on the host.
        context_lens: `seq_lens` as the host knows them (an upper bound when steps overlap), with
            items.
        num_tokens: T.
        num_reqs: R.
        max_query_len: bound of the new tokens of each request, padding too.
        max_seq_len: bound of `seq_lens`.
        items: of the step; None without any.
        plans: attention metadata that was made ahead of the step, by keys of the model; its layers
            alone read it. None: they plan from the lengths.
        rank_tokens: where each of several ranks has requests of its own, the tokens that each
            brings to the experts, T or more of this one; empty where all have the same.
    """

    input_ids: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    rows: Tensor
    logits_rows: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    items: PackedItems | None = None
    plans: Mapping[Hashable, object] | None = None
    rank_tokens: tuple[int, ...] = ()
