"""N-gram drafts for speculative decoding: tokens that followed a row's last n-gram in its text."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from tiercel.env import read_integer
from tiercel.errors import ArgumentError
from tiercel.kernels.speculation.ngram_batch import NgramBatch, NgramLimits
from tiercel.kernels.speculation.ngram_launch import MAX_ITEMS, NgramConfig, num_tiles
from tiercel.ops.ngram_match_torch import draft_torch

MAX_NGRAM_SIZE = 64  # tokens of a window that the kernel holds
THRESHOLD_VARIABLE, THRESHOLD = "INFER_WITH_REFERENCE_TOKENUM_THRESHOLD", 128
MAX_THRESHOLD = 2**30  # more than any batch spends, and room for the kernel's int32 sums
QUERY_SHIFTS = {"index": 1, "count": 0}
_TOKEN_DTYPES = (torch.int64, torch.int32)


def ngram_match(
    input_ids: Tensor,
    input_ids_len: Tensor,
    token_ids_all: Tensor,
    prompt_lens: Tensor,
    step_idx: Tensor,
    draft_token_num: Tensor,
    draft_tokens: Tensor,
    seq_lens_this_time: Tensor,
    seq_lens_encoder: Tensor,
    seq_lens_decoder: Tensor,
    max_dec_len: Tensor,
    max_ngram_size: int,
    max_draft_tokens: int,
    *,
    threshold: int | Tensor | None = None,
    convention: str = "index",
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Look for the last n tokens in the prompt and in the generated text; draft what came next.

    Sizes n = max_ngram_size .. 1 are tried; at each the prompt first, in it the leftmost window
    that has a follower. Rows share `threshold` tokens, in their order: lengths of this step, one
    token for each active row still to come, and drafts; a row with room for one draft takes none.

    On a GPU with a workspace: one launch, no allocation and no wait; safe to capture in a graph.

    Args:
        input_ids: (B, S) int64 or int32 prompts; tokens after a length are not read.
        input_ids_len: (B,) or (B, 1) int64 or int32, tokens of a prompt.
        token_ids_all: (B, max_model_len), dtype of input_ids; G, the generated text of a row,
            begins at its prompt_lens.
        prompt_lens: like input_ids_len; may differ from it.
        step_idx: like input_ids_len: s, the generated text is G[0..s-1].
        draft_token_num: (B,) or (B, 1) int32, the row's drafts at most; may be <= 0.
        draft_tokens: (B, W), dtype of input_ids; drafts are written from slot 1 on, other slots
            stay.
        seq_lens_this_time: (B,) int32, mutated: kept where the row is in prefill, 0 where it is
            idle, else 1 + drafts.
        seq_lens_encoder: (B,) int32, > 0 for a row in prefill.
        seq_lens_decoder: (B,) int32, 0 for an idle row that is not in prefill.
        max_dec_len: like input_ids_len, the limit of generated tokens.
        max_ngram_size: 1 to 64.
        max_draft_tokens: bounds W from below; rows are limited by draft_token_num alone.
        threshold: the budget, or a device int32 with it for captured graphs; <= 0: no drafts;
            None: INFER_WITH_REFERENCE_TOKENUM_THRESHOLD, read at each call, or 128.
        convention: the last token: "index": G[s], "count": G[s-1].
        workspace: from `make_ngram_workspace`, for calls of one stream; None: a new one.

    Returns:
        draft_tokens and seq_lens_this_time.

    Raises:
        ArgumentError: shapes, dtypes or numbers disagree. Lengths outside of their row are cut.

    Sources: prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding; the order of
    rows and the budget: PaddlePaddle FastDeploy pull requests 6960 and 7774.
    """
    tensors = {
        "input_ids": input_ids,
        "token_ids_all": token_ids_all,
        "draft_tokens": draft_tokens,
        "input_ids_len": input_ids_len,
        "prompt_lens": prompt_lens,
        "step_idx": step_idx,
        "max_dec_len": max_dec_len,
        "draft_token_num": draft_token_num,
        "seq_lens_this_time": seq_lens_this_time,
        "seq_lens_encoder": seq_lens_encoder,
        "seq_lens_decoder": seq_lens_decoder,
    }
    shift = check_ngram_numbers("ngram_match", max_ngram_size, 1, max_draft_tokens, convention)
    batch = make_match_batch("ngram_match", tensors, max_draft_tokens)
    limits = NgramLimits(max_ngram_size, 1, max_draft_tokens, shift)
    default = (THRESHOLD_VARIABLE, THRESHOLD)
    threshold = resolve_threshold("ngram_match", threshold, default, input_ids.device)
    if input_ids.shape[0]:
        _draft(batch, limits, threshold, workspace)
    return draft_tokens, seq_lens_this_time


