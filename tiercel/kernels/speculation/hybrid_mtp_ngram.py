"""N-gram drafts behind those of an MTP head: the launch of cuda/hybrid_mtp_ngram.cu."""

from __future__ import annotations

from torch import Tensor

from tiercel.kernels.speculation.ngram_launch import launch_ngram, select_ngram
from tiercel.kernels.speculation.ngram_search import NgramBatch, NgramLimits


def launch_hybrid_mtp_ngram(
    batch: NgramBatch, limits: NgramLimits, threshold: int | Tensor, workspace: Tensor
) -> None:
    """Enqueue on the current stream; the op has checked and allocated."""
    rows, room = batch.prompt.shape
    config = select_ngram(rows, room, batch.prompt.element_size(), is_private=False)
    launch_ngram("hybrid_mtp_ngram", batch, limits, threshold, workspace, config)
