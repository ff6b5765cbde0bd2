"""N-gram drafts from an index of first occurrences: the launch of cuda/ngram_index.cu.

Floor: none in bytes, a step reads some lines per row; a chain of dependent trips to memory: row
table, tokens, slot, tokens at the slot's place, drafts.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from tiercel.kernels.runtime import rtc
from tiercel.kernels.speculation.ngram_batch import NgramBatch, NgramLimits
from tiercel.kernels.speculation.ngram_launch import NgramConfig, make_args, ngram_source

EMPTY_SLOT = 0x7FFFFFFF
_SIZES = (4, 64)  # largest windows of a kernel: in registers alone, and any


class _Index(ctypes.Structure):
    """`Index` of ngram_index.cu."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("inserted", ctypes.c_void_p),
        ("capacity", ctypes.c_int),
        ("parts", ctypes.c_int),
    )


def select_ngram_index(*, is_step: bool) -> NgramConfig:
    """Choose the launch: two warps a row, or many threads for prompts. Pure, as all `select_*`."""
    threads, ctas = (64, 8) if is_step else (512, 1)
    return NgramConfig(threads, 1, ctas, 3, False)


def ngram_index_source(
    config: NgramConfig, token_bytes: int, length_bytes: int, max_ngram_size: int
) -> rtc.KernelSource:
    """The translation unit for windows up to a size: up to 4 tokens, or any."""
    source = ngram_source("ngram_index", config, token_bytes, length_bytes)
    largest = next(size for size in _SIZES if max_ngram_size <= size)
    return replace(source, macros=(*source.macros, ("LARGEST_N", largest)))


def launch_ngram_index(
    batch: NgramBatch,
    limits: NgramLimits,
    threshold: int | Tensor,
    workspace: Tensor,
    slots: Tensor,
    inserted: Tensor,
    *,
    is_step: bool,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        batch: at least one row.
        limits: of the op.
        threshold: the budget, or a device int32 that holds it.
        workspace: (1 + rows,) int64: 0, then -1; the kernel leaves it so.
        slots: (rows, sizes, capacity) int32, mutated.
        inserted: (rows, 2) int32, mutated.
        is_step: whether to draft; else windows are inserted, with more CTAs a row.
    """
    rows, device = batch.prompt.shape[0], batch.prompt.device
    config = select_ngram_index(is_step=is_step)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    most = config.ctas * processors
    parts = 0 if is_step else max(1, most // rows)
    ctas = rows if is_step else rows * parts
    args = make_args(batch, limits, threshold, workspace, config)
    index = _Index(slots.data_ptr(), inserted.data_ptr(), slots.shape[2], parts)
    source = ngram_index_source(
        config, batch.prompt.element_size(), batch.steps.element_size(), limits.max_ngram_size
    )
    kernel = rtc.load_kernel(source, device)
    rtc.launch(
        kernel,
        min(ctas, most),
        config.threads,
        [args, index],
        is_dependent=rtc.has_dependent_launch(device),
    )
