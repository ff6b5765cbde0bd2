"""The indexer of DeepSeek-V4: scores of compressed entries, and the best of them."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.env import has_indexer_kernel
from tiercel.errors import ArgumentError
from tiercel.ops import indexer_topk_torch as torch_ops
from tiercel.ops.indexer_topk_torch import PagedKeys

_INTEGERS = (torch.int32, torch.int64)
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_KERNEL_MOST_TOKENS = 65535  # of a grid's second axis
_KERNEL_MOST_TOPK = 2048
_KERNEL_MOST_HEADS = 64  # of the shared memory of a program


def indexer_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Indexer scores of all tokens against the same entries.

    score(t, e) = sum over heads of weights[t, h] * d^-0.5 * heads^-0.5 * relu(q[t, h] . keys[e]).

    Args:
        q: (T, heads, d) float, rotated.
        weights: (T, heads) float, of any sign.
        keys: (entries, d) float, rotated.

    Returns:
        (T, entries) float32.

    Raises:
        ArgumentError: shapes that disagree.

    Source: the inference code published with DeepSeek-V4; "DeepSeek-V3.2", arXiv 2512.02556.
    """
    _check_queries("indexer_scores", q, weights)
    if keys.dim() != 2 or keys.shape[1] != q.shape[2]:
        raise ArgumentError(
            f"indexer_scores: keys are {tuple(keys.shape)} but q is {tuple(q.shape)}.",
            hint=f"Pass (entries, {q.shape[2]}).",
        )
    every = keys.float().expand(q.shape[0], -1, -1)
    return torch_ops.piece_scores(q.float(), weights.float(), every)


def indexer_topk(
    q: Tensor,
    weights: Tensor,
    paged: PagedKeys,
    visible: Tensor,
    *,
    topk: int,
    max_entries: int,
) -> Tensor:
    """Choose each token's best entries by the scores of `indexer_scores`.

    Entries are scored in pieces, and the best so far are kept: memory does not grow with the
    context. Where `max_entries` <= topk, all visible entries are taken without scores.

    Args:
        q: (T, heads, d) float, rotated; for packed keys also Hadamard-rotated.
        weights: (T, heads) float.
        paged: the index keys of all sequences.
        visible: (T,) int32 or int64, entries that a token sees: entry e is visible for e below it.
            At position t with m tokens per entry that is (t + 1) // m.
        topk: entries chosen, >= 1.
        max_entries: no token sees more; entries from there on are not read. It sets the work.

    Returns:
        (T, topk) int32: entries in ascending order, then -1. Ties go to the lower entry.

    Raises:
        ArgumentError: shapes or dtypes disagree, or topk or max_entries is out of range.

    Source: as `indexer_scores`; the order of ties is ours, the original leaves it open.
    """
    _check_queries("indexer_topk", q, weights)
    _check_keys(q, paged)
    if visible.shape != q.shape[:1] or visible.dtype not in _INTEGERS:
        raise ArgumentError(
            f"indexer_topk: visible is {tuple(visible.shape)} {visible.dtype} for {q.shape[0]} "
            "tokens.",
            hint=f"Pass ({q.shape[0]},) torch.int32 or torch.int64.",
        )
    if topk < 1 or max_entries < 0:
        raise ArgumentError(
            f"indexer_topk: topk={topk}, max_entries={max_entries}.",
            hint="Pass topk >= 1 and max_entries >= 0.",
        )
    if max_entries <= topk:
        return torch_ops.all_entries(visible.clamp(max=max_entries), topk)
    if q.shape[0] == 0:
        return torch.empty((0, topk), dtype=torch.int32, device=q.device)
    if q.is_cuda and not kernel_refusal(q, paged, topk) and has_indexer_kernel():
        return _launch(q, weights, paged, visible, topk, max_entries)
    return torch_ops.best_entries(q, weights, paged, visible, topk, max_entries)


def kernel_refusal(q: Tensor, paged: PagedKeys, topk: int) -> str:
    """Why the kernels do not take the arguments; "" where they do. Pure."""
    _, num_heads, head_dim = q.shape
    if q.dtype not in _KERNEL_DTYPES or paged.keys.dtype not in (*_KERNEL_DTYPES, torch.uint8):
        return f"q is {q.dtype}, keys are {paged.keys.dtype}"
    if not 32 <= head_dim <= 128 or head_dim & (head_dim - 1):
        return f"{head_dim} channels"
    if num_heads > _KERNEL_MOST_HEADS:
        return f"{num_heads} heads"
    if topk > _KERNEL_MOST_TOPK:
        return f"topk={topk}"
    rows = [paged.keys, paged.block_tables] + ([] if paged.scales is None else [paged.scales])
    is_dense = all(row.stride(-1) == 1 for row in rows) and paged.seq_ids.stride(0) == 1
    return "" if is_dense else "keys or tables with strides"


