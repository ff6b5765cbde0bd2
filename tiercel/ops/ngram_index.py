"""Drafts as `ngram_match` finds them, from an index that grows with the text.

A search reads every token of every row at each step. Committed tokens never change, so the leftmost
window is the first one ever seen: a table of first occurrences answers in one look per window size,
and a step costs as much as it has new tokens, at any length of the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.speculation.ngram_batch import NgramBatch, NgramLimits
from tiercel.ops.ngram_match import (
    THRESHOLD,
    THRESHOLD_VARIABLE,
    check_integer,
    check_ngram_numbers,
    make_match_batch,
    ngram_workspace,
    resolve_threshold,
)
from tiercel.ops.ngram_match_torch import draft_torch

_EMPTY_SLOT = 0x7FFFFFFF
MAX_TOKENS = 2**23 - 1  # of a row: 8 of a slot's bits tell windows apart


@dataclass(frozen=True, slots=True)
class NgramIndex:
    """First occurrences of the windows of up to `rows` texts; 8 bytes a token and window size.

    Attributes:
        slots: (rows, sizes, capacity) int32, mutated by the ops: places of windows, and bits of
            their hashes.
        inserted: (rows, 2) int32, mutated by the ops: tokens of prompt and generated text before
            which all windows are in.
        max_ngram_size: longest window.
        min_ngram_size: shortest window.
    """

    slots: Tensor
    inserted: Tensor
    max_ngram_size: int
    min_ngram_size: int

    def clear(self, row: int) -> None:
        """Forget a row's text; needed before the row holds another one."""
        self.slots[row].fill_(_EMPTY_SLOT)
        self.inserted[row].zero_()


@dataclass(frozen=True, slots=True)
class NgramTexts:
    """Rows whose text the index follows; the arguments of `ngram_match` of the same names.

    The index wants the lengths of a row, until it is cleared, never to fall, and a prompt to be
    whole (all chunks counted) when the first token is generated.
    """

    input_ids: Tensor
    input_ids_len: Tensor
    token_ids_all: Tensor
    prompt_lens: Tensor
    step_idx: Tensor
    draft_token_num: Tensor
    draft_tokens: Tensor
    seq_lens_this_time: Tensor
    seq_lens_encoder: Tensor
    seq_lens_decoder: Tensor
    max_dec_len: Tensor


def make_ngram_index(
    rows: int,
    max_tokens: int,
    device: torch.device,
    *,
    max_ngram_size: int = 3,
    min_ngram_size: int = 1,
) -> NgramIndex:
    """Allocate an empty index.

    Args:
        rows: rows of the batches it will follow.
        max_tokens: of a row, prompt and generated; up to 8,388,607.
        device: where the texts are.
        max_ngram_size: longest window, 1 to 64.
        min_ngram_size: shortest window, 1 to max_ngram_size.

    Raises:
        ArgumentError: a size is out of range.
    """
    check_ngram_numbers("ngram_index", max_ngram_size, min_ngram_size, 0, "count")
    for name, number in (("rows", rows), ("max_tokens", max_tokens)):
        check_integer("ngram_index", name, number)
    if rows < 0:
        raise ArgumentError(f"ngram_index: rows={rows} is out of range.", hint="Use 0 or more.")
    if min_ngram_size > max_ngram_size:
        raise ArgumentError(
            f"ngram_index: min_ngram_size={min_ngram_size} is above "
            f"max_ngram_size={max_ngram_size}.",
            hint="An index without sizes finds nothing: lower min_ngram_size.",
        )
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise ArgumentError(
            f"ngram_index: max_tokens={max_tokens} is out of range.", hint=f"Use 1 to {MAX_TOKENS}."
        )
    # At most half full: short probes. Slots are read by 16.
    capacity = max(16, 1 << (2 * max_tokens - 1).bit_length())
    shape = (rows, max_ngram_size - min_ngram_size + 1, capacity)
    slots = torch.full(shape, _EMPTY_SLOT, dtype=torch.int32, device=device)
    inserted = torch.zeros((rows, 2), dtype=torch.int32, device=device)
    return NgramIndex(slots, inserted, max_ngram_size, min_ngram_size)


