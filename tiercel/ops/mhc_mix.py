"""Manifold-constrained hyper-connections (mHC): the residual streams of DeepSeek-V4."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.ops import mhc_mix_torch as torch_ops


def mhc_mix_pre(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
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

    Returns:
        x (T, hidden) in the dtype of the streams, before the block's norm; post (T, n) float32;
        comb (T, n, n) float32, rows old streams and columns new streams.

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
    mixed = torch_ops.mix(streams, fn, rms_eps)
    pre, post, comb = torch_ops.split_mix(mixed, scale, base, sinkhorn_iters, hc_eps)
    return torch_ops.weighted_sum(streams, pre), post, comb


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
    num_streams = _check_streams("mhc_mix_post", streams)
    num_tokens, hidden = streams.shape[0], streams.shape[2]
    shapes = (tuple(y.shape), tuple(post.shape), tuple(comb.shape))
    expected = (
        (num_tokens, hidden),
        (num_tokens, num_streams),
        (num_tokens, num_streams, num_streams),
    )
    if shapes != expected:
        raise ArgumentError(
            f"mhc_mix_post: y, post and comb are {shapes} but the streams are "
            f"{tuple(streams.shape)}.",
            hint=f"Pass {expected}.",
        )
    return torch_ops.write_back(streams, y, post, comb)


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
    mixed = torch_ops.mix(streams, fn, rms_eps)
    weights = torch.sigmoid(mixed * scale + base) + hc_eps
    return torch_ops.weighted_sum(streams, weights)


def _check_streams(name: str, streams: Tensor) -> int:
    """The number of streams."""
    if streams.dim() != 3 or not streams.is_floating_point():
        raise ArgumentError(
            f"{name}: streams are {tuple(streams.shape)} {streams.dtype}.",
            hint="Pass (tokens, streams, hidden) of a float dtype.",
        )
    return streams.shape[1]


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
