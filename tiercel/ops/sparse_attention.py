"""Attention of DeepSeek-V4: window and selected entries in one softmax, with a sink."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.ops import sparse_attention_torch as torch_ops
from tiercel.ops.sparse_attention_torch import SlottedKV

_INTEGERS = (torch.int32, torch.int64)


def sparse_attention(
    q: Tensor, parts: tuple[SlottedKV, ...], sink: Tensor | None, scale: float
) -> Tensor:
    """Attend to the listed vectors of all parts in one softmax; K and V are the same vector.

    o = sum_i exp(s_i - M) kv_i / (sum_i exp(s_i - M) + exp(sink - M)), s_i = scale * q . kv_i.

    Args:
        q: (T, heads, d), float32, bfloat16 or float16, with any strides.
        parts: one or more, such as the window and the compressed entries; each lists its own
            slots per token, and -1 is no key. A vector listed twice counts twice.
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
    return torch_ops.attend(q, parts, sink, scale)[0].to(q.dtype)


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
        is_list = part.slots.dim() == 2 and part.slots.dtype in _INTEGERS
        if not is_list or part.slots.shape[0] != q.shape[0]:
            raise ArgumentError(
                f"{name}: slots are {tuple(part.slots.shape)} {part.slots.dtype} for "
                f"{q.shape[0]} tokens.",
                hint=f"Pass ({q.shape[0]}, keys) torch.int32 or torch.int64.",
            )


def _check_sink(name: str, q: Tensor, sink: Tensor | None) -> None:
    if sink is not None and sink.shape != q.shape[1:2]:
        raise ArgumentError(
            f"{name}: the sink is {tuple(sink.shape)} but there are {q.shape[1]} heads.",
            hint=f"Pass ({q.shape[1]},).",
        )
