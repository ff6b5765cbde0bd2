"""One layer of DeepSeek-V4: attention and experts, each between two mixes of the streams."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tiercel.layers.compressed_attention import CompressedAttention
from tiercel.layers.mhc import HyperConnection
from tiercel.layers.moe import MoE
from tiercel.layers.norm import RMSNorm
from tiercel.layers.step_index import StepIndex


@dataclass(frozen=True, slots=True)
class HyperLayer:
    """Attention and experts with their norms and hyper-connections."""

    attn_mix: HyperConnection
    attn_norm: RMSNorm
    attention: CompressedAttention
    moe_mix: HyperConnection
    moe_norm: RMSNorm
    moe: MoE

    def __call__(self, streams: Tensor, token_ids: Tensor, step: StepIndex) -> Tensor:
        """Pass (T, n, hidden) streams through the layer.

        Args:
            streams: in the dtype of states.
            token_ids: (T,) int32, the input tokens.
            step: shared by the layers.
        """
        x, *weights = self.attn_mix.pre(streams, self.attn_norm)
        y = self.attention(x, step)
        streams = self.attn_mix.post(streams, y, (weights[0], weights[1]))
        x, *weights = self.moe_mix.pre(streams, self.moe_norm)
        y = self.moe(x, token_ids)
        return self.moe_mix.post(streams, y, (weights[0], weights[1]))
