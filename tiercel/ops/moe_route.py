"""The router of DeepSeek-V4: which experts a token goes to, and with which weights."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel import env
from tiercel.errors import ArgumentError
from tiercel.ops import moe_route_torch as torch_ops

_MOST_EXPERTS, _MOST_CHOSEN = 2048, 64  # of the kernels


def moe_route(
    logits: Tensor, bias: Tensor, *, topk: int, scale: float, own: range | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts with the best biased scores (learned routing).

    s = sqrt(softplus(logits)). The experts are the topk best of s + bias; the weights are s without
    bias, over their sum + 1e-20, times scale.

    Args:
        logits: (T, experts) float, with any strides.
        bias: (experts,) float32, for the choice alone.
        topk: experts a token goes to, 1 to `experts`.
        scale: the routed scaling factor.
        own: experts that this rank has; the results are those of `own_pairs`. None: all.

    Returns:
        ids (T, topk) int64 in descending order of s + bias, ties to the lower expert; weights
        (T, topk) float32. A row with NaN gives NaN weights.

    Raises:
        ArgumentError: shapes or dtypes disagree, or topk is out of range.

    Source: the inference code published with DeepSeek-V4; "Auxiliary-Loss-Free Load Balancing
    Strategy for Mixture-of-Experts", arXiv 2408.15664, for the bias.
    """
    _check_logits("moe_route", logits)
    if bias.shape != logits.shape[1:] or bias.dtype != torch.float32:
        raise ArgumentError(
            f"moe_route: bias is {tuple(bias.shape)} {bias.dtype} but there are {logits.shape[1]} "
            "experts.",
            hint=f"Pass ({logits.shape[1]},) torch.float32.",
        )
    if not 1 <= topk <= logits.shape[1]:
        raise ArgumentError(
            f"moe_route: topk={topk} of {logits.shape[1]} experts.",
            hint=f"Pass 1 to {logits.shape[1]}.",
        )
    if not route_refusal(logits, topk) and bias.stride(0) == 1:
        from tiercel.kernels.moe.moe_route import launch_moe_route

        ids, weights = _results(logits, topk)
        launch_moe_route(logits, bias, ids, weights, scale, own)
        return ids, weights
    scores = torch_ops.scores(logits)
    ids = torch_ops.best(scores + bias, topk)
    return torch_ops.own_pairs(ids, torch_ops.normalised(scores.gather(1, ids), scale), own)


def moe_route_hash(
    logits: Tensor, table: Tensor, token_ids: Tensor, *, scale: float, own: range | None = None
) -> tuple[Tensor, Tensor]:
    """Take a token's experts from a table, and their weights from the scores (hash routing).

    Args:
        logits: (T, experts) float, with any strides.
        table: (vocab, topk) int64, distinct experts in each row (checked when it is loaded).
        token_ids: (T,) int32 or int64, the input tokens; below vocab (not checked on a device).
        scale: the routed scaling factor.
        own: as in `moe_route`.

    Returns:
        ids (T, topk) int64 in the order of the table; weights (T, topk) float32 as in `moe_route`.

    Raises:
        ArgumentError: shapes or dtypes disagree.

    Source: as `moe_route`.
    """
    _check_logits("moe_route_hash", logits)
    if table.dim() != 2 or table.dtype != torch.int64:
        raise ArgumentError(
            f"moe_route_hash: table is {tuple(table.shape)} {table.dtype}.",
            hint="Pass (vocab, topk) torch.int64.",
        )
    if token_ids.shape != logits.shape[:1] or token_ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"moe_route_hash: token ids are {tuple(token_ids.shape)} {token_ids.dtype} but there "
            f"are {logits.shape[0]} rows of logits.",
            hint=f"Pass ({logits.shape[0]},) torch.int32 or torch.int64.",
        )
    if not route_refusal(logits, table.shape[1]) and table.is_contiguous():
        from tiercel.kernels.moe.moe_route import launch_moe_route_hash

        ids, weights = _results(logits, table.shape[1])
        launch_moe_route_hash(logits, table, token_ids, ids, weights, scale, own)
        return ids, weights
    ids = table.index_select(0, token_ids)
    weights = torch_ops.normalised(torch_ops.scores(logits).gather(1, ids), scale)
    return torch_ops.own_pairs(ids, weights, own)


def route_refusal(logits: Tensor, topk: int) -> str:
    """Why the kernels do not take some logits; "" if they do."""
    reasons = (
        (not logits.is_cuda, "the logits are not on a GPU"),
        (not env.has_route_kernel(), "TIERCEL_ROUTE_KERNEL=0"),
        (logits.dtype == torch.float64, "the logits are float64"),
        (logits.shape[1] > _MOST_EXPERTS, "the experts do not fit in registers"),
        (topk > _MOST_CHOSEN, "more than 64 experts are chosen"),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def _results(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    shape, device = (logits.shape[0], topk), logits.device
    return torch.empty(shape, dtype=torch.int64, device=device), torch.empty(shape, device=device)


def _check_logits(name: str, logits: Tensor) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ArgumentError(
            f"{name}: logits are {tuple(logits.shape)} {logits.dtype}.",
            hint="Pass (tokens, experts) of a float dtype.",
        )
