"""Attention of prompts over the paged cache: whole, in chunks, or with items behind a prefix."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.attention_tiles import read_positions
from tiercel.kernels.gathered_attention import attend_one, first_key, gather_cache

if TYPE_CHECKING:
    from tiercel.kernels.attention_tiles import MultiItemAttentionPlan, PromptTiles
    from tiercel.kernels.multi_item_attention import MultiItemAttentionConfig


def multi_item_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    *,
    window: int = 0,
    prefix_len: Sequence[int] | None = None,
    item_start: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    plan: MultiItemAttentionPlan | None = None,
) -> Tensor:
    """softmax(scale * q k^T + mask) v for every new token; keys below P are in the cache already.

    The token at index i of its sequence sees key j iff j <= i and (j < P or j >= its item_start).
    Without items P is the whole length: plain causal attention. Keys below P are read from the
    cache, also those of this step; item keys from `k_new` and `v_new`, never from the cache.

    Args:
        q: (T, num_heads, head_dim), requests end to end; head i reads key/value head
            i // (num_heads / num_kv_heads).
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim) contiguous, dtype of q. On Hopper
            slots that nobody sees are multiplied by 0, so the whole pool must be finite.
        v_cache: like k_cache.
        block_tables: (R, max_blocks) int32, one row per request of this call.
        query_lens: new tokens of each request, >= 1.
        context_lens: its length with them, exactly: tiles are planned from it.
        scale: multiplies the scores, > 0.
        window: with w > 0 a token sees keys at a distance below w. Positions of an item go on
            behind P, so that it sees the prefix as if it were alone with it.
        prefix_len: P of each request, its length or more if it has no items; None: no items.
        item_start: (T,) int32 on the host: for a token from P on, the index of the first token of
            its item, rising; its own index + 1 for a token that sees the prefix alone.
        k_new: (T, num_kv_heads, head_dim), this step's keys; needed with items.
        v_new: like k_new.
        plan: from `plan_multi_item_attention` for these lengths, one for all layers; without it a
            GPU call plans for itself, which a graph cannot capture. A CPU ignores it.

    Returns:
        (T, num_heads * head_dim), dtype of q; softmax in float32; zeros where nothing is seen.

    Raises:
        ArgumentError: shapes, dtypes or lengths disagree, or an item begins outside of its step.

    Sources: FlashInfer pull request 1015 (the mask); "FlashAttention-3", arXiv 2407.08608.
    """
    _check_tensors(q, k_cache, v_cache, k_new, v_new)
    lengths = _read_lengths(query_lens, context_lens, prefix_len, item_start)
    _check_step(q, k_cache, block_tables, lengths, scale, window)
    if k_new is None or v_new is None:
        if lengths.has_items:
            raise ArgumentError(
                "multi_item_attention: there are items, but not both k_new and v_new.",
                hint="Pass this step's keys and values: those of items are not in the cache.",
            )
        k_new = v_new = k_cache.flatten(0, 1)  # not read
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tensors = (_aligned(q), k_cache, v_cache, block_tables, _aligned(k_new), _aligned(v_new), out)
    if query_lens and q.is_cuda:
        _attend_cuda(*tensors, lengths, plan, scale, window)
    elif query_lens:
        _attend_cpu(*tensors, lengths, scale, window)
    return out.flatten(1)


def plan_multi_item_attention(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int,
    k_cache: Tensor,
    window: int = 0,
    prefix_len: Sequence[int] | None = None,
    item_start: Tensor | None = None,
) -> MultiItemAttentionPlan | None:
    """Plan the tiles of a step once for all layers of one kind; None on a CPU, which needs none.

    Args:
        query_lens: as in the op, and so the rest.
        context_lens: as in the op.
        num_heads: query heads of the layers.
        k_cache: the key cache of one of the layers.
        window: of the layers.
        prefix_len: as in the op.
        item_start: as in the op.
    """
    lengths = _read_lengths(query_lens, context_lens, prefix_len, item_start)
    if not k_cache.is_cuda or not query_lens:
        return None
    return _make_plan(lengths, num_heads // k_cache.shape[2], k_cache, window)


def make_prompt_tiles(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int,
    k_cache: Tensor,
    window: int,
    longest: int,
    spare: int,
) -> PromptTiles:
    """Plan a step of prompts without items on the host, in a table of fixed length.

    Args:
        query_lens: as in the op, and so the rest.
        context_lens: as in the op.
        num_heads: query heads of the layers.
        k_cache: on a GPU.
        window: of the layers.
        longest: bound of `context_lens` that chooses the kernel.
        spare: requests that the table has room for.
    """
    from tiercel.kernels.attention_tiles import make_padded_tiles

    group, lengths = num_heads // k_cache.shape[2], _Lengths((), (longest,), (longest,), None)
    config = _config(lengths, group, k_cache, window)
    return make_padded_tiles(config, query_lens, context_lens, group, spare)


def multi_item_attention_packed(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    *,
    prefix_len_ptr: Tensor,
    token_pos_in_items_ptr: Tensor,
    token_pos_in_items_len: int,
    max_item_len_ptr: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    window: int = 0,
) -> Tensor:
    """The op under the four arguments of FlashInfer; they are read on the host.

    Args:
        q: as in the op, and so those that are not named here.
        k_cache: as in the op.
        v_cache: as in the op.
        block_tables: as in the op.
        query_lens: as in the op.
        context_lens: as in the op.
        scale: as in the op.
        prefix_len_ptr: (R,) uint32, P of each request.
        token_pos_in_items_ptr: (R * stride,) uint16: of the tokens from P on, 1 to L within an item
            and 0 for a delimiter, which may be left out; what lies beyond a request's length is
            not read.
        token_pos_in_items_len: stride.
        max_item_len_ptr: (R,) uint16, the longest item of each request. Only checked: tiles are
            skipped exactly without it.
        k_new: as in the op.
        v_new: as in the op.
        window: as in the op.

    Raises:
        ArgumentError: as in the op; or an argument does not fit, with its value.

    Source: FlashInfer pull request 1015.
    """
    named = {
        "prefix_len_ptr": (prefix_len_ptr, torch.uint32, len(query_lens)),
        "token_pos_in_items_ptr": (
            token_pos_in_items_ptr,
            torch.uint16,
            len(query_lens) * token_pos_in_items_len,
        ),
        "max_item_len_ptr": (max_item_len_ptr, torch.uint16, len(query_lens)),
    }
    for name, (tensor, dtype, count) in named.items():
        if tensor.dtype != dtype or tensor.shape != (count,):
            raise ArgumentError(
                f"multi_item_attention: {name} is {tensor.dtype} {tuple(tensor.shape)}.",
                hint=f"Pass {dtype} ({count},) for {len(query_lens)} requests.",
            )
    prefixes, places, longest = (x.cpu().numpy().astype(np.int64) for x, *_ in named.values())
    starts = read_positions(query_lens, context_lens, prefixes, places, longest)
    return multi_item_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        query_lens,
        context_lens,
        scale,
        window=window,
        prefix_len=prefixes.tolist(),
        item_start=torch.from_numpy(starts),
        k_new=k_new,
        v_new=v_new,
    )


@dataclass(frozen=True, slots=True)
class _Lengths:
    """A step as the host knows it.

    Attributes:
        query: new tokens of each request.
        context: its length with them.
        prefix: P of each request, at most its length.
        item_start: (T,) int32, None without items.
    """

    query: tuple[int, ...]
    context: tuple[int, ...]
    prefix: tuple[int, ...]
    item_start: npt.NDArray[np.int32] | None

    @property
    def has_items(self) -> bool:
        return self.item_start is not None


def _read_lengths(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    prefix_len: Sequence[int] | None,
    item_start: Tensor | None,
) -> _Lengths:
    """Check lengths and item starts among each other."""
    query, context = tuple(query_lens), tuple(context_lens)
    is_fit = all(0 < new <= length for new, length in zip(query, context, strict=False))
    if len(query) != len(context) or not is_fit:
        raise ArgumentError(
            f"multi_item_attention: query_lens {query} do not fit context_lens {context}.",
            hint="Give each request 1 or more new tokens, at most its length.",
        )
    if prefix_len is None and item_start is None:
        return _Lengths(query, context, context, None)
    if prefix_len is None or item_start is None or item_start.is_cuda:
        raise ArgumentError(
            "multi_item_attention: prefix_len and item_start do not both lie on the host.",
            hint="Pass both, a sequence and a CPU tensor, or neither.",
        )
    prefix = tuple(min(p, length) for p, length in zip(prefix_len, context, strict=False))
    starts = item_start.numpy()
    if (
        len(prefix_len) != len(query)
        or min(prefix_len, default=0) < 0
        or starts.shape != (sum(query),)
        or starts.dtype != np.int32
    ):
        raise ArgumentError(
            f"multi_item_attention: prefix_len {tuple(prefix_len)} and item_start "
            f"{starts.shape} {starts.dtype} do not fit {len(query)} requests, {sum(query)} tokens.",
            hint="Pass a prefix_len >= 0 per request and an int32 item_start per token.",
        )
    _check_items(query, context, prefix, starts)
    return _Lengths(query, context, prefix, starts if prefix != context else None)


def _check_items(
    query: tuple[int, ...],
    context: tuple[int, ...],
    prefix: tuple[int, ...],
    starts: npt.NDArray[np.int32],
) -> None:
    """Every item must rise, and begin in this step behind the prefix."""
    at = 0
    for request, (new, length) in enumerate(zip(query, context, strict=True)):
        first = length - new
        least = max(first, prefix[request])
        own = starts[at + least - first : at + new]
        at += new
        is_sound = (own >= least) & (own <= np.arange(least, length) + 1)
        is_sound[1:] &= own[1:] >= own[:-1]
        if not is_sound.all():
            bad = int(np.argmin(is_sound))
            raise ArgumentError(
                f"multi_item_attention: item_start of request {request} at index {least + bad} "
                f"is {int(own[bad])}.",
                hint=f"From index {least} on (prefix and cached tokens end there) it must rise, "
                f"from {least} or more to at most a token's own index + 1.",
            )


def _check_tensors(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k_new: Tensor | None, v_new: Tensor | None
) -> None:
    is_fit = (
        q.dim() == 3
        and k_cache.dim() == 4
        and q.shape[2] == k_cache.shape[3]
        and q.shape[1] % k_cache.shape[2] == 0
    )
    if not is_fit:
        raise ArgumentError(
            f"multi_item_attention: q {tuple(q.shape)} does not fit a cache of "
            f"{tuple(k_cache.shape)}.",
            hint="Heads must be a multiple of the cache's, with equal head sizes.",
        )
    contiguous = k_cache.is_contiguous() and v_cache.is_contiguous()
    if k_cache.shape != v_cache.shape or not contiguous:
        raise ArgumentError(
            f"multi_item_attention: caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} are "
            "not equal and contiguous.",
            hint="Pass contiguous caches of one shape.",
        )
    new = (len(q), *k_cache.shape[2:])
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        if tensor is not None and tuple(tensor.shape) != new:
            raise ArgumentError(
                f"multi_item_attention: {name} has shape {tuple(tensor.shape)}.",
                hint=f"For these queries and caches it is {new}.",
            )
    tensors = [q, k_cache, v_cache, *(x for x in (k_new, v_new) if x is not None)]
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        raise ArgumentError(
            f"multi_item_attention: tensors are of {sorted(map(str, kinds))}.",
            hint="Pass one dtype and one device.",
        )


def _check_step(
    q: Tensor,
    k_cache: Tensor,
    block_tables: Tensor,
    lengths: _Lengths,
    scale: float,
    window: int,
) -> None:
    if len(q) != sum(lengths.query):
        raise ArgumentError(
            f"multi_item_attention: q has {len(q)} tokens, query_lens {sum(lengths.query)}.",
            hint="Pass the queries of all requests end to end.",
        )
    blocks = -(-max(lengths.prefix, default=0) // k_cache.shape[1])
    if block_tables.dtype != torch.int32 or block_tables.device != q.device:
        raise ArgumentError(
            f"multi_item_attention: block_tables are {block_tables.dtype} on "
            f"{block_tables.device}.",
            hint=f"Pass int32 on {q.device}.",
        )
    if block_tables.dim() != 2 or len(block_tables) != len(lengths.query):
        raise ArgumentError(
            f"multi_item_attention: block_tables {tuple(block_tables.shape)} do not fit "
            f"{len(lengths.query)} requests.",
            hint="Select one row per request.",
        )
    if block_tables.shape[1] < blocks or (block_tables.numel() and block_tables.stride(1) != 1):
        raise ArgumentError(
            f"multi_item_attention: block_tables {tuple(block_tables.shape)} hold too few blocks, "
            "or they are not adjacent.",
            hint=f"These prefixes need {blocks} blocks of {k_cache.shape[1]} tokens.",
        )
    if not scale > 0 or window < 0:
        raise ArgumentError(
            f"multi_item_attention: scale={scale} and window={window} cannot be used.",
            hint="Use a scale above 0, and a window of 0 (none) or more.",
        )


def _aligned(x: Tensor) -> Tensor:
    """(tokens, heads, head_dim) with adjacent heads and tokens at multiples of 16 bytes."""
    is_adjacent = x.stride()[1:] == (x.shape[2], 1)
    is_at_16 = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    if is_adjacent and (is_at_16 or not x.is_cuda):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _make_plan(
    lengths: _Lengths, group: int, k_cache: Tensor, window: int
) -> MultiItemAttentionPlan:
    from tiercel.kernels.attention_tiles import make_plan, make_tiles

    config = _config(lengths, group, k_cache, window)
    step = config.block_m // group
    tiles = make_tiles(lengths.query, lengths.context, lengths.prefix, lengths.item_start, step)
    return make_plan(config, tiles, lengths.item_start, k_cache.device)


def _config(
    lengths: _Lengths, group: int, k_cache: Tensor, window: int
) -> MultiItemAttentionConfig:
    from tiercel.kernels.multi_item_attention import select_multi_item_attention

    return select_multi_item_attention(
        k_cache.dtype,
        k_cache.shape[3],
        group,
        k_cache.shape[1],
        window if window < max(lengths.context) else 0,
        max(lengths.prefix),
        torch.cuda.get_device_capability(k_cache.device),
    )


def _attend_cuda(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    out: Tensor,
    lengths: _Lengths,
    plan: MultiItemAttentionPlan | None,
    scale: float,
    window: int,
) -> None:
    from tiercel.kernels.multi_item_attention import launch_multi_item_attention

    group = q.shape[1] // k_cache.shape[2]
    if plan is None:
        plan = _make_plan(lengths, group, k_cache, window)
    config = _config(lengths, group, k_cache, window)
    if plan.config != config or plan.num_tokens != len(q):
        raise ArgumentError(
            f"multi_item_attention: the plan is of {plan.num_tokens} tokens and {plan.config}, "
            f"the call of {len(q)} and {config}.",
            hint="Make the plan from the lengths and the shape of this call.",
        )
    launch_multi_item_attention(
        q, k_cache, v_cache, block_tables, k_new, v_new, out, plan, scale, window
    )


def _attend_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    out: Tensor,
    lengths: _Lengths,
    scale: float,
    window: int,
) -> None:
    """One fused call for the prefix of each request and for each item."""
    at = 0
    for request, (new, length) in enumerate(zip(lengths.query, lengths.context, strict=True)):
        first, prefix = length - new, lengths.prefix[request]
        # Items read from the sequence's start.
        seen = first_key(first, new, window) if prefix == length else 0
        k_prefix, v_prefix = (
            gather_cache(cache, block_tables[request], prefix, seen)
            if prefix
            else cache.flatten(0, 1)[:0]
            for cache in (k_cache, v_cache)
        )
        split = at + max(0, prefix - first)
        if split > at:
            base = prefix - len(k_prefix)
            out[at:split] = attend_one(q[at:split], k_prefix, v_prefix, scale, window, base)
        for start, begin, end in _runs(lengths.item_start, split, at + new):
            rows = slice(at + start - first, end)
            if rows.start == end and not prefix:
                out[begin:end] = 0.0
                continue
            # Prefix and item end to end: exactly the sequence that the item would be alone.
            k, v = torch.cat((k_prefix, k_new[rows])), torch.cat((v_prefix, v_new[rows]))
            out[begin:end] = attend_one(q[begin:end], k, v, scale, window)
        at += new


def _runs(
    item_start: npt.NDArray[np.int32] | None, begin: int, end: int
) -> list[tuple[int, int, int]]:
    """(item_start, first row, row behind) of the runs of one item in rows [begin, end)."""
    if item_start is None or begin == end:
        return []
    own = item_start[begin:end]
    cuts = [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), end - begin]
    return [(int(own[a]), begin + a, begin + b) for a, b in itertools.pairwise(cuts)]
