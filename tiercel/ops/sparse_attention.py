"""Attention of DeepSeek-V4: window and selected entries in one softmax, with a sink."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiercel.env import has_sparse_attention_kernel
from tiercel.errors import ArgumentError
from tiercel.ops import sparse_attention_torch as torch_ops
from tiercel.ops.sparse_attention_torch import PagedEntries, SlottedKV

_INTEGERS = (torch.int32, torch.int64)
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_KERNEL_CACHES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
_KERNEL_MOST_TOKENS = 65535  # of a grid's third axis
_KERNEL_ROTARY = 64  # bfloat16 channels of encoded vectors, as many as a scale has channels


def sparse_attention(
    q: Tensor, parts: tuple[SlottedKV, ...], sink: Tensor | None, scale: float
) -> Tensor:
    """Attend to the listed vectors of all parts in one softmax; K and V are the same vector.

    o = sum_i exp(s_i - M) kv_i / (sum_i exp(s_i - M) + exp(sink - M)), s_i = scale * q . kv_i.

    Args:
        q: (T, heads, d), float32, bfloat16 or float16, with any strides.
        parts: one or more, such as the window and the compressed entries; each lists its own
            slots per token, and -1 is no key, or the entries of paged sequences. A vector listed
            twice counts twice.
        sink: (heads,) float32, added to the denominator once, not scaled; None for no sink.
        scale: of the scores, d^-0.5.

    Returns:
        (T, heads, d), contiguous, dtype of q; 0 for a token without keys. Float32 inside, rounded
        once. Memory beside the result does not grow with the context.

    Raises:
        ArgumentError: shapes or dtypes disagree, or there is no part.

    Source: the inference code published with DeepSeek-V4; "Efficient Streaming Language Models with
    Attention Sinks", arXiv 2309.17453.
    """
    _check("sparse_attention", q, parts, sink)
    if q.is_cuda and not kernel_refusal(q, parts) and has_sparse_attention_kernel():
        return _launch(q, parts, sink, scale)
    return torch_ops.attend(q, parts, sink, scale)[0].to(q.dtype)


def kernel_refusal(q: Tensor, parts: tuple[SlottedKV, ...]) -> str:
    """Why the kernel does not take the arguments; "" where it does. Pure."""
    head_dim = q.shape[2]
    if q.dtype not in _KERNEL_DTYPES:
        return f"q is {q.dtype}"
    if len(parts) > 2 or q.shape[0] > _KERNEL_MOST_TOKENS:
        return f"{q.shape[0]} tokens, {len(parts)} parts"
    if not 32 <= head_dim <= 512 or head_dim & (head_dim - 1):
        return f"{head_dim} channels"
    for part in parts:
        if part.cache.dtype not in _KERNEL_CACHES or part.cache.stride(2) != 1:
            return f"a cache of {part.cache.dtype} with strides {part.cache.stride()}"
        if part.scales is None:
            continue
        is_known = part.rotary_dim == _KERNEL_ROTARY and head_dim % 128 == 0
        if not is_known or part.scales.stride(2) != 1 or not _is_even(part.cache):
            return f"encoded vectors of {head_dim} channels, {part.rotary_dim} bfloat16"
    return "" if all(_are_rows_dense(part.slots) for part in parts) else "lists with strides"


def _is_even(cache: Tensor) -> bool:
    """Whether bfloat16 channels of encoded vectors are aligned."""
    return not (cache.data_ptr() | cache.stride(0) | cache.stride(1)) % 2


def _are_rows_dense(listed: Tensor | PagedEntries) -> bool:
    if not isinstance(listed, PagedEntries):
        return listed.stride(1) == 1
    rows = [listed.block_tables] if listed.chosen is None else [listed.block_tables, listed.chosen]
    ids = [listed.seq_ids] if listed.ends is None else [listed.seq_ids, listed.ends]
    return all(row.stride(1) == 1 for row in rows) and all(one.stride(0) == 1 for one in ids)


def _launch(q: Tensor, parts: tuple[SlottedKV, ...], sink: Tensor | None, scale: float) -> Tensor:
    from tiercel.kernels.attention import sparse_attention as kernel
    from tiercel.kernels.attention import sparse_attention_decode as decode
    from tiercel.kernels.attention import sparse_attention_tiles as tiles

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tokens, heads, head_dim = q.shape
    keys = [kernel.KeyPart(*_arguments(part)) for part in parts]
    if q.is_cuda and not decode.decode_refusal(q, keys):
        decode.launch_sparse_attention_decode(q, keys, sink, scale, out)
        return out
    # Few tokens with long lists are left: the general kernel spreads one over more of the GPU.
    if q.is_cuda and tokens > decode.MOST_TOKENS and not tiles.tiles_refusal(q, keys):
        tiles.launch_sparse_attention_tiles(q, keys, sink, scale, out)
        return out
    splits = kernel.num_splits(tokens, tuple(part.num_keys for part in parts))
    partial, stats = None, None
    if splits > 1:
        shapes = (tokens, splits, heads, head_dim), (tokens, splits, 2, heads)
        partial, stats = (torch.empty(x, dtype=torch.float32, device=q.device) for x in shapes)
    kernel.launch_sparse_attention(q, keys, sink, scale, out, partial, stats)
    return out


def _arguments(part: SlottedKV) -> tuple[Any, ...]:
    """Cache, scales, keys and lists of a part, as its kernel takes them."""
    listed = part.slots
    if not isinstance(listed, PagedEntries):
        return part.cache, part.scales, part.num_keys, listed
    lists = (listed.chosen, listed.ends, listed.block_tables, listed.seq_ids)
    return part.cache, part.scales, part.num_keys, *lists


def sparse_attention_partial(
    q: Tensor, parts: tuple[SlottedKV, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to some of a token's keys, without sink, for `merge_attention`.

    Args:
        q: as in `sparse_attention`.
        parts: as in `sparse_attention`.
        scale: as in `sparse_attention`.

    Returns:
        The normalised output (T, heads, d) float32, and the natural log-sum-exp of the scores
        (T, heads) float32. A token without keys has output 0 and log-sum-exp -inf.

    Raises:
        ArgumentError: as `sparse_attention`.

    Source: "FlashAttention-2", arXiv 2307.08691.
    """
    _check("sparse_attention_partial", q, parts, None)
    return torch_ops.attend(q, parts, None, scale)


