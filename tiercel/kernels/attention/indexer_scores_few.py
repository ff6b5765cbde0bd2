"""The indexer's scores of few tokens over packed keys: cuda/attention/indexer_scores_few.cu.

Keys go from memory to registers to tensor cores; queries are split into two bfloat16 numbers where
they are float32, as in `indexer_topk`'s Triton kernel, so the scores differ from its by the order
of their sums alone.

Floor: each token's keys are read once, 68 bytes an entry, and 2 FLOPs per head, channel, entry.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch

from tiercel.kernels.runtime import rtc

if TYPE_CHECKING:
    from torch import Tensor

CAPABILITY: Final = (9, 0)  # products of pairs of bfloat16
HEAD_DIM: Final = 128
HEADS: Final = (16, 32, 48, 64)
MOST_TOKENS: Final = 16  # beyond, a tile of keys serves several tokens of a sequence better
ALIGNMENT: Final = 16  # bytes
# Keys of a warp in eights, and warps of a CTA.
CONFIGS: Final = ((1, 4), (2, 4), (4, 4), (2, 8), (4, 8))
# (most entries, config). Not measured yet.
_LAUNCHES: Final = ((4096, (1, 4)), (16384, (2, 4)), (1 << 30, (4, 4)))


def select_indexer_scores_few(max_entries: int) -> tuple[int, int]:
    """Keys of a warp in eights, and warps of a CTA. Pure."""
    return next(config for most, config in _LAUNCHES if max_entries <= most)


def scores_source(
    num_heads: int, config: tuple[int, int], are_long: tuple[bool, bool, bool], *, is_split: bool
) -> rtc.KernelSource:
    """The kernel as built for one kind of call.

    config: from `select_indexer_scores_few`. are_long: whether visible, tables and rows are int64.
    is_split: whether queries are float32.
    """
    macros = (
        ("IS_BF16", 1),
        ("CLUSTER", 1),
        ("H", num_heads),
        ("IS_SPLIT", int(is_split)),
        ("NT", config[0]),
        ("WARPS", config[1]),
        *zip(("LONG_SEEN", "LONG_TABLES", "LONG_ROWS"), map(int, are_long), strict=True),
    )
    return rtc.KernelSource("indexer_scores_few", macros)


def smem_bytes(num_heads: int, *, is_split: bool) -> int:
    """Dynamic shared memory of a CTA, as the kernel lays it out."""
    return num_heads // 16 * 8 * 512 * (1 + is_split) + 4 * num_heads


def scores_refusal(
    q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor | None, *indices: Tensor
) -> str:
    """Why the kernel does not score arguments that the general one does; "" if it does.

    indices: tables, rows and visible.
    """
    num_tokens, num_heads, head_dim = q.shape
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < CAPABILITY:
        return "the GPU does not multiply pairs of bfloat16"
    if num_tokens > MOST_TOKENS or num_heads not in HEADS or head_dim != HEAD_DIM:
        return f"q is {tuple(q.shape)}"
    if q.dtype not in (torch.float32, torch.bfloat16) or weights.dtype != torch.float32:
        return f"q is {q.dtype}, weights are {weights.dtype}"
    if scales is None:
        return "keys are not packed"
    size = q.element_size()
    places = [q.data_ptr(), *(size * stride for stride in q.stride()[:2])]
    places += [keys.data_ptr(), *keys.stride()[:2]]
    if q.stride(2) != 1 or any(place % ALIGNMENT for place in places):
        return "rows are not aligned"
    known = (torch.int32, torch.int64)
    return "" if all(x.dtype in known for x in indices) else "indices of other types"


def launch_indexer_scores_few(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,
    seq_ids: Tensor,
    visible: Tensor,
    scores: Tensor,
    config: tuple[int, int] | None = None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    scores: (T, max_entries) float32, contiguous; written where a token sees entries. config: None
    for that of `select_indexer_scores_few`.
    """
    assert scales is not None, "keys are packed"
    (num_tokens, num_heads, head_dim), max_entries = q.shape, scores.shape[1]
    if num_tokens == 0 or max_entries == 0:
        return
    config = config or select_indexer_scores_few(max_entries)
    is_split = q.dtype == torch.float32
    long = torch.int64
    are_long = (visible.dtype == long, block_tables.dtype == long, seq_ids.dtype == long)
    source = scores_source(num_heads, config, are_long, is_split=is_split)
    strides = (*q.stride()[:2], *weights.stride(), *keys.stride()[:2], *scales.stride()[:2])
    numbers = (block_tables.stride(0), keys.shape[1], max_entries)
    tensors = (scores, q, weights, keys, scales, block_tables, seq_ids, visible)
    rtc.launch(
        rtc.load_kernel(source, q.device, smem_bytes(num_heads, is_split=is_split)),
        -(-max_entries // (8 * config[0] * config[1])),
        32 * config[1],
        [
            *map(rtc.pointer, tensors),
            *map(ctypes.c_int64, strides),
            *map(ctypes.c_int, numbers),
            ctypes.c_float((num_heads * head_dim) ** -0.5),
        ],
        grid_y=num_tokens,
        is_dependent=rtc.is_dependent(q.device),
    )
