"""The indexer of DeepSeek-V4: which compressed entries a token attends to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tiercel.layers.compressor import Compressor
from tiercel.layers.latent_cache import LatentFormat, Planes
from tiercel.layers.linear import Linear
from tiercel.ops.indexer_topk import indexer_topk
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

    def write_keys(
        self, kv: Tensor, gate: Tensor, planes: Planes, inputs: Planes, step: CompressStep
    ) -> None:
        """Compress a step's tokens to keys, and write those that complete.

        Args:
            kv: (T, 2 * index_dim) float32.
            gate: (T, 2 * index_dim) float32.
            planes: of the entries.
            inputs: of the compressor's inputs.
            step: which entries complete.
        """
        stored = inputs["index_kv"], inputs["index_gate"]
        keys = self.compressor(kv, gate, stored, step)
        self.latents.write_index(planes, keys, step.entry_slots)

    def __call__(
        self, q: Tensor, weights: Tensor, planes: Planes, step: StepIndex, entries: CompressStep
    ) -> Tensor:
        """Choose entries.

        Args:
            q: (T, heads * index_dim), of `q_proj`.
            weights: (T, heads) float32, of the heads' scores.
            planes: of the entries, the step's own among them.
            step: the step.
            entries: the entries of this kind.

        Returns:
            (T, k) int32 entries of each token's sequence, then -1.
        """
        q = q.view(-1, self.num_heads, self.latents.index_dim)
        return indexer_topk(
            self.latents.index_queries(q, step.positions, self.table),
            weights,
            self.latents.paged_keys(planes, entries.block_tables, step.rows),
            entries.visible,
            topk=min(self.topk, max(1, entries.max_entries)),
            max_entries=entries.max_entries,
        )
