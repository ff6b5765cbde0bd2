"""Scores of the indexer's packed keys by wgmma: cuda/attention/indexer_scores.cu, for Hopper.

A warpgroup takes tiles of 64 keys of one token; keys are decoded to operands in registers.

Floor: keys are read once, 68 bytes each, and 2 FLOPs per head, channel and key; twice that where
queries are not bfloat16. A tile takes the tensor cores of an SM 256 cycles a term.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from tiercel.kernels.attention.sparse_attention_parts import division
from tiercel.kernels.runtime import rtc

CAPABILITY: Final = (9, 0)  # wgmma
HEADS, HEAD_DIM, KEYS = 64, 128, 64  # most heads; channels; keys of a tile
MOST_TOKENS: Final = 64
_ALIGNMENT: Final = 16  # bytes, of rows
# Warpgroups of a CTA, CTAs of an SM: queries are arranged once a CTA, short rows have few tiles,
# 3.8 and 4.4 us for 8,192 keys, 17.9 and 16.9 for 262,144 (H200,
# results/sparse_attention_tiles_h200.json).
LAUNCHES: Final = ((2, 2), (4, 1))
_FEW_SCORES: Final = 16384
_QUERIES: Final = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
_CHUNK: Final = HEADS * 128


class _Work(ctypes.Structure):
    """`Work` of the kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "scores",
                "bests",
                "q",
                "keys",
                "scales",
                "tables",
                "rows",
                "visible",
                "weights",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("q_token", "q_head", "weight", "weight_head"),
                *("block", "entry", "scale_block", "scale_entry"),
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in ("heads", "max_entries", "best_stride", "table_stride", "per_block")
        ),
        ("magic", ctypes.c_uint32),
        ("shift", ctypes.c_uint32),
        ("factor", ctypes.c_float),
    )


def select_indexer_scores(num_tokens: int, max_entries: int) -> tuple[int, int]:
    """Warpgroups of a CTA, CTAs of an SM. Pure."""
    return LAUNCHES[num_tokens * max_entries >= _FEW_SCORES]


def scores_source(
    dtype: torch.dtype, *, is_long: bool, config: tuple[int, int] = LAUNCHES[0]
) -> rtc.KernelSource:
    """The kernel as built for one kind of call; `is_long`: `visible` is int64."""
    macros = (
        ("IS_BF16", 1),
        ("CLUSTER", 1),
        ("WGS", config[0]),
        ("CTAS", config[1]),
        ("QUERY", _QUERIES[dtype]),
        ("LONG_VISIBLE", int(is_long)),
    )
    return rtc.KernelSource("indexer_scores", macros)


def scores_refusal(
    q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor | None, tables: Tensor, rows: Tensor
) -> str:
    """Why the kernel does not take arguments that the general one takes; "" if it does."""
    if q.is_cuda and torch.cuda.get_device_capability(q.device) != CAPABILITY:
        return "the GPU is not of the Hopper kind"
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens > MOST_TOKENS:
        return f"{num_tokens} tokens"
    if scales is None or head_dim != HEAD_DIM or num_heads > HEADS or q.dtype not in _QUERIES:
        return f"q is {tuple(q.shape)} {q.dtype}, keys are {keys.dtype}"
    if weights.dtype != torch.float32 or tables.dtype != torch.int32 or rows.dtype != torch.int64:
        return f"weights, tables and rows are {weights.dtype}, {tables.dtype} and {rows.dtype}"
    size = q.element_size()
    places = [q.data_ptr(), size * q.stride(0), size * q.stride(1)]
    places += [keys.data_ptr(), keys.stride(0), keys.stride(1)]
    return "rows are not aligned" if any(place % _ALIGNMENT for place in places) else ""


def launch_indexer_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,
    seq_ids: Tensor,
    visible: Tensor,
    scores: Tensor,
    bests: Tensor,
    config: tuple[int, int] | None = None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    scores: (T, max_entries) float32; written for entries that their token sees.
    bests: (T, max_entries / 16, rounded up) float32, the best of each 16 of them.
    """
    num_tokens, num_heads, head_dim = q.shape
    max_entries = scores.shape[1]
    if num_tokens == 0 or max_entries == 0:
        return
    config = config or select_indexer_scores(num_tokens, max_entries)
    source = scores_source(q.dtype, is_long=visible.dtype == torch.int64, config=config)
    terms = 1 if q.dtype == torch.bfloat16 else 2
    kernel = rtc.load_kernel(source, q.device, 2 * terms * _CHUNK)
    assert scales is not None, "packed keys have scales"
    tensors = (scores, bests, q, keys, scales, block_tables, seq_ids, visible, weights)
    size = q.element_size()
    work = _Work(
        *(tensor.data_ptr() for tensor in tensors),
        *(size * stride for stride in q.stride()[:2]),
        *weights.stride(),
        *keys.stride()[:2],
        *scales.stride()[:2],
        num_heads,
        max_entries,
        bests.stride(0),
        block_tables.stride(0),
        keys.shape[1],
        *division(keys.shape[1]),
        (num_heads * head_dim) ** -0.5,
    )
    wgs, ctas = config
    tiles = -(-max_entries // KEYS)
    room = ctas * torch.cuda.get_device_properties(q.device).multi_processor_count // num_tokens
    grid = max(1, min(room, -(-tiles // wgs)))
    rtc.launch(
        kernel, grid, 128 * wgs, [work], grid_y=num_tokens, is_dependent=rtc.is_dependent(q.device)
    )
