"""The token compressor of DeepSeek-V4: from projections of tokens to cache entries."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tiercel.ops.kv_compress import kv_compress_step
from tiercel.ops.step_index_torch import CompressStep


@dataclass(frozen=True, slots=True)
class Compressor:
    """Forms the entries that a step completes, and keeps its inputs for later steps.

    Attributes:
        position_bias: (ratio, d) float32, or (ratio, 2 d) with overlap: added to the gates.
        norm_weight: (d,) float32.
        eps: of the norm.
        table: (max_positions, 2, half) float32, cosines and sines.
    """

    position_bias: Tensor
    norm_weight: Tensor
    eps: float
    table: Tensor

    @property
    def width(self) -> int:
        """Channels of a token's inputs, once for kv and once for the gate."""
        return self.position_bias.shape[1]

    def __call__(
        self, kv: Tensor, gate: Tensor, stored: tuple[Tensor, Tensor], step: CompressStep
    ) -> Tensor:
        """Compress.

        Args:
            kv: (T, width) float32, projections of the step's tokens.
            gate: (T, width) float32, without the position bias.
            stored: planes of earlier kv and gates, mutated: the step's are written to them.
            step: which entries complete, and where their inputs are.

        Returns:
            (N, d) float32 entries; zeros in rows without one.
        """
        return kv_compress_step(
            (kv, gate),
            self.position_bias,
            step.phase,
            stored,
            step.input_slots,
            step.terms,
            self.norm_weight,
            self.table,
            eps=self.eps,
        )
