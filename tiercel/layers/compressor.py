"""The token compressor of DeepSeek-V4: from projections of tokens to cache entries."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tiercel.ops.latent_step_write import CompressedRows


@dataclass(frozen=True, slots=True)
class Compressor:
    """Forms the entries that a step completes, from its tokens and from those before.

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

    def rows(
        self,
        inputs: tuple[Tensor, Tensor],
        stored: tuple[Tensor, Tensor],
        planes: tuple[Tensor, Tensor | None],
        *,
        has_hadamard: bool = False,
    ) -> CompressedRows:
        """What the compressor adds in a step; the planes are mutated when it is written.

        Args:
            inputs: kv and gates (T, width) float32, projections of the step's tokens; the gates
                without the position bias.
            stored: planes of earlier kv and gates.
            planes: cache and scales of the entries.
            has_hadamard: whether entries are rotated as the queries that meet them.
        """
        return CompressedRows(
            *(inputs, self.position_bias, stored, self.norm_weight, self.eps, self.table),
            *(planes, has_hadamard),
        )
