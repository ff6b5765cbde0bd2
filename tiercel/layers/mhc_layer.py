"""One layer of DeepSeek-V4: attention and experts, each between two mixes of the streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tiercel.layers.compressed_attention import CompressedAttention
from tiercel.layers.mhc import HyperConnection, Residual
from tiercel.layers.moe import MoE
from tiercel.layers.norm import RMSNorm
from tiercel.ops.step_index_torch import StepIndex


@dataclass(frozen=True, slots=True)
class HyperLayer:
    """Attention and experts with their norms and hyper-connections."""

    attn_mix: HyperConnection
    attn_norm: RMSNorm
    attention: CompressedAttention
    moe_mix: HyperConnection
    moe_norm: RMSNorm
    moe: MoE

    def __call__(
        self,
        residual: Residual,
        token_ids: Tensor,
        step: StepIndex,
        rank_tokens: Sequence[int] = (),
    ) -> Residual:
        """Pass the streams through the layer.

        Args:
            residual: of the layer before, streams in the dtype of states.
            token_ids: see `MoE`.
            step: shared by the layers.
            rank_tokens: see `Batch`.
        """
        x, streams, weights = self.attn_mix.enter(residual, self.attn_norm)
        y = self.attention(x, step)
        x, streams, weights = self.moe_mix.enter(Residual(streams, (y, *weights)), self.moe_norm)
        return Residual(streams, (self.moe(x, token_ids, rank_tokens), *weights))
