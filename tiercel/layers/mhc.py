"""Residual streams of DeepSeek-V4: manifold-constrained hyper-connections (mHC)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tiercel.layers.norm import RMSNorm
from tiercel.ops.mhc_mix import mhc_mix_collapse, mhc_mix_post, mhc_mix_pre


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """Mixes the streams into a block's input, and its output back into the streams.

    Attributes:
        fn: (n * (2 + n), n * hidden) float32.
        scale: (3,) float32.
        base: (n * (2 + n),) float32.
        rms_eps: of the mean square of the streams.
        hc_eps: of Sinkhorn's iteration.
        sinkhorn_iters: its iterations.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    rms_eps: float
    hc_eps: float
    sinkhorn_iters: int

    def pre(self, streams: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor, Tensor]:
        """(T, n, hidden) streams to x (T, hidden), normed, and the weights of `post`."""
        return mhc_mix_pre(
            streams,
            self.fn,
            self.scale,
            self.base,
            rms_eps=self.rms_eps,
            hc_eps=self.hc_eps,
            sinkhorn_iters=self.sinkhorn_iters,
            norm_weight=norm.weight,
            norm_eps=norm.eps,
            out_dtype=norm.out_dtype,
        )

    def post(self, streams: Tensor, y: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        """The streams after a block with output y (T, hidden)."""
        return mhc_mix_post(streams, y, *weights)


@dataclass(frozen=True, slots=True)
class StreamCollapse:
    """Collapses the streams before the final norm.

    Attributes:
        fn: (n, n * hidden) float32.
        scale: (1,) float32.
        base: (n,) float32.
        rms_eps: of the mean square of the streams.
        hc_eps: added to the weights.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    rms_eps: float
    hc_eps: float

    def __call__(self, streams: Tensor) -> Tensor:
        """(T, n, hidden) to (T, hidden)."""
        return mhc_mix_collapse(
            streams, self.fn, self.scale, self.base, rms_eps=self.rms_eps, hc_eps=self.hc_eps
        )
