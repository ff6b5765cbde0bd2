"""The choice of the indexer's best entries in one launch: cuda/attention/indexer_select.cu.

A CTA takes a token, and holds up to `MOST_HELD` scores in shared memory. Of more it reads the
groups of 16 whose best reaches a bound, which `indexer_scores` writes beside the scores. Histograms
give the least score that is chosen. The choice is that of `indexer_topk`'s Triton kernel, entry for
entry.

Floor: scores are read once, 4 bytes each, or of many those of topk groups, and latency: two to five
histograms, each with a scan over the CTA.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tiercel.kernels.runtime import rtc

CAPABILITY: Final = (9, 0)  # shared memory
GROUP: Final = 16  # scores whose best is given
MOST_ENTRIES: Final = 262144
MOST_HELD: Final = 16384
MOST_TOKENS: Final = 64
_THREADS: Final = 1024
_BINS: Final = 2048
_GROUPS: Final = 4096  # most groups that are compared


@dataclass(frozen=True, slots=True)
class SelectConfig:
    """How many entries a CTA chooses from, how many scores it holds, and whether by groups."""

    most: int
    capacity: int
    has_groups: bool


# Whole in shared memory, two CTAs an SM or one; by groups.
_CONFIGS: Final = (
    SelectConfig(8192, 8192, False),
    SelectConfig(MOST_HELD, MOST_HELD, False),
    SelectConfig(MOST_ENTRIES, 12288, True),
)


def select_indexer_select(max_entries: int) -> SelectConfig:
    """The launch for up to `MOST_ENTRIES`. Pure."""
    return next(config for config in _CONFIGS if max_entries <= config.most)


def smem_bytes(config: SelectConfig) -> int:
    """Dynamic shared memory of a CTA, as the kernel lays it out."""
    words = 3 * _BINS + 64 + 2 * config.most // 32 + config.capacity
    return 4 * (words + config.has_groups * (config.capacity + _GROUPS))


def select_source(config: SelectConfig, *, is_long: bool) -> rtc.KernelSource:
    """The kernel as built for one kind of call."""
    macros = (
        ("IS_BF16", 1),
        ("CLUSTER", 1),
        ("MOST", config.most),
        ("CAPACITY", config.capacity),
        ("HAS_GROUPS", int(config.has_groups)),
        ("IS_LONG", int(is_long)),
    )
    return rtc.KernelSource("indexer_select", macros)


def select_refusal(num_tokens: int, max_entries: int, device: torch.device) -> str:
    """Why the kernel does not choose among the scores of some tokens; "" if it does."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        return "the GPU has too little shared memory"
    if max_entries > MOST_ENTRIES or num_tokens > MOST_TOKENS:
        return f"{num_tokens} tokens, {max_entries} entries"
    return ""


def make_bests(num_tokens: int, max_entries: int, device: torch.device) -> Tensor:
    """Uninitialised (T, max_entries / GROUP, rounded up) float32; four may be read at once."""
    room = -(-max_entries // (4 * GROUP)) * 4
    bests = torch.empty((num_tokens, room), dtype=torch.float32, device=device)
    return bests[:, : -(-max_entries // GROUP)]


def launch_indexer_select(
    scores: Tensor,
    bests: Tensor,
    visible: Tensor,
    out: Tensor,
    config: SelectConfig | None = None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        scores: (T, max_entries) float32, contiguous.
        bests: (T, max_entries / GROUP, rounded up) float32, the best visible score of each GROUP,
            as `make_bests` allocates them; read where a token sees more than `MOST_HELD`.
        visible: (T,) int32 or int64, contiguous.
        out: (T, topk) int32, inner stride 1.
        config: None for that of `select_indexer_select`.
    """
    num_tokens, max_entries = scores.shape
    if num_tokens == 0:
        return
    config = config or select_indexer_select(max_entries)
    source = select_source(config, is_long=visible.dtype == torch.int64)
    numbers = (max_entries, bests.stride(0), out.shape[1], out.stride(0))
    rtc.launch(
        rtc.load_kernel(source, scores.device, smem_bytes(config)),
        1,
        _THREADS,
        [*map(rtc.pointer, (out, scores, bests, visible)), *map(ctypes.c_int, numbers)],
        grid_y=num_tokens,
        is_dependent=rtc.is_dependent(scores.device),
    )
