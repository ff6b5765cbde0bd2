"""The indexer of DeepSeek-V4: which compressed entries a token attends to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tiercel.layers.compressor import Compressor
from tiercel.layers.latent_cache import LatentFormat, Planes
from tiercel.layers.linear import Linear
from tiercel.ops.indexer_topk import indexer_topk
from tiercel.ops.latent_step_write import CompressedRows, LatentQueries
from tiercel.ops.step_index_torch import CompressStep, StepIndex


@dataclass(frozen=True, slots=True)
class Indexer:
    """Scores entries by keys of their own, and takes the best.

    Attributes:
        q_proj: from the low-rank query to (heads * index_dim).
        num_heads: of the scores.
        topk: entries taken.
        compressor: of the keys.
        table: (max_positions, 2, half) float32, cosines and sines.
        latents: how keys rest.
    """

    q_proj: Linear
    num_heads: int
    topk: int
    compressor: Compressor
    table: Tensor
    latents: LatentFormat

    def key_rows(
        self, inputs: tuple[Tensor, Tensor], planes: Planes, stored: Planes
    ) -> CompressedRows:
        """The keys that a step adds.

        Args:
            inputs: kv and gates (T, 2 * index_dim) float32 of the step's tokens.
            planes: of the entries.
            stored: of the compressor's inputs.
        """
        before = stored["index_kv"], stored["index_gate"]
        keys = planes["index_key"], planes.get("index_key_scales")
        has_hadamard = self.latents.has_index_hadamard
        return self.compressor.rows(inputs, before, keys, has_hadamard=has_hadamard)

    def queries(self, q: Tensor) -> LatentQueries:
        """The queries (T, heads * index_dim) of `q_proj`, still to be rotated."""
        q = q.view(-1, self.num_heads, self.latents.index_dim)
        return self.latents.index_queries(q, self.table)

    def __call__(
        self, q: Tensor, weights: Tensor, planes: Planes, step: StepIndex, entries: CompressStep
    ) -> Tensor:
        """Choose entries.

        Args:
            q: (T, heads, index_dim), of `queries` as they were rotated.
            weights: (T, heads) float32, of the heads' scores.
            planes: of the entries, the step's own among them.
            step: the step.
            entries: the entries of this kind.

        Returns:
            (T, k) int32 entries of each token's sequence, then -1.
        """
        return indexer_topk(
            self.latents.round_index_queries(q),
            weights,
            self.latents.paged_keys(planes, entries.block_tables, step.rows),
            entries.visible,
            topk=min(self.topk, max(1, entries.max_entries)),
            max_entries=entries.max_entries,
        )
