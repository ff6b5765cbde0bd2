"""Manifold-constrained hyper-connections (mHC): the residual streams of DeepSeek-V4."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel import env
from tiercel.errors import ArgumentError
from tiercel.ops import mhc_mix_torch as torch_ops
from tiercel.ops.rms_norm import rms_norm

_SOME_TOKENS, _SOME_STREAMS = 64, 4  # of a step of more than 16 tokens, at most
_MOST_STREAMS, _MOST_CHANNELS = 8, 8192  # of the kernels: a token's streams stay in registers
_FEW_TOKENS = 16  # beyond, the product runs on tensor cores


def mhc_mix_pre(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix the residual streams into a block's input, and form the weights of the way back.

    With u the flattened streams and m = fn u / sqrt(mean(u^2) + rms_eps), in three parts of n, n
    and n * n numbers: pre = sigmoid(m scale[0] + base) + hc_eps, post = 2 sigmoid(m scale[1] +
    base), comb = Sinkhorn(m scale[2] + base), and x = sum over i of pre[i] * streams[i].

    Args:
        streams: (T, n, hidden), float32, bfloat16 or float16, with any strides.
        fn: (n * (2 + n), n * hidden) float32.
        scale: (3,) float32.
        base: (n * (2 + n),) float32.
        rms_eps: added to the mean square, > 0.
        hc_eps: added to pre, to the softmax, and to each sum of Sinkhorn's iteration.
        sinkhorn_iters: iterations, >= 1; each ends on columns.
        norm_weight: (hidden,) float32 of the block's norm, which x passes; None for no norm.
        norm_eps: of that norm, > 0.
        out_dtype: of x; None for that of the streams.

    Returns:
        x (T, hidden) contiguous; post (T, n) float32; comb (T, n, n) float32, rows old streams and
        columns new streams.

    Raises:
        ArgumentError: shapes or dtypes disagree, or fewer than one iteration.

    Source: "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880; order and eps of the
    inference code published with DeepSeek-V4.
    """
    num_streams = _check_streams("mhc_mix_pre", streams)
    rows = num_streams * (2 + num_streams)
    _check_weights("mhc_mix_pre", streams, (fn, scale, base), (rows, 3))
    if sinkhorn_iters < 1:
        raise ArgumentError(f"mhc_mix_pre: {sinkhorn_iters} iterations.", hint="Pass at least 1.")
    num_tokens, _, hidden = streams.shape
    if norm_weight is not None and (
        norm_weight.shape != (hidden,) or norm_weight.dtype != torch.float32
    ):
        raise ArgumentError(
            f"mhc_mix_pre: norm_weight is {tuple(norm_weight.shape)} {norm_weight.dtype}.",
            hint=f"Pass ({hidden},) torch.float32.",
        )
    out_dtype = out_dtype or streams.dtype
    if not mhc_mix_refusal(streams, is_product=True):
        x = torch.empty((num_tokens, hidden), dtype=out_dtype, device=streams.device)
        post = fn.new_empty(num_tokens, num_streams)
        comb = fn.new_empty(num_tokens, num_streams, num_streams)
        eps = (rms_eps, hc_eps, norm_eps)
        _launch(streams, (fn, scale, base), x, (post, comb), norm_weight, eps, sinkhorn_iters)
        return x, post, comb
    mixed = torch_ops.mix(streams, fn, rms_eps)
    pre, post, comb = torch_ops.split_mix(mixed, scale, base, sinkhorn_iters, hc_eps)
    x = torch_ops.weighted_sum(streams, pre)
    if norm_weight is not None:
        return rms_norm(x, norm_weight, norm_eps, out_dtype), post, comb
    return x.to(out_dtype), post, comb


