"""Launches the n-gram drafters of kernels/cuda: ngram_match.cu and hybrid_mtp_ngram.cu.

Floor: the tokens of the searched rows, read once; for small sets the ramp of one kernel and a chain
of about seven dependent trips to the L2 cache or memory: row table, query, keys, ticket, keys,
drafts, about 0.6 us each.
"""

from __future__ import annotations

import ctypes
import math
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.kernels.runtime import rtc
from tiercel.kernels.speculation.ngram_batch import NgramBatch, NgramLimits

NgramOp = Literal["ngram_match", "hybrid_mtp_ngram", "ngram_index"]
# Bytes of all rows up to -> log2 of a tile, whether the row table is read first. Between 1 MiB and
# 16 MiB the tile makes about one item per CTA.
_TILES = (
    (1 << 20, 8, False),
    (4 << 20, 9, False),
    (12 << 20, 11, False),
    (24 << 20, 11, True),
    (math.inf, 12, True),
)
MAX_ITEMS = 2**31 - 1  # tiles of all rows are counted in int32


class NgramConfig(Struct, frozen=True):
    """A launch.

    Attributes:
        threads: of a CTA.
        unroll: 16-byte loads in flight of a thread.
        ctas: of a multiprocessor.
        log2_tile: of the 16-byte vectors of a work item, >= 3.
        is_pruning: whether each CTA first reads the whole row table, to leave out rows that the
            budget kills and to bound the tiles of a row.
    """

    threads: int
    unroll: int
    ctas: int
    log2_tile: int
    is_pruning: bool


def select_ngram(num_rows: int, room: int, token_bytes: int, *, is_private: bool) -> NgramConfig:
    """Choose the launch. Pure: equal in every process, readable by a test.

    Args:
        num_rows: rows of the batch.
        room: tokens of a row at most, prompt and generated.
        token_bytes: 4 or 8.
        is_private: whether rows may be written one by one where the budget cannot bind.
    """
    num_bytes = num_rows * room * token_bytes
    tiles = ((log2, prunes) for limit, log2, prunes in _TILES if num_bytes <= limit)
    log2_tile, is_pruning = next(tiles)
    is_one_tile = is_pruning and room * token_bytes <= 16 << log2_tile
    # The scan takes a thread per row; without it small blocks are faster: 16.0 and 16.5 us for 512
    # rows of 16,384 int32 tokens (H200).
    is_small = num_rows <= 256 or (is_private and is_one_tile)
    threads, ctas = (256, 4) if is_small else (512, 2)
    return NgramConfig(threads, 4, ctas, log2_tile, is_pruning)


def ngram_source(
    op: NgramOp, config: NgramConfig, token_bytes: int, length_bytes: int
) -> rtc.KernelSource:
    """The translation unit of an op."""
    macros = (
        ("TOKEN_BYTES", token_bytes),
        ("LENGTH_BYTES", length_bytes),
        ("THREADS", config.threads),
        ("UNROLL", config.unroll),
        ("CTAS", config.ctas),
    )
    return rtc.KernelSource(op, macros)


class _Args(ctypes.Structure):
    """`Args` of ngram_tiles.cuh."""

    _fields_ = (
        ("prompt", ctypes.c_void_p),
        ("generated", ctypes.c_void_p),
        ("drafts", ctypes.c_void_p),
        ("prompt_lens", ctypes.c_void_p),
        ("generated_start", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("max_dec", ctypes.c_void_p),
        ("draft_limit", ctypes.c_void_p),
        ("lens", ctypes.c_void_p),
        ("encoder", ctypes.c_void_p),
        ("decoder", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("device_threshold", ctypes.c_void_p),
        ("prompt_stride", ctypes.c_longlong),
        ("generated_stride", ctypes.c_longlong),
        ("draft_stride", ctypes.c_longlong),
        ("rows", ctypes.c_int),
        ("prompt_room", ctypes.c_int),
        ("generated_room", ctypes.c_int),
        ("draft_room", ctypes.c_int),
        ("max_n", ctypes.c_int),
        ("min_n", ctypes.c_int),
        ("max_drafts", ctypes.c_int),
        ("query_shift", ctypes.c_int),
        ("threshold", ctypes.c_int),
        ("log2_tile", ctypes.c_int),
        ("max_tiles", ctypes.c_int),
        ("is_pruning", ctypes.c_int),
    )


def num_tiles(batch: NgramBatch, config: NgramConfig) -> int:
    """Tiles of a row at most; those of all rows must not be more than `MAX_ITEMS`."""
    lanes = 16 // batch.prompt.element_size()
    rooms = (batch.prompt.shape[1], batch.generated.shape[1])
    return -(-sum(room // lanes + 2 for room in rooms) >> config.log2_tile)


def make_args(
    batch: NgramBatch,
    limits: NgramLimits,
    threshold: int | Tensor,
    workspace: Tensor,
    config: NgramConfig,
) -> _Args:
    """The kernel's only argument."""

    def place(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    on_device = threshold if isinstance(threshold, Tensor) else None
    return _Args(
        place(batch.prompt),
        place(batch.generated),
        place(batch.drafts),
        place(batch.prompt_lens),
        place(batch.generated_start),
        place(batch.steps),
        place(batch.max_dec),
        place(batch.draft_limit),
        place(batch.lens),
        place(batch.encoder),
        place(batch.decoder),
        place(workspace),
        place(on_device),
        batch.prompt.stride(0),
        batch.generated.stride(0),
        batch.drafts.stride(0),
        batch.prompt.shape[0],
        batch.prompt.shape[1],
        batch.generated.shape[1],
        batch.drafts.shape[1],
        limits.max_ngram_size,
        limits.min_ngram_size,
        limits.max_draft_tokens,
        limits.query_shift,
        0 if isinstance(threshold, Tensor) else threshold,
        config.log2_tile,
        num_tiles(batch, config),
        config.is_pruning,
    )


def launch_ngram(
    op: NgramOp,
    batch: NgramBatch,
    limits: NgramLimits,
    threshold: int | Tensor,
    workspace: Tensor,
    config: NgramConfig,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        op: which rule.
        batch: at least one row, at most `MAX_ITEMS` tiles.
        limits: of the op.
        threshold: the budget, or a device int32 that holds it.
        workspace: (1 + rows,) int64: 0, then -1; the kernel leaves it so.
        config: from `select_ngram`.
    """
    args = make_args(batch, limits, threshold, workspace, config)
    source = ngram_source(op, config, batch.prompt.element_size(), batch.steps.element_size())
    device = batch.prompt.device
    kernel = rtc.load_kernel(source, device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    most = config.ctas * processors
    rtc.launch(kernel, max(1, min(args.rows * args.max_tiles, most)), config.threads, [args])
