"""The choice of the indexer's best entries in one launch: cuda/attention/indexer_select.cu.

A CTA takes a token whose scores fit its shared memory, a cluster of CTAs one with more; scores are
read once. Three histograms give the least score that is chosen. The choice is that of
`indexer_topk`'s Triton kernel, entry for entry.

Floor: scores are read once, 4 bytes each, and latency: five scans, four exchanges in a cluster.
"""

from __future__ import annotations

import ctypes
import math
from typing import Final

import torch
from torch import Tensor

from tiercel.kernels.runtime import rtc

CAPABILITY: Final = (9, 0)  # clusters
# CTAs of a cluster, and most scores of each; clusters of more than 8 are not portable.
_LAUNCHES: Final = ((1, 8192), (1, 32768), (8, 32768))
MOST_ENTRIES: Final = math.prod(_LAUNCHES[-1])
LEAST_ENTRIES: Final = 2049  # fewer are one piece of the Triton kernel, which is faster
MOST_CTAS: Final = 64  # more clusters wait for each other: 16 tokens took twice as long as one
_THREADS: Final = 1024
_BINS: Final = 2048


def select_indexer_select(max_entries: int) -> tuple[int, int]:
    """CTAs of a cluster, and most scores of each, for up to `MOST_ENTRIES`. Pure."""
    return next(launch for launch in _LAUNCHES if max_entries <= math.prod(launch))


def smem_bytes(scores: int) -> int:
    """Dynamic shared memory of a CTA, as the kernel lays it out."""
    return 4 * (3 * _BINS + 1024 + 64 + scores)


def select_source(cluster: int, *, is_long: bool) -> rtc.KernelSource:
    """The kernel as built for one kind of call."""
    macros = (("IS_BF16", 1), ("CLUSTER", cluster), ("IS_LONG", int(is_long)))
    return rtc.KernelSource("indexer_select", macros)


def select_refusal(num_tokens: int, max_entries: int, device: torch.device) -> str:
    """Why the kernel does not choose among the scores of some tokens; "" if it does."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        return "the GPU has no clusters"
    is_known = LEAST_ENTRIES <= max_entries <= MOST_ENTRIES
    if not is_known or num_tokens * select_indexer_select(max_entries)[0] > MOST_CTAS:
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
    cluster, most = config or select_indexer_select(max_entries)
    source = select_source(cluster, is_long=visible.dtype == torch.int64)
    numbers = (max_entries, out.shape[1], out.stride(0))
    rtc.launch(
        rtc.load_kernel(source, scores.device, smem_bytes(most)),
        cluster,
        _THREADS,
        [*map(rtc.pointer, (out, scores, visible)), *map(ctypes.c_int, numbers)],
        grid_y=num_tokens,
        is_dependent=rtc.is_dependent(scores.device),
    )