def _launch(
    q: Tensor,
    weights: Tensor,
    paged: PagedKeys,
    visible: Tensor,
    topk: int,
    max_entries: int,
) -> Tensor:
    """Score and choose by kernels, for some tokens at a time: scores fit the workspace."""
    from tiercel.kernels.attention import indexer_scores as by_tiles
    from tiercel.kernels.attention import indexer_select as by_ctas
    from tiercel.kernels.attention import indexer_topk as general

    out = torch.empty((q.shape[0], topk), dtype=torch.int32, device=q.device)
    planes = (paged.keys, paged.scales)
    has_groups = (
        q.is_cuda
        and not by_ctas.select_refusal(q.shape[0], max_entries, q.device)
        and not by_tiles.scores_refusal(q, weights, *planes, paged.block_tables, paged.seq_ids)
    )
    levels = [] if has_groups else general.plan(max_entries, topk)[:-1]
    counts = [pieces * topk for pieces, _ in levels]
    size = max(1, torch_ops.WORKSPACE_BYTES // (4 * (max_entries + sum(counts))))
    size = min(size, q.shape[0], _KERNEL_MOST_TOKENS)
    scores = torch.empty((size, max_entries), dtype=torch.float32, device=q.device)
    bests = by_ctas.make_bests(size if has_groups else 0, max_entries, q.device)
    candidates = [torch.empty((size, n), dtype=torch.int32, device=q.device) for n in counts]
    visible = visible.contiguous()
    for start in range(0, q.shape[0], size):
        tokens = slice(start, min(start + size, q.shape[0]))
        rows = scores[: tokens.stop - start]
        lists = (paged.block_tables, paged.seq_ids[tokens], visible[tokens])
        given = (q[tokens], weights[tokens], *planes, *lists, rows)
        if has_groups:
            by_tiles.launch_indexer_scores(*given, bests)
            by_ctas.launch_indexer_select(rows, bests, visible[tokens], out[tokens])
            continue
        general.launch_indexer_scores(*given)
        pieces = [part[: rows.shape[0]] for part in candidates]
        general.launch_indexer_select(rows, visible[tokens], out[tokens], topk, pieces)
    return out


def _check_queries(name: str, q: Tensor, weights: Tensor) -> None:
    if q.dim() != 3 or weights.shape != q.shape[:2]:
        raise ArgumentError(
            f"{name}: q is {tuple(q.shape)} and weights {tuple(weights.shape)}.",
            hint="Pass (tokens, heads, d) and (tokens, heads).",
        )


def _check_keys(q: Tensor, paged: PagedKeys) -> None:
    head_dim = q.shape[2]
    is_packed = paged.keys.dtype == torch.uint8
    width = head_dim // 2 if is_packed else head_dim
    if paged.keys.dim() != 3 or paged.keys.shape[2] != width:
        raise ArgumentError(
            f"indexer_topk: keys are {tuple(paged.keys.shape)} {paged.keys.dtype} but q has "
            f"{head_dim} channels.",
            hint=f"Pass (blocks, entries, {width}).",
        )
    scales = None if paged.scales is None else tuple(paged.scales.shape)
    expected = (*paged.keys.shape[:2], head_dim // 32) if is_packed else None
    if scales != expected:
        raise ArgumentError(
            f"indexer_topk: scales are {scales} for {paged.keys.dtype} keys of "
            f"{tuple(paged.keys.shape)}.",
            hint=f"Pass {expected}.",
        )
    if (
        paged.block_tables.dim() != 2
        or paged.seq_ids.shape != q.shape[:1]
        or paged.block_tables.dtype not in _INTEGERS
        or paged.seq_ids.dtype not in _INTEGERS
    ):
        raise ArgumentError(
            f"indexer_topk: block_tables are {tuple(paged.block_tables.shape)} "
            f"{paged.block_tables.dtype} and seq_ids {tuple(paged.seq_ids.shape)} "
            f"{paged.seq_ids.dtype} for {q.shape[0]} tokens.",
            hint="Pass (sequences, columns) and (tokens,) in torch.int32 or torch.int64.",
        )
