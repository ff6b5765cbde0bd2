"""Drafts of an MTP head, extended by n-gram drafts: tokens that followed the same tokens before."""

from __future__ import annotations

from torch import Tensor

from tiercel.kernels.speculation.ngram_batch import NgramBatch, NgramLimits
from tiercel.ops.ngram_match import (
    check_ngram_numbers,
    check_ngram_tensors,
    check_ngram_tiles,
    ngram_workspace,
    resolve_threshold,
)
from tiercel.ops.ngram_match_torch import draft_torch

THRESHOLD_VARIABLE, THRESHOLD = "SPEC_TOKENUM_THRESHOLD", 1024


def hybrid_mtp_ngram(
    input_ids: Tensor,
    input_ids_len: Tensor,
    pre_ids: Tensor,
    step_idx: Tensor,
    draft_token_num: Tensor,
    draft_tokens: Tensor,
    seq_lens_this_time: Tensor,
    seq_lens_decoder: Tensor,
    max_dec_len: Tensor,
    max_ngram_size: int,
    min_ngram_size: int,
    max_draft_tokens: int,
    *,
    threshold: int | Tensor | None = None,
    convention: str = "index",
    workspace: Tensor | None = None,
    prompt_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Look for the last n tokens, MTP drafts among them; append tokens that came next as drafts.

    The search is that of `ngram_match`, with sizes down to min_ngram_size. A row whose length is 0
    or that may take no more drafts stays as it is. Rows share `threshold` tokens in their order:
    lengths of this step, one token for each row with decoder > 0 not yet passed, and drafts.
    On a GPU with a workspace: one launch, no allocation and no wait; safe to capture in a graph.

    Args:
        input_ids: (B, S) int64 or int32 prompts; tokens after a length are not read.
        input_ids_len: (B,) or (B, 1) int64 or int32, tokens of a prompt.
        pre_ids: (B, room), dtype of input_ids: G, the generated text with the MTP drafts.
        step_idx: like input_ids_len: s, MTP drafts counted; the text is G[0..s-1].
        draft_token_num: (B,) or (B, 1) int32, checked but not read.
        draft_tokens: (B, W), dtype of input_ids; drafts are written after those of the MTP head,
            other slots stay.
        seq_lens_this_time: (B,) int32, mutated: 1 + MTP drafts on entry, 1 + all drafts at the end.
        seq_lens_decoder: (B,) int32, > 0 for a row that counts in the reserve.
        max_dec_len: like input_ids_len, the limit of generated tokens.
        max_ngram_size: 1 to 64.
        min_ngram_size: 1 or more; above max_ngram_size nothing is found.
        max_draft_tokens: drafts of a row at most, with those of the MTP head.
        threshold: as in `ngram_match`; None: SPEC_TOKENUM_THRESHOLD, or 1024.
        convention: as in `ngram_match`.
        workspace: as in `ngram_match`.
        prompt_lens: like input_ids_len, where in its row of `pre_ids` G begins; None: at 0.

    Returns:
        draft_tokens and seq_lens_this_time.

    Raises:
        ArgumentError: as in `ngram_match`.

    Source: PaddlePaddle FastDeploy pull requests 3610 and 6960.
    """
    tensors = {
        "input_ids": input_ids,
        "pre_ids": pre_ids,
        "draft_tokens": draft_tokens,
        "input_ids_len": input_ids_len,
        "step_idx": step_idx,
        "max_dec_len": max_dec_len,
        "draft_token_num": draft_token_num,
        "seq_lens_this_time": seq_lens_this_time,
        "seq_lens_decoder": seq_lens_decoder,
        **({} if prompt_lens is None else {"prompt_lens": prompt_lens}),
    }
    op = "hybrid_mtp_ngram"
    shift = check_ngram_numbers(op, max_ngram_size, min_ngram_size, max_draft_tokens, convention)
    batch = _make_batch(op, tensors, max_draft_tokens)
    # Any number above the longest means the same, also one that the kernel cannot hold.
    min_ngram_size = min(min_ngram_size, max_ngram_size + 1)
    limits = NgramLimits(max_ngram_size, min_ngram_size, max_draft_tokens, shift)
    default = (THRESHOLD_VARIABLE, THRESHOLD)
    threshold = resolve_threshold(op, threshold, default, input_ids.device)
    if input_ids.shape[0]:
        _draft(batch, limits, threshold, workspace)
    return draft_tokens, seq_lens_this_time


def _draft(
    batch: NgramBatch, limits: NgramLimits, threshold: int | Tensor, workspace: Tensor | None
) -> None:
    if not batch.prompt.is_cuda:
        draft_torch(batch, limits, int(threshold))
        return
    from tiercel.kernels.speculation.hybrid_mtp_ngram import (
        launch_hybrid_mtp_ngram,
        select_hybrid_mtp_ngram,
    )

    workspace = ngram_workspace("hybrid_mtp_ngram", workspace, batch.prompt)
    config = select_hybrid_mtp_ngram(batch)
    check_ngram_tiles("hybrid_mtp_ngram", batch, config)
    launch_hybrid_mtp_ngram(batch, limits, threshold, workspace, config)


def _make_batch(op: str, tensors: dict[str, Tensor], max_draft_tokens: int) -> NgramBatch:
    check_ngram_tensors(op, tensors, max_draft_tokens)
    return NgramBatch(
        prompt=tensors["input_ids"],
        prompt_lens=tensors["input_ids_len"].flatten(),
        generated=tensors["pre_ids"],
        generated_start=tensors["prompt_lens"].flatten() if "prompt_lens" in tensors else None,
        steps=tensors["step_idx"].flatten(),
        draft_limit=None,
        drafts=tensors["draft_tokens"],
        lens=tensors["seq_lens_this_time"].flatten(),
        encoder=None,
        decoder=tensors["seq_lens_decoder"].flatten(),
        max_dec=tensors["max_dec_len"].flatten(),
    )
