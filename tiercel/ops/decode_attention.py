"""Decode attention: causal attention of few new tokens per request over the paged cache."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.config import MAX_DECODE_QUERIES
from tiercel.errors import ArgumentError
from tiercel.kernels.packed.packed_gemm import image_shape
from tiercel.kernels.packed.packed_types import UNIT_COLUMNS
from tiercel.ops.decode_attention_torch import attend_one, first_key, gather_cache
from tiercel.ops.packed_gemm import TokenImage

MAX_DECODE_HEAD_DIM = 256  # beyond, its tiles do not fit
LEAST_DECODE_BLOCK = 16  # tokens; the smallest tile of a matrix product


def prepare_decode_attention(k_cache: Tensor, num_heads: int, order: int = 0) -> None:
    """Load every kernel that decode steps on a cache may need, so that none waits for it.

    Args:
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim); nothing happens on a CPU.
        num_heads: of the queries.
        order: of the images of `decode_attention_image`; 0 for none.
    """
    if not k_cache.is_cuda:
        return
    from tiercel.kernels.attention import decode_attention_split

    _, block_size, kv_heads, head_dim = k_cache.shape
    device, dtype = k_cache.device, k_cache.dtype
    if decode_attention_split.is_supported(head_dim, dtype, block_size, device):
        group = num_heads // kv_heads
        for one in {0, order}:
            decode_attention_split.load_decode_attention_split(
                head_dim, dtype, block_size, group, MAX_DECODE_QUERIES, device, one
            )


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    *,
    group: int = 0,
    window: int = 0,
) -> Tensor:
    """softmax(scale * q k^T + mask) v for every new token; their keys are in the cache already.

    Row-invariant on a GPU while no request has more than 16 new tokens, with blocks of a power of
    two >= 16 and heads up to 256: a token's result has the same bits alone, in any batch and beside
    any drafts. Such a batch is also safe to capture in a graph: lengths and blocks are read on the
    device, and the host only bounds them.

    Args:
        q: (num_tokens, num_heads, head_dim), unit inner stride; head i reads key/value head
            i // (num_heads / num_kv_heads).
        k_cache: (num_blocks, block_size, num_kv_heads, head_dim) contiguous, dtype of q; slots
            beyond a request's length are never read, those below must be finite.
        v_cache: like k_cache.
        batch: lengths and block tables; the token at index p of its sequence sees keys 0 .. p.
        scale: multiplies the scores.
        group: the cache group of this layer.
        window: with w > 0 the token at p sees keys p - w + 1 .. p only.

    Returns:
        (num_tokens, num_heads * head_dim), dtype of q; softmax in float32.

    Raises:
        ArgumentError: the shapes or dtypes disagree, or the caches are not contiguous.

    Sources: "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    arXiv 2309.06180; splits along keys: "Flash-Decoding for long-context inference", 2023.
    """
    _check(q, k_cache, v_cache, batch)
    if q.is_cuda and _is_decode(k_cache, batch):
        return _decode(q, k_cache, v_cache, batch, scale, group, window)
    tables = batch.block_tables[group].index_select(0, batch.rows)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    start = 0
    for request, query_len in enumerate(batch.query_lens):
        stop, length = start + query_len, batch.context_lens[request]
        first = first_key(length - query_len, query_len, window)
        k = gather_cache(k_cache, tables[request], length, first)
        v = gather_cache(v_cache, tables[request], length, first)
        out[start:stop] = attend_one(q[start:stop], k, v, scale, window, length - len(k))
        start = stop
    return out.flatten(1)


def writes_image(q: Tensor, k_cache: Tensor, batch: Batch) -> bool:
    """Whether `decode_attention_image` takes a step; arguments as in `decode_attention`."""
    if not q.is_cuda or q.dtype != torch.float16 or not _is_decode(k_cache, batch):
        return False
    return not q.shape[1] * q.shape[2] % UNIT_COLUMNS and _is_split(q, k_cache)


def decode_attention_image(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    order: int,
    *,
    group: int = 0,
    window: int = 0,
) -> TokenImage:
    """`decode_attention` with the bits of its result as an image for `packed_gemm`.

    Args:
        q: as in `decode_attention`, and likewise all but order; `writes_image` holds.
        k_cache: likewise.
        v_cache: likewise.
        batch: likewise.
        scale: likewise.
        order: of the image's columns.
        group: likewise.
        window: likewise.
    """
    _check(q, k_cache, v_cache, batch)
    image = _decode(q, k_cache, v_cache, batch, scale, group, window, order)
    return TokenImage({order: image}, (q.shape[0], q.shape[1] * q.shape[2]))


def _is_split(q: Tensor, k_cache: Tensor) -> bool:
    """Whether the split kernel takes queries and a cache on a GPU."""
    from tiercel.kernels.attention import decode_attention_split

    is_aligned = q.data_ptr() % 16 == 0 and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0
    return is_aligned and decode_attention_split.is_supported(
        q.shape[2], q.dtype, k_cache.shape[1], q.device
    )


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> None:
    if (
        q.shape[0] != batch.num_tokens
        or q.shape[1] % k_cache.shape[2]
        or q.shape[2] != k_cache.shape[3]
    ):
        raise ArgumentError(
            f"decode_attention: q {tuple(q.shape)} does not fit {batch.num_tokens} tokens and "
            f"a cache of {tuple(k_cache.shape)}.",
            hint="Heads must be a multiple of the cache's, with equal head sizes.",
        )
    if q.dtype != k_cache.dtype or q.dtype != v_cache.dtype:
        raise ArgumentError(
            f"decode_attention: q is {q.dtype}, caches are {k_cache.dtype} and {v_cache.dtype}.",
            hint="Pass one dtype.",
        )
    contiguous = k_cache.is_contiguous() and v_cache.is_contiguous() and q.stride(2) == 1
    if k_cache.shape != v_cache.shape or not contiguous:
        raise ArgumentError(
            f"decode_attention: caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} are not "
            f"equal and contiguous, or q has inner stride {q.stride(2)} instead of 1.",
            hint="Pass contiguous caches of one shape, and q with adjacent elements of a head.",
        )


def _is_decode(k_cache: Tensor, batch: Batch) -> bool:
    """Few new tokens per request, and a shape that the split kernel takes."""
    _, block_size, _, head_dim = k_cache.shape
    is_block = block_size >= LEAST_DECODE_BLOCK and block_size & (block_size - 1) == 0
    is_few = batch.max_query_len <= MAX_DECODE_QUERIES
    return is_few and is_block and head_dim <= MAX_DECODE_HEAD_DIM


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    group: int,
    window: int,
    order: int = 0,
) -> Tensor:
    from tiercel.kernels.attention import decode_attention as triton_kernel
    from tiercel.kernels.attention import decode_attention_split
    from tiercel.kernels.runtime.rtc import max_smem_bytes

    (tokens, heads, head_dim), block_size = q.shape, k_cache.shape[1]
    bounds = (batch.max_seq_len, batch.max_query_len, window)
    if _is_split(q, k_cache):
        rows = batch.max_query_len * heads // k_cache.shape[2]
        launch = partial(
            decode_attention_split.launch_decode_attention_split,
            config=decode_attention_split.select_decode_attention_split(
                head_dim, rows, max_smem_bytes(q.device)
            ),
            order=order,
        )
        splits = decode_attention_split.num_splits(*bounds)
    else:
        config = triton_kernel.select_decode_attention(head_dim, q.element_size(), block_size)
        launch = partial(triton_kernel.launch_decode_attention, config=config)
        splits = config.num_splits(*bounds)
    partials = torch.empty((tokens * heads, splits, head_dim), dtype=torch.float32, device=q.device)
    width = heads * head_dim
    out = q.new_empty(image_shape(tokens, width) if order else (tokens, width))
    launch(
        q,
        k_cache,
        v_cache,
        batch.block_tables[group],
        batch.rows,
        batch.cu_seqlens_q,
        batch.seq_lens,
        partials,
        partials.new_empty((tokens * heads, splits, 2)),
        out,
        scale,
        window,
        batch.max_query_len,
    )
    return out
