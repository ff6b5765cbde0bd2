"""N-gram drafts after the last token of a row: the launch of cuda/ngram_match.cu."""

from __future__ import annotations

from torch import Tensor

from tiercel.kernels.speculation.ngram_batch import NgramBatch, NgramLimits
from tiercel.kernels.speculation.ngram_launch import NgramConfig, launch_ngram, select_ngram


def launch_ngram_match(
    batch: NgramBatch,
    limits: NgramLimits,
    threshold: int | Tensor,
    workspace: Tensor,
    config: NgramConfig,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated."""
    launch_ngram("ngram_match", batch, limits, threshold, workspace, config)


def select_ngram_match(batch: NgramBatch) -> NgramConfig:
    """Choose the launch."""
    rows, room = batch.prompt.shape
    return select_ngram(rows, room, batch.prompt.element_size(), is_private=True)
