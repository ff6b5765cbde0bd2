"""N-gram drafts behind the last token of a row: the launch of cuda/ngram_match.cu."""

from __future__ import annotations

from torch import Tensor

from tiercel.kernels.speculation.ngram_launch import launch_ngram, select_ngram
from tiercel.kernels.speculation.ngram_search import NgramBatch, NgramLimits


def launch_ngram_match(
    batch: NgramBatch, limits: NgramLimits, threshold: int | Tensor, workspace: Tensor
) -> None:
    """Enqueue on the current stream; the op has checked and allocated."""
    rows, room = batch.prompt.shape
    config = select_ngram(rows, room, batch.prompt.element_size(), is_private=True)
    launch_ngram("ngram_match", batch, limits, threshold, workspace, config)
