"""Prefill attention over the paged cache: whole prompts, chunks, and items after a prefix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.attention.prefill_attention_tiles import (
    ModelKey,
    PrefillAttentionConfig,
    PrefillAttentionPlan,
    cut_tiles,
    make_tiles,
    part_steps,
)
from tiercel.ops.prefill_attention_plan import PlannedTiles, ScoreRule, StepLengths, read_lengths
from tiercel.ops.prefill_attention_torch import attend_items


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    prefix_len: Sequence[int] | None = None,
    item_start: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    lse: Tensor | None = None,
    plan: PrefillAttentionPlan | None = None,
) -> Tensor:
    """softmax(scale * q k^T + mask) v for every new token; keys below P are in the cache already.

    The token at index i of its sequence sees key j iff j <= i and (j < P or j >= its item_start).
    Without items P is the whole length: plain causal attention. Keys below P are read from the
    cache, also those of this step; item keys from `k_new` and `v_new`, never from the cache.

    Args:
        q: (T, num_heads, head_dim), requests end to end; head i reads key/value head
            i // (num_heads / num_kv_heads).
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim) contiguous, dtype of q; slots that
            no token sees may hold NaN.
        v_cache: like k_cache.
        block_tables: (R, max_blocks) int32, one row per request of this call.
        query_lens: new tokens of each request, >= 1.
        context_lens: its length with them, exactly: tiles are planned from it.
        scale: multiplies the scores, > 0.
        window: with w > 0 a token sees keys at a distance below w. Positions of an item
            continue after P, so that it sees the prefix as if it were alone with it.
        softcap: with c > 0 scores become c * tanh(score / c), before the mask.
        prefix_len: P of each request, its length or more if it has no items; None: no items.
        item_start: (T,) int32 on the host: for a token from P on, the index of the first token of
            its item, rising; its own index + 1 for a token that sees the prefix alone.
        k_new: (T, num_kv_heads, head_dim), this step's keys; needed with items.
        v_new: like k_new.
        lse: (T, num_heads) float32 contiguous, filled with the natural logarithm of the sum of
            exponentials; -inf where nothing is seen.
        plan: from `plan_prefill_attention` for these lengths, one for all layers; without it a
            GPU call plans for itself, which a graph cannot capture. A CPU ignores it.

    Returns:
        (T, num_heads * head_dim), dtype of q; softmax in float32; zeros where nothing is seen.

    Raises:
        ArgumentError: shapes, dtypes or lengths disagree, an item begins outside of its step, or
            head_dim is above 512 on a GPU.

    Sources: FlashInfer pull request 1015 (the mask); "FlashAttention-3", arXiv 2407.08608.
    """
    _check_tensors(q, k_cache, v_cache, k_new, v_new)
    # Where there is a plan, items were checked when it was made, once for all layers.
    is_checked = plan is not None and q.is_cuda
    lengths = read_lengths(
        query_lens, context_lens, prefix_len, item_start, are_items_checked=is_checked
    )
    _check_step(q, k_cache, block_tables, lengths)
    scores = ScoreRule(scale, window, softcap)
    _check_scores(scores, q, lse)
    if k_new is None or v_new is None:
        if lengths.has_items:
            raise ArgumentError(
                "prefill_attention: there are items, but not both k_new and v_new.",
                hint="Pass this step's keys and values: those of items are not in the cache.",
            )
        k_new = v_new = k_cache.flatten(0, 1)  # not read
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tensors = (_aligned(q), k_cache, v_cache, block_tables, _aligned(k_new), _aligned(v_new), out)
    if query_lens and q.is_cuda:
        _attend_cuda(*tensors, lengths, plan, scores, lse)
    elif query_lens:
        attend_items(*tensors, lse, lengths, scores)
    return out.flatten(1)


def plan_prefill_attention(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int,
    k_cache: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    prefix_len: Sequence[int] | None = None,
    item_start: Tensor | None = None,
    has_lse: bool = False,
) -> PrefillAttentionPlan | None:
    """Plan the tiles of a step once for all layers of one kind; None on a CPU, which needs none.

    Args:
        query_lens: as in the op.
        context_lens: as in the op.
        num_heads: query heads of the layers.
        k_cache: the key cache of one of the layers; only its shape, dtype and device count.
        window: of the layers.
        softcap: of the layers.
        prefix_len: as in the op.
        item_start: as in the op.
        has_lse: whether the op will be called with `lse`.

    Raises:
        ArgumentError: as in the op.
    """
    lengths = read_lengths(query_lens, context_lens, prefix_len, item_start)
    if not k_cache.is_cuda or not query_lens:
        return None
    scores, group = ScoreRule(1.0, window, softcap), num_heads // k_cache.shape[2]
    config = _fitting_config(lengths, group, k_cache, scores)
    tiles = _plan_tiles(lengths, group, k_cache, scores, config, has_lse=has_lse)
    return tiles.upload(k_cache.device)


def tile_prefill_attention(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int,
    k_cache: Tensor,
    window: int = 0,
    prefix_len: Sequence[int] | None = None,
    item_start: Tensor | None = None,
) -> PlannedTiles:
    """Plan the tiles for a buffer that keeps plans: with a kernel that serves any length.

    Args:
        query_lens: as in the op.
        context_lens: as in the op.
        num_heads: as in the plan.
        k_cache: as in the plan, on a GPU.
        window: as in the plan.
        prefix_len: as in the op.
        item_start: as in the op.

    Raises:
        ArgumentError: as in the op.
    """
    lengths = read_lengths(query_lens, context_lens, prefix_len, item_start)
    scores, group = ScoreRule(1.0, window, 0.0), num_heads // k_cache.shape[2]
    config = _config(k_cache, group, window, 0.0, longest=0)
    return _plan_tiles(lengths, group, k_cache, scores, config, has_lse=False)


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
            f"prefill_attention: q {tuple(q.shape)} does not fit a cache of "
            f"{tuple(k_cache.shape)}.",
            hint="Heads must be a multiple of the cache's, with equal head sizes.",
        )
    contiguous = k_cache.is_contiguous() and v_cache.is_contiguous()
    if k_cache.shape != v_cache.shape or not contiguous:
        raise ArgumentError(
            f"prefill_attention: caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} are "
            "not equal and contiguous.",
            hint="Pass contiguous caches of one shape.",
        )
    new = (len(q), *k_cache.shape[2:])
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        if tensor is not None and tuple(tensor.shape) != new:
            raise ArgumentError(
                f"prefill_attention: {name} has shape {tuple(tensor.shape)}.",
                hint=f"For these queries and caches it is {new}.",
            )
    tensors = [q, k_cache, v_cache, *(x for x in (k_new, v_new) if x is not None)]
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        raise ArgumentError(
            f"prefill_attention: tensors are of {sorted(map(str, kinds))}.",
            hint="Pass one dtype and one device.",
        )


def _check_step(q: Tensor, k_cache: Tensor, block_tables: Tensor, lengths: StepLengths) -> None:
    if len(q) != sum(lengths.query):
        raise ArgumentError(
            f"prefill_attention: q has {len(q)} tokens, query_lens {sum(lengths.query)}.",
            hint="Pass the queries of all requests end to end.",
        )
    blocks = -(-max(lengths.prefix, default=0) // k_cache.shape[1])
    if block_tables.dtype != torch.int32 or block_tables.device != q.device:
        raise ArgumentError(
            f"prefill_attention: block_tables are {block_tables.dtype} on {block_tables.device}.",
            hint=f"Pass int32 on {q.device}.",
        )
    if block_tables.dim() != 2 or len(block_tables) != len(lengths.query):
        raise ArgumentError(
            f"prefill_attention: block_tables {tuple(block_tables.shape)} do not fit "
            f"{len(lengths.query)} requests.",
            hint="Select one row per request.",
        )
    if block_tables.shape[1] < blocks or (block_tables.numel() and block_tables.stride(1) != 1):
        raise ArgumentError(
            f"prefill_attention: block_tables {tuple(block_tables.shape)} hold too few blocks, "
            "or they are not adjacent.",
            hint=f"These prefixes need {blocks} blocks of {k_cache.shape[1]} tokens.",
        )


def _check_scores(scores: ScoreRule, q: Tensor, lse: Tensor | None) -> None:
    if not scores.scale > 0 or scores.window < 0 or not scores.softcap >= 0:
        raise ArgumentError(
            f"prefill_attention: scale={scores.scale}, window={scores.window} and "
            f"softcap={scores.softcap} cannot be used.",
            hint="Use a scale above 0, and a window and a soft-cap of 0 (none) or more.",
        )
    if lse is not None and (
        lse.shape != q.shape[:2]
        or lse.dtype != torch.float32
        or lse.device != q.device
        or not lse.is_contiguous()
    ):
        raise ArgumentError(
            f"prefill_attention: lse is {lse.dtype} {tuple(lse.shape)} on {lse.device}.",
            hint=f"Pass contiguous float32 {tuple(q.shape[:2])} on {q.device}.",
        )


def _aligned(x: Tensor) -> Tensor:
    """(tokens, heads, head_dim) with adjacent heads and tokens at multiples of 16 bytes."""
    is_adjacent = x.stride()[1:] == (x.shape[2], 1)
    is_at_16 = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    if is_adjacent and (is_at_16 or not x.is_cuda):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _plan_tiles(
    lengths: StepLengths,
    group: int,
    k_cache: Tensor,
    scores: ScoreRule,
    config: PrefillAttentionConfig,
    *,
    has_lse: bool,
) -> PlannedTiles:
    step = config.block_m // group
    tiles = make_tiles(lengths.query, lengths.context, lengths.prefix, lengths.item_start, step)
    parts, steps = None, 0
    processors = torch.cuda.get_device_properties(k_cache.device).multi_processor_count
    if not scores.window:  # a window leaves few keys
        steps = part_steps(tiles, k_cache.shape[2], processors)
    if steps or has_lse:
        tiles, parts = cut_tiles(tiles, steps or max(lengths.context), step)
    starts = np.zeros(0, np.int32) if lengths.item_start is None else lengths.item_start
    return PlannedTiles(
        config,
        _model_key(group, k_cache),
        tiles,
        starts,
        parts,
        step,
        processors // k_cache.shape[2] if steps else len(tiles),
    )


def _model_key(group: int, k_cache: Tensor) -> ModelKey:
    return k_cache.dtype, k_cache.shape[3], group, k_cache.shape[1]


def _fitting_config(
    lengths: StepLengths, group: int, k_cache: Tensor, scores: ScoreRule
) -> PrefillAttentionConfig:
    window = scores.window if scores.window < max(lengths.context) else 0
    return _config(k_cache, group, window, scores.softcap, max(lengths.prefix))


def _config(
    k_cache: Tensor, group: int, window: int, softcap: float, longest: int
) -> PrefillAttentionConfig:
    from tiercel.kernels.attention.prefill_attention import MAX_HEAD_DIM, select_prefill_attention

    if k_cache.shape[3] > MAX_HEAD_DIM:
        raise ArgumentError(
            f"prefill_attention: head_dim {k_cache.shape[3]} does not fit a tile.",
            hint=f"The limit on a GPU is {MAX_HEAD_DIM}.",
        )
    return select_prefill_attention(
        k_cache.dtype,
        k_cache.shape[3],
        group,
        k_cache.shape[1],
        window,
        softcap,
        longest,
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
    lengths: StepLengths,
    plan: PrefillAttentionPlan | None,
    scores: ScoreRule,
    lse: Tensor | None,
) -> None:
    from tiercel.kernels.attention.prefill_attention import PartBuffers, launch_prefill_attention

    group = q.shape[1] // k_cache.shape[2]
    if plan is None:
        config = _fitting_config(lengths, group, k_cache, scores)
        tiles = _plan_tiles(lengths, group, k_cache, scores, config, has_lse=lse is not None)
        plan = tiles.upload(q.device)
    has_parts = plan.num_part_rows > 0
    is_alike = plan.model == _model_key(group, k_cache) and plan.num_tokens == len(q)
    if not is_alike or (lse is not None and not has_parts):
        raise ArgumentError(
            f"prefill_attention: the plan is of {plan.num_tokens} tokens and {plan.model}, "
            f"the call of {len(q)} and {_model_key(group, k_cache)}, lse: {lse is not None}.",
            hint="Make the plan from the lengths and the shape of this call.",
        )
    buffers = None
    if has_parts:
        shape = (plan.num_part_rows, *q.shape[1:])
        buffers = PartBuffers(
            torch.empty(shape, dtype=torch.float32, device=q.device),
            torch.empty(shape[:2], dtype=torch.float32, device=q.device),
            lse,
        )
    tensors = (q, k_cache, v_cache, block_tables, k_new, v_new, out)
    numbers = (scores.scale, scores.window, scores.softcap)
    launch_prefill_attention(*tensors, plan, *numbers, buffers)