def mhc_mix_post(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write a block's output back: stream j is post[j] * y + sum over i of comb[i, j] * streams[i].

    Args:
        streams: (T, n, hidden), as given to `mhc_mix_pre`.
        y: (T, hidden), any float dtype: the block's output.
        post: (T, n) float32.
        comb: (T, n, n) float32; note the transposition in the sum.

    Returns:
        (T, n, hidden), contiguous, in the dtype of the streams; rounded once.

    Raises:
        ArgumentError: the shapes disagree.

    Source: as `mhc_mix_pre`.
    """
    _check_streams("mhc_mix_post", streams)
    _check_update("mhc_mix_post", streams, y, post, comb)
    if not mhc_mix_refusal(streams) and y.stride(1) == 1:
        from tiercel.kernels.fused.mhc_mix import launch_mhc_mix_post

        out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
        launch_mhc_mix_post(streams, y, post.contiguous(), comb.contiguous(), out)
        return out
    return torch_ops.write_back(streams, y, post, comb)


def mhc_mix_step(
    streams: Tensor,
    update: tuple[Tensor, Tensor, Tensor],
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    norm_weight: Tensor,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_mix_post` of one block, then `mhc_mix_pre` of the next; up to 64 tokens in one pass.

    Args:
        streams: (T, n, hidden), as given to `mhc_mix_pre` of the block before.
        update: y, post and comb of `mhc_mix_post`.
        fn: as the others of the next block; see `mhc_mix_pre`.
        scale: see `mhc_mix_pre`.
        base: see `mhc_mix_pre`.
        rms_eps: see `mhc_mix_pre`.
        hc_eps: see `mhc_mix_pre`.
        sinkhorn_iters: see `mhc_mix_pre`.
        norm_weight: see `mhc_mix_pre`.
        norm_eps: see `mhc_mix_pre`.
        out_dtype: of x.

    Returns:
        The streams between the blocks (T, n, hidden), contiguous; x, post and comb of the next.

    Raises:
        ArgumentError: as both.

    Source: as `mhc_mix_pre`.
    """
    y, post, comb = update
    if step_refusal(streams, y):
        streams = mhc_mix_post(streams, y, post, comb)
        mixed = mhc_mix_pre(
            streams,
            fn,
            scale,
            base,
            rms_eps=rms_eps,
            hc_eps=hc_eps,
            sinkhorn_iters=sinkhorn_iters,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            out_dtype=out_dtype,
        )
        return streams, *mixed
    num_streams = _check_streams("mhc_mix_step", streams)
    _check_update("mhc_mix_step", streams, y, post, comb)
    _check_weights("mhc_mix_step", streams, (fn, scale, base), (num_streams * (2 + num_streams), 3))
    num_tokens, _, hidden = streams.shape
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    x = torch.empty((num_tokens, hidden), dtype=out_dtype, device=streams.device)
    coefficients = fn.new_empty(post.shape), fn.new_empty(comb.shape)
    before = (streams, y, post.contiguous(), comb.contiguous())
    weights = (fn.contiguous(), scale.contiguous(), base.contiguous())
    eps = (rms_eps, hc_eps, norm_eps)
    results = (out, x, coefficients, norm_weight, eps, sinkhorn_iters)
    from tiercel.kernels.fused.mhc_mix import launch_mhc_mix_step, step_parts_shape

    parts = fn.new_empty(step_parts_shape(num_tokens, num_streams, hidden))
    launch_mhc_mix_step(before, weights, parts, *results)
    return out, x, *coefficients


def step_refusal(streams: Tensor, y: Tensor) -> str:
    """Why a step is no single pass over some streams; "" if it is."""
    num_tokens, num_streams, _ = streams.shape
    if num_tokens > (_SOME_TOKENS if num_streams == _SOME_STREAMS else _FEW_TOKENS):
        return f"{num_tokens} tokens of {num_streams} streams are too many"
    if y.stride(-1) != 1:
        return "the channels of y are not next to each other"
    return mhc_mix_refusal(streams, is_product=True)


def mhc_mix_collapse(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, rms_eps: float, hc_eps: float
) -> Tensor:
    """Collapse the residual streams into one vector before the final norm.

    Args:
        streams: (T, n, hidden), float32, bfloat16 or float16, with any strides.
        fn: (n, n * hidden) float32.
        scale: (1,) float32.
        base: (n,) float32.
        rms_eps: added to the mean square, > 0.
        hc_eps: added to the weights.

    Returns:
        (T, hidden) in the dtype of the streams: the sum of (sigmoid(m scale + base) + hc_eps)[i] *
        streams[i], m as in `mhc_mix_pre`.

    Raises:
        ArgumentError: shapes or dtypes disagree.

    Source: as `mhc_mix_pre`.
    """
    num_streams = _check_streams("mhc_mix_collapse", streams)
    _check_weights("mhc_mix_collapse", streams, (fn, scale, base), (num_streams, 1))
    if not mhc_mix_refusal(streams, is_product=True):
        num_tokens, _, hidden = streams.shape
        x = torch.empty((num_tokens, hidden), dtype=streams.dtype, device=streams.device)
        _launch(streams, (fn, scale, base), x, None, None, (rms_eps, hc_eps, 0.0), 1)
        return x
    mixed = torch_ops.mix(streams, fn, rms_eps)
    weights = torch.sigmoid(mixed * scale + base) + hc_eps
    return torch_ops.weighted_sum(streams, weights)


def mhc_mix_refusal(streams: Tensor, *, is_product: bool = False) -> str:
    """Why the kernels do not take some streams; "" if they do.

    is_product: whether there is a product with fn.
    """
    num_tokens, num_streams, hidden = streams.shape
    reasons = (
        (not streams.is_cuda, "the streams are not on a GPU"),
        (not env.has_mhc_kernel(), "TIERCEL_MHC_KERNEL=0"),
        (num_streams not in (2, 4, _MOST_STREAMS), "the streams are not 2, 4 or 8"),
        (num_streams * hidden > 4 * _MOST_CHANNELS, "a token's streams do not fit in registers"),
        (streams.stride(2) != 1, "the channels of a stream are not next to each other"),
        (
            is_product and num_tokens > _FEW_TOKENS and streams.dtype != torch.bfloat16,
            "more than 16 tokens are not bfloat16",
        ),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def _launch(
    streams: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    coefficients: tuple[Tensor, Tensor] | None,
    norm_weight: Tensor | None,
    eps: tuple[float, float, float],
    iters: int,
) -> None:
    from tiercel.kernels.fused.mhc_mix import launch_mhc_mix, parts_shape

    fn, scale, base = (weight.contiguous() for weight in weights)
    num_tokens, num_streams, hidden = streams.shape
    parts = fn.new_empty(parts_shape(num_tokens, num_streams, hidden, fn.shape[0]))
    launch_mhc_mix(streams, (fn, scale, base), parts, x, coefficients, norm_weight, eps, iters)


def _check_streams(name: str, streams: Tensor) -> int:
    """The number of streams."""
    if streams.dim() != 3 or not streams.is_floating_point():
        raise ArgumentError(
            f"{name}: streams are {tuple(streams.shape)} {streams.dtype}.",
            hint="Pass (tokens, streams, hidden) of a float dtype.",
        )
    return streams.shape[1]


def _check_update(name: str, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> None:
    num_tokens, num_streams, hidden = streams.shape
    shapes = (tuple(y.shape), tuple(post.shape), tuple(comb.shape))
    expected = (
        (num_tokens, hidden),
        (num_tokens, num_streams),
        (num_tokens, num_streams, num_streams),
    )
    if shapes != expected:
        raise ArgumentError(
            f"{name}: y, post and comb are {shapes} but the streams are {tuple(streams.shape)}.",
            hint=f"Pass {expected}.",
        )


def _check_weights(
    name: str, streams: Tensor, weights: tuple[Tensor, ...], sizes: tuple[int, int]
) -> None:
    """Check fn, scale and base against (rows of fn, entries of scale)."""
    rows, num_scales = sizes
    columns = streams.shape[1] * streams.shape[2]
    expected = ((rows, columns), (num_scales,), (rows,))
    shapes = tuple(tuple(weight.shape) for weight in weights)
    if shapes != expected or any(weight.dtype != torch.float32 for weight in weights):
        raise ArgumentError(
            f"{name}: fn, scale and base are {shapes} of {[str(w.dtype) for w in weights]} but the "
            f"streams are {tuple(streams.shape)}.",
            hint=f"Pass {expected} in float32.",
        )
