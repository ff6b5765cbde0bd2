"""The choice of the indexer's best entries in one launch: cuda/attention/indexer_select.cu.

A cluster of CTAs takes a token; its scores are read once and kept in shared memory. Three
histograms give the least score that is chosen. The choice is that of `indexer_topk`'s Triton
kernel, entry for entry.

Floor: scores are read once, 4 bytes each, and latency: four exchanges within a cluster.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from tiercel.kernels.runtime import rtc

CAPABILITY: Final = (9, 0)  # clusters
CLUSTER: Final = 8  # CTAs; more are not portable
_THREADS: Final = 1024
_BINS: Final = 2048
# Scores of a token, and copies of the first histogram. Not measured yet.
_LAUNCHES: Final = ((8192, 1), (32768, 8), (CLUSTER << 15, 8))
MOST_ENTRIES: Final = _LAUNCHES[-1][0]
MOST_TOKENS: Final = 16  # more tokens fill the GPU by Triton's kernel. Not measured yet


def select_indexer_select(max_entries: int) -> tuple[int, int]:
    """Scores of a CTA at most, and copies of the first histogram. Pure."""
    return next((most // CLUSTER, copies) for most, copies in _LAUNCHES if max_entries <= most)


def smem_bytes(scores: int, copies: int) -> int:
    """Dynamic shared memory of a CTA, as the kernel lays it out."""
    return 4 * (_BINS * (copies + 3) + 1024 + 64 + scores)


def select_source(copies: int, *, is_long: bool) -> rtc.KernelSource:
    """The kernel as built for one kind of call."""
    macros = (("IS_BF16", 1), ("CLUSTER", CLUSTER), ("COPIES", copies), ("IS_LONG", int(is_long)))
    return rtc.KernelSource("indexer_select", macros)


def select_refusal(num_tokens: int, max_entries: int, device: torch.device) -> str:
    """Why the kernel does not choose among the scores of some tokens; "" if it does."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        return "the GPU has no clusters"
    if num_tokens > MOST_TOKENS or max_entries > MOST_ENTRIES:
        return f"{num_tokens} tokens, {max_entries} entries"
    return ""


def launch_indexer_select(
    scores: Tensor,
    visible: Tensor,
    out: Tensor,
    config: tuple[int, int] | None = None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        scores: (T, max_entries) float32, contiguous.
        visible: (T,) int32 or int64, contiguous.
        out: (T, topk) int32, inner stride 1.
        config: None for that of `select_indexer_select`.
    """
    num_tokens, max_entries = scores.shape
    if num_tokens == 0:
        return
    most, copies = config or select_indexer_select(max_entries)
    source = select_source(copies, is_long=visible.dtype == torch.int64)
    numbers = (max_entries, out.shape[1], out.stride(0))
    rtc.launch(
        rtc.load_kernel(source, scores.device, smem_bytes(most, copies)),
        CLUSTER,
        _THREADS,
        [*map(rtc.pointer, (out, scores, visible)), *map(ctypes.c_int, numbers)],
        grid_y=num_tokens,
        is_dependent=rtc.is_dependent(scores.device),
    )