def _draft(
    batch: NgramBatch, limits: NgramLimits, threshold: int | Tensor, workspace: Tensor | None
) -> None:
    if not batch.prompt.is_cuda:
        draft_torch(batch, limits, int(threshold))
        return
    from tiercel.kernels.speculation.ngram_match import launch_ngram_match, select_ngram_match

    workspace = ngram_workspace("ngram_match", workspace, batch.prompt)
    config = select_ngram_match(batch)
    check_ngram_tiles("ngram_match", batch, config)
    launch_ngram_match(batch, limits, threshold, workspace, config)


def make_match_batch(op: str, tensors: dict[str, Tensor], max_draft_tokens: int) -> NgramBatch:
    """The tensors of `ngram_match` by name as kernels take them.

    Raises:
        ArgumentError: as `check_ngram_tensors`.
    """
    check_ngram_tensors(op, tensors, max_draft_tokens)
    return NgramBatch(
        prompt=tensors["input_ids"],
        prompt_lens=tensors["input_ids_len"].flatten(),
        generated=tensors["token_ids_all"],
        generated_start=tensors["prompt_lens"].flatten(),
        steps=tensors["step_idx"].flatten(),
        draft_limit=tensors["draft_token_num"].flatten(),
        drafts=tensors["draft_tokens"],
        lens=tensors["seq_lens_this_time"].flatten(),
        encoder=tensors["seq_lens_encoder"].flatten(),
        decoder=tensors["seq_lens_decoder"].flatten(),
        max_dec=tensors["max_dec_len"].flatten(),
    )


def make_ngram_workspace(max_rows: int, device: torch.device) -> Tensor:
    """Room for calls with up to `max_rows` rows; each call leaves it as it was."""
    workspace = torch.full((1 + max_rows,), -1, dtype=torch.int64, device=device)
    workspace[:1].zero_()
    return workspace


def ngram_workspace(op: str, workspace: Tensor | None, input_ids: Tensor) -> Tensor:
    """The caller's workspace, checked, or a new one.

    Raises:
        ArgumentError: it has another dtype or device, or is too small.
    """
    rows = input_ids.shape[0]
    if workspace is None:
        return make_ngram_workspace(rows, input_ids.device)
    _check_tensor(op, "workspace", workspace)
    is_fit = workspace.dtype == torch.int64 and workspace.device == input_ids.device
    if not is_fit or workspace.numel() <= rows or not workspace.is_contiguous():
        raise ArgumentError(
            f"{op}: workspace is {workspace.dtype} {tuple(workspace.shape)} on {workspace.device} "
            f"for {rows} rows on {input_ids.device}.",
            hint="Make it with make_ngram_workspace for the largest batch.",
        )
    return workspace


def check_ngram_tensors(op: str, tensors: dict[str, Tensor], max_draft_tokens: int) -> None:
    """Check shapes, dtypes, strides and devices by name; matrices come first.

    Args:
        op: named in messages.
        tensors: by argument name: input_ids, the generated text and draft_tokens, then vectors.
        max_draft_tokens: bounds the width of draft_tokens.

    Raises:
        ArgumentError: the first that does not fit.
    """
    for name, tensor in tensors.items():
        _check_tensor(op, name, tensor)
    input_ids, drafts = tensors["input_ids"], tensors["draft_tokens"]
    rows = input_ids.shape[0] if input_ids.dim() else 0
    for index, (name, tensor) in enumerate(tensors.items()):
        is_matrix = index < 3
        is_length = name in ("input_ids_len", "prompt_lens", "step_idx", "max_dec_len")
        if is_matrix:
            wanted: tuple[torch.dtype, ...] = (input_ids.dtype,) if index else _TOKEN_DTYPES
            is_shaped = tensor.dim() == 2 and tensor.shape[0] == rows
            is_shaped = is_shaped and (tensor.stride(1) == 1 or tensor.shape[1] == 1)
            shapes = f"({rows}, width) with adjacent tokens"
            if tensor is drafts and rows > 1:  # written to: rows must not overlap
                is_shaped = is_shaped and tensor.stride(0) >= tensor.shape[1]
                shapes += " in rows of their own"
        else:
            wanted = (torch.int32,)
            if is_length:
                wanted = (tensors["input_ids_len"].dtype,) if index > 3 else _TOKEN_DTYPES
            is_shaped = tensor.shape in ((rows,), (rows, 1)) and tensor.is_contiguous()
            shapes = f"contiguous ({rows},) or ({rows}, 1)"
        if not is_shaped or tensor.dtype not in wanted or tensor.device != input_ids.device:
            dtypes = " or ".join(str(dtype) for dtype in wanted)
            raise ArgumentError(
                f"{op}: {name} is {tensor.dtype} {tuple(tensor.shape)} with strides "
                f"{tensor.stride()} on {tensor.device}.",
                hint=f"Pass {dtypes}, {shapes}, on {input_ids.device}.",
            )
    if drafts.shape[1] < 1 + max_draft_tokens:
        raise ArgumentError(
            f"{op}: draft_tokens has {drafts.shape[1]} columns for {max_draft_tokens} drafts.",
            hint=f"Pass {1 + max_draft_tokens} or more: slot 0 holds the last token.",
        )