def merge_attention(
    outs: tuple[Tensor, ...], lses: tuple[Tensor, ...], sink: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Join outputs over disjoint keys by their log-sum-exp; the sink counts once.

    Args:
        outs: normalised outputs, each (T, heads, d) of one float dtype.
        lses: log-sum-exp of each, (T, heads) float32; -inf for a part without keys, whose output
            is then ignored.
        sink: (heads,) float32, or None.
        dtype: of the result.

    Returns:
        (T, heads, d), 0 where no part has keys.

    Raises:
        ArgumentError: shapes disagree, or there is no part.

    Source: as `sparse_attention_partial`.
    """
    shapes = {tuple(out.shape) for out in outs}
    if len(outs) != len(lses) or len(shapes) != 1 or outs[0].dim() != 3:
        raise ArgumentError(
            f"merge_attention: {len(outs)} outputs {sorted(shapes)}, {len(lses)} log-sum-exps.",
            hint="Pass as many log-sum-exps as outputs, all of one shape (tokens, heads, d).",
        )
    if any(lse.shape != outs[0].shape[:2] for lse in lses):
        raise ArgumentError(
            f"merge_attention: log-sum-exps are {[tuple(lse.shape) for lse in lses]} but outputs "
            f"are {tuple(outs[0].shape)}.",
            hint=f"Pass {tuple(outs[0].shape[:2])}.",
        )
    _check_sink("merge_attention", outs[0], sink)
    return torch_ops.merge(torch.stack(outs), torch.stack(lses), sink).to(dtype)


def _check(name: str, q: Tensor, parts: tuple[SlottedKV, ...], sink: Tensor | None) -> None:
    if q.dim() != 3 or not parts:
        raise ArgumentError(
            f"{name}: q is {tuple(q.shape)}, {len(parts)} parts.",
            hint="Pass (tokens, heads, d) and at least one part.",
        )
    _check_sink(name, q, sink)
    for part in parts:
        if part.cache.dim() != 3 or part.head_dim != q.shape[2]:
            raise ArgumentError(
                f"{name}: a cache is {tuple(part.cache.shape)} {part.cache.dtype}, rotary_dim "
                f"{part.rotary_dim}, but q has {q.shape[2]} channels.",
                hint="Pass (blocks, entries, d), or d + rotary_dim data bytes of encoded entries.",
            )
        if (part.scales is not None) != (part.cache.dtype == torch.uint8):
            raise ArgumentError(
                f"{name}: a cache is {part.cache.dtype} "
                f"{'with' if part.scales is not None else 'without'} scales.",
                hint="Pass scales with encoded entries, in uint8, and only with them.",
            )
        if isinstance(part.slots, PagedEntries):
            _check_entries(name, q.shape[0], part.slots)
            continue
        is_list = part.slots.dim() == 2 and part.slots.dtype in _INTEGERS
        if not is_list or part.slots.shape[0] != q.shape[0]:
            raise ArgumentError(
                f"{name}: slots are {tuple(part.slots.shape)} {part.slots.dtype} for "
                f"{q.shape[0]} tokens.",
                hint=f"Pass ({q.shape[0]}, keys) torch.int32 or torch.int64.",
            )


def _check_entries(name: str, num_tokens: int, listed: PagedEntries) -> None:
    tables, seq_ids, chosen, ends = (
        listed.block_tables,
        listed.seq_ids,
        listed.chosen,
        listed.ends,
    )
    given = chosen if ends is None else ends
    expected = (num_tokens, listed.num_entries) if ends is None else (num_tokens,)
    if (
        given is None
        or (chosen is not None and ends is not None)
        or given.shape != expected
        or seq_ids.shape != (num_tokens,)
        or tables.dim() != 2
        or any(x.dtype not in _INTEGERS for x in (given, seq_ids, tables))
    ):
        shapes = [None if x is None else tuple(x.shape) for x in (chosen, ends, seq_ids, tables)]
        raise ArgumentError(
            f"{name}: chosen, ends, seq_ids and block_tables are {shapes} for {num_tokens} tokens "
            f"and {listed.num_entries} entries.",
            hint=f"Pass chosen ({num_tokens}, {listed.num_entries}) or ends ({num_tokens},), "
            f"seq_ids ({num_tokens},) and block_tables (sequences, columns), all integers.",
        )


def _check_sink(name: str, q: Tensor, sink: Tensor | None) -> None:
    if sink is not None and sink.shape != q.shape[1:2]:
        raise ArgumentError(
            f"{name}: the sink is {tuple(sink.shape)} but there are {q.shape[1]} heads.",
            hint=f"Pass ({q.shape[1]},).",
        )