def ngram_index(
    index: NgramIndex,
    texts: NgramTexts,
    *,
    threshold: int | Tensor | None = None,
    convention: str = "count",
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take the new tokens of all rows into the index, then draft exactly as `ngram_match` does.

    On a GPU with a workspace: one launch, no allocation and no wait; safe to capture in a graph. A
    CPU reads the texts instead of the index, with the same result.

    Args:
        index: mutated; of as many rows as the texts.
        texts: draft_tokens and seq_lens_this_time are mutated.
        threshold: as in `ngram_match`.
        convention: as in `ngram_match`.
        workspace: as in `ngram_match`.

    Returns:
        draft_tokens and seq_lens_this_time.

    Raises:
        ArgumentError: as in `ngram_match`, or the index does not fit.
    """
    batch, shift = _checked(index, texts, convention)
    limits = NgramLimits(index.max_ngram_size, index.min_ngram_size, 0, shift)
    default = (THRESHOLD_VARIABLE, THRESHOLD)
    threshold = resolve_threshold("ngram_index", threshold, default, texts.input_ids.device)
    if texts.input_ids.shape[0]:
        if texts.input_ids.is_cuda:
            _launch(index, batch, limits, threshold, workspace, is_step=True)
        else:
            draft_torch(batch, limits, int(threshold))
    return texts.draft_tokens, texts.seq_lens_this_time


def extend_ngram_index(
    index: NgramIndex, texts: NgramTexts, *, workspace: Tensor | None = None
) -> None:
    """Take the new tokens of all rows into the index with the whole device: for prompts.

    Without it the next `ngram_index` does the same with one warp per row.

    Args:
        index: mutated; of as many rows as the texts.
        texts: lengths and tokens are read; idle rows are left out.
        workspace: as in `ngram_match`.

    Raises:
        ArgumentError: as in `ngram_index`.
    """
    batch, shift = _checked(index, texts, "count")
    limits = NgramLimits(index.max_ngram_size, index.min_ngram_size, 0, shift)
    if texts.input_ids.shape[0] and texts.input_ids.is_cuda:
        _launch(index, batch, limits, 0, workspace, is_step=False)


def _launch(
    index: NgramIndex,
    batch: NgramBatch,
    limits: NgramLimits,
    threshold: int | Tensor,
    workspace: Tensor | None,
    *,
    is_step: bool,
) -> None:
    from tiercel.kernels.speculation.ngram_index import launch_ngram_index

    workspace = ngram_workspace("ngram_index", workspace, batch.prompt)
    state = (index.slots, index.inserted)
    launch_ngram_index(batch, limits, threshold, workspace, *state, is_step=is_step)


def _checked(index: NgramIndex, texts: NgramTexts, convention: str) -> tuple[NgramBatch, int]:
    """The tensors as the kernels take them, and how many tokens after G[s-1] the query ends."""
    tensors = {
        "input_ids": texts.input_ids,
        "token_ids_all": texts.token_ids_all,
        "draft_tokens": texts.draft_tokens,
        "input_ids_len": texts.input_ids_len,
        "prompt_lens": texts.prompt_lens,
        "step_idx": texts.step_idx,
        "max_dec_len": texts.max_dec_len,
        "draft_token_num": texts.draft_token_num,
        "seq_lens_this_time": texts.seq_lens_this_time,
        "seq_lens_encoder": texts.seq_lens_encoder,
        "seq_lens_decoder": texts.seq_lens_decoder,
    }
    batch = make_match_batch("ngram_index", tensors, 0)
    sizes = (index.max_ngram_size, index.min_ngram_size)
    shift = check_ngram_numbers("ngram_index", *sizes, 0, convention)
    rows, device = texts.input_ids.shape[0], texts.input_ids.device
    if index.slots.shape[0] != rows or index.slots.device != device:
        raise ArgumentError(
            f"ngram_index: the index has {index.slots.shape[0]} rows on {index.slots.device}, the "
            f"texts have {rows} on {device}.",
            hint="Make the index for the rows of the batch.",
        )
    return batch, shift
