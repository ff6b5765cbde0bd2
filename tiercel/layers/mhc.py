"""Residual streams of DeepSeek-V4: manifold-constrained hyper-connections (mHC)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tiercel.layers.norm import RMSNorm
from tiercel.ops.mhc_mix import mhc_mix_collapse, mhc_mix_post, mhc_mix_pre, mhc_mix_step


@dataclass(frozen=True, slots=True)
class Residual:
    """Residual streams, and the output of the last block, which the next one writes back.

    Attributes:
        streams: (T, n, hidden), before the output.
        update: the output y (T, hidden) with its weights post and comb; None where there is none.
    """

    streams: Tensor
    update: tuple[Tensor, Tensor, Tensor] | None = None

    def settled(self) -> Tensor:
        """(T, n, hidden) with the output written back."""
        return self.streams if self.update is None else mhc_mix_post(self.streams, *self.update)


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """Mixes the streams into a block's input, after writing the output before it back.

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

    def enter(
        self, residual: Residual, norm: RMSNorm
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """A block's input (T, hidden), normed; the streams, and the weights of the way back."""
        weights = (self.fn, self.scale, self.base)
        if residual.update is None:
            streams = residual.streams
            x, post, comb = mhc_mix_pre(
                streams,
                *weights,
                rms_eps=self.rms_eps,
                hc_eps=self.hc_eps,
                sinkhorn_iters=self.sinkhorn_iters,
                norm_weight=norm.weight,
                norm_eps=norm.eps,
                out_dtype=norm.out_dtype,
            )
        else:
            streams, x, post, comb = mhc_mix_step(
                residual.streams,
                residual.update,
                *weights,
                rms_eps=self.rms_eps,
                hc_eps=self.hc_eps,
                sinkhorn_iters=self.sinkhorn_iters,
                norm_weight=norm.weight,
                norm_eps=norm.eps,
                out_dtype=norm.out_dtype,
            )
        return x, streams, (post, comb)


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
