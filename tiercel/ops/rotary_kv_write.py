"""Norm, rotary embedding and cache write of the query, key and value heads of a projection."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError


def rotary_kv_write(
    heads: Tensor,
    positions: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm and rotate queries and keys in place, and copy keys and values to their slots.

    Row-invariant: a token's bits do not depend on other tokens.

    Args:
        heads: (tokens, num_heads + 2 * num_kv_heads, head_dim) contiguous: queries, keys, values of
            a token end to end; queries and keys are mutated. Their first 2 * half dimensions
            rotate, pairs (i, i + half), by the angle of the token's position.
        positions: (tokens,) int32, each below `table.shape[0]` (not checked on a device).
        table: (max_positions, 2, half) float32, cos then sin.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim) contiguous, dtype of heads;
            mutated.
        v_cache: like k_cache; mutated.
        slot_mapping: (tokens,) int64, block * block_size + offset; -1 writes nothing.
        q_weight: (head_dim,) float32: each query head is normed to unit root mean square, times
            this, before the rotation; None for no norm.
        k_weight: the same for keys; both or neither.
        eps: added to the mean squares.

    Raises:
        ArgumentError: shapes, dtypes or strides disagree.

    All is float32 inside and rounded once; on a CPU also between norm and rotation.

    Sources: "RoFormer", arXiv 2104.09864, in the half-split form of GPT-NeoX; "Efficient Memory
    Management for Large Language Model Serving with PagedAttention", arXiv 2309.06180.
    """
    _check(heads, positions, table, slot_mapping)
    _check_caches(heads, k_cache, v_cache)
    _check_weights(heads.shape[2], q_weight, k_weight)
    if heads.is_cuda:
        from tiercel.kernels.attention.rotary_kv_write import launch_rotary_kv_write

        launch_rotary_kv_write(
            heads, positions, table, k_cache, v_cache, slot_mapping, q_weight, k_weight, eps
        )
        return
    kv_heads = k_cache.shape[2]
    queries = heads.shape[1] - 2 * kv_heads
    if q_weight is not None and k_weight is not None:
        _norm_(heads[:, :queries], q_weight, eps)
        _norm_(heads[:, queries:-kv_heads], k_weight, eps)
    _rotate_(heads[:, :-kv_heads], positions, table)
    _write(heads[:, queries:], k_cache, v_cache, slot_mapping)


def _check(heads: Tensor, positions: Tensor, table: Tensor, slot_mapping: Tensor) -> None:
    if heads.dim() != 3 or not heads.is_contiguous():
        raise ArgumentError(
            f"rotary_kv_write: heads are {tuple(heads.shape)} in steps of {heads.stride()}.",
            hint="Pass contiguous (tokens, heads, head_dim).",
        )
    if positions.shape != heads.shape[:1] or slot_mapping.shape != heads.shape[:1]:
        raise ArgumentError(
            f"rotary_kv_write: heads {tuple(heads.shape)}, positions {tuple(positions.shape)} and "
            f"slots {tuple(slot_mapping.shape)} do not fit.",
            hint="Pass one position and one slot per token.",
        )
    if table.dim() != 3 or table.shape[1] != 2 or 2 * table.shape[2] > heads.shape[2]:
        raise ArgumentError(
            f"rotary_kv_write: table is {tuple(table.shape)} for heads of {heads.shape[2]}.",
            hint="Pass (positions, 2, half) with 2 * half at most the head size.",
        )


def _check_caches(heads: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    contiguous = k_cache.is_contiguous() and v_cache.is_contiguous()
    if k_cache.shape != v_cache.shape or k_cache.dim() != 4 or not contiguous:
        raise ArgumentError(
            f"rotary_kv_write: caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} are not "
            "equal and contiguous.",
            hint="Pass contiguous caches of one shape.",
        )
    if heads.shape[2] != k_cache.shape[3] or heads.shape[1] < 2 * k_cache.shape[2]:
        raise ArgumentError(
            f"rotary_kv_write: heads {tuple(heads.shape)} do not fit a cache of "
            f"{tuple(k_cache.shape)}.",
            hint="Pass queries, keys and values, with head sizes that agree.",
        )
    if {heads.dtype, v_cache.dtype} != {k_cache.dtype}:
        raise ArgumentError(
            f"rotary_kv_write: heads are {heads.dtype}, caches {k_cache.dtype} and "
            f"{v_cache.dtype}.",
            hint="Pass one dtype.",
        )


def _check_weights(head_dim: int, q_weight: Tensor | None, k_weight: Tensor | None) -> None:
    if q_weight is None and k_weight is None:
        return
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is None or weight.shape != (head_dim,) or weight.dtype != torch.float32:
            found = "missing" if weight is None else f"{weight.dtype} {tuple(weight.shape)}"
            raise ArgumentError(
                f"rotary_kv_write: {name} is {found} for heads of {head_dim}.",
                hint=f"Pass both weights as float32 ({head_dim},), or neither.",
            )


def _norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    x.copy_(torch.nn.functional.rms_norm(x.float(), weight.shape, weight, eps))


def _rotate_(x: Tensor, positions: Tensor, table: Tensor) -> None:
    half = table.shape[2]
    cos, sin = table.index_select(0, positions).unsqueeze(2).unbind(1)  # (tokens, 1, half) each
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    x[..., : 2 * half] = rotated


def _write(heads: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """heads: (tokens, 2 * num_kv_heads, head_dim), keys, then values."""
    if heads.shape[0] and int(slot_mapping.min()) < 0:
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        heads, slot_mapping = heads[kept], slot_mapping[kept]
    k, v = heads.chunk(2, dim=1)
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)
