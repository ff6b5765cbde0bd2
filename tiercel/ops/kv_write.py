"""New keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor

from tiercel.errors import ArgumentError


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy each token's key and value to its slot.

    Args:
        k: (tokens, num_kv_heads, head_dim), heads adjacent; tokens may be strided.
        v: like k.
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim) contiguous, dtype of k; mutated.
        v_cache: like k_cache; mutated.
        slot_mapping: (tokens,) int64, block * block_size + offset; -1 writes nothing.

    Raises:
        ArgumentError: shapes or dtypes disagree.
    """
    if k.shape != v.shape or k.shape[1:] != k_cache.shape[2:] or slot_mapping.shape != k.shape[:1]:
        raise ArgumentError(
            f"kv_write: k {tuple(k.shape)}, v {tuple(v.shape)}, cache {tuple(k_cache.shape)}, "
            f"slots {tuple(slot_mapping.shape)} do not fit.",
            hint="Heads and head sizes must agree, with one slot per token.",
        )
    contiguous = k_cache.is_contiguous() and v_cache.is_contiguous()
    if k_cache.shape != v_cache.shape or not contiguous:
        raise ArgumentError(
            f"kv_write: caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} are not equal and "
            "contiguous.",
            hint="Pass contiguous caches of one shape.",
        )
    if {k.dtype, v.dtype, v_cache.dtype} != {k_cache.dtype}:
        raise ArgumentError(
            f"kv_write: k is {k.dtype}, v {v.dtype}, caches {k_cache.dtype} and {v_cache.dtype}.",
            hint="Pass one dtype.",
        )
    if k.stride()[1:] != (k.shape[2], 1) or v.stride()[1:] != (v.shape[2], 1):
        raise ArgumentError(
            "kv_write: heads are not adjacent.", hint="Pass (tokens, heads, head_dim)."
        )
    if k.is_cuda:
        from tiercel.kernels.kv_write import launch_kv_write

        launch_kv_write(k, v, k_cache, v_cache, slot_mapping)
        return
    if k.shape[0] and int(slot_mapping.min()) < 0:
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)