def check_ngram_tiles(op: str, batch: NgramBatch, config: NgramConfig) -> None:
    """Check that a launch can count its tiles.

    Raises:
        ArgumentError: it cannot.
    """
    rows, tiles = batch.prompt.shape[0], num_tiles(batch, config)
    if rows * tiles > MAX_ITEMS:
        raise ArgumentError(
            f"{op}: {rows} rows of {tiles} tiles are too many.",
            hint="Pass fewer rows or shorter ones.",
        )


def check_ngram_numbers(
    op: str, max_ngram_size: int, min_ngram_size: int, max_draft_tokens: int, convention: str
) -> int:
    """Check the options; returns how many tokens after G[s-1] the query ends.

    Raises:
        ArgumentError: one is out of range.
    """
    numbers = {
        "max_ngram_size": max_ngram_size,
        "min_ngram_size": min_ngram_size,
        "max_draft_tokens": max_draft_tokens,
    }
    for name, number in numbers.items():
        check_integer(op, name, number)
    if not 1 <= max_ngram_size <= MAX_NGRAM_SIZE:
        raise ArgumentError(
            f"{op}: max_ngram_size={max_ngram_size} is out of range.",
            hint=f"Use 1 to {MAX_NGRAM_SIZE}.",
        )
    if min_ngram_size < 1:
        raise ArgumentError(
            f"{op}: min_ngram_size={min_ngram_size} is out of range.", hint="Use 1 or more."
        )
    if max_draft_tokens < 0:
        raise ArgumentError(
            f"{op}: max_draft_tokens={max_draft_tokens} is out of range.", hint="Use 0 or more."
        )
    if convention not in tuple(QUERY_SHIFTS):  # a tuple: values without a hash are refused too
        raise ArgumentError(
            f"{op}: convention={convention!r} is unknown.", hint='Use "index" or "count".'
        )
    return QUERY_SHIFTS[convention]


def resolve_threshold(
    op: str, threshold: int | Tensor | None, default: tuple[str, int], device: torch.device
) -> int | Tensor:
    """The caller's budget, else the environment's, else the default; within `MAX_THRESHOLD`.

    Args:
        op: named in messages.
        threshold: the caller's.
        default: the variable and the value without it.
        device: where a tensor must be.

    Raises:
        ArgumentError: the caller's or the variable's is no integer, or a tensor is not one int32 on
            the device.
    """
    if threshold is None:
        threshold = read_integer(default[0], default=default[1])
    if not isinstance(threshold, Tensor):
        check_integer(op, "threshold", threshold)
        return max(-MAX_THRESHOLD, min(int(threshold), MAX_THRESHOLD))
    if threshold.dtype != torch.int32 or threshold.numel() != 1 or threshold.device != device:
        raise ArgumentError(
            f"{op}: threshold is {threshold.dtype} {tuple(threshold.shape)} on {threshold.device}.",
            hint=f"Pass an int, or one int32 on {device}.",
        )
    return threshold


def _check_tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{op}: {name} is a {type(value).__name__}.", hint="Pass a tensor.")


def check_integer(op: str, name: str, value: object) -> None:
    """Check the type of an option.

    Raises:
        ArgumentError: it is no integer.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentError(f"{op}: {name}={value!r:.80} is not an integer.", hint="Pass an int.")
