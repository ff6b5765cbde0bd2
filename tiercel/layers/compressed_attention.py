"""Attention of DeepSeek-V4: a window of latent vectors and compressed entries, in one softmax.

    window   the last W positions alone
    CSA      the window, and the entries of 4 tokens that the indexer chooses
    HCA      the window, and all entries of 128 tokens

One vector a position is the key and the value of all heads, so its rotation is undone in the
output. Source: the inference code published with DeepSeek-V4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tiercel.cache.spec import KVCacheSpec, Plane
from tiercel.layers.compressor import Compressor
from tiercel.layers.indexer import Indexer
from tiercel.layers.latent_cache import LatentFormat, Planes
from tiercel.layers.linear import Linear
from tiercel.layers.linear_group import GroupedLinear, multiply_group
from tiercel.layers.norm import RMSNorm
from tiercel.ops.latent_step_write import LatentQueries, LatentVectors
from tiercel.ops.sparse_attention import sparse_attention
from tiercel.ops.sparse_attention_torch import PagedEntries
from tiercel.ops.step_index_torch import CompressStep, StepIndex


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """From hidden states to queries and latent vectors.

    Attributes:
        q_a: hidden to q_lora_rank.
        q_norm: between the two.
        q_b: q_lora_rank to heads * head_dim.
        kv: hidden to head_dim.
        kv_norm: (head_dim,) float32, the weight of the vectors' norm.
        table: (max_positions, 2, half) float32, cosines and sines.
        eps: of the norms of heads and vectors.
    """

    q_a: Linear
    q_norm: RMSNorm
    q_b: Linear
    kv: Linear
    kv_norm: Tensor
    table: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LatentOutput:
    """From the heads' outputs to hidden states.

    Attributes:
        wo_a: (groups * o_lora_rank, heads * head_dim / groups), a block of each group.
        wo_b: groups * o_lora_rank to hidden.
    """

    wo_a: GroupedLinear
    wo_b: Linear


@dataclass(frozen=True, slots=True)
class Compression:
    """What compressed layers have besides the window.

    Attributes:
        project: hidden to the compressors' kv and gates, and the indexer's weights: float32.
        compressor: of the entries.
        indexer: chooses entries; None: all are attended to.
        ratio: tokens per entry.
    """

    project: Linear
    compressor: Compressor
    indexer: Indexer | None
    ratio: int


class CompressedAttention:
    """Attention of one layer."""

    def __init__(
        self,
        latents: LatentFormat,
        projections: LatentProjections,
        sink: Tensor,
        output: LatentOutput,
        compression: Compression | None,
    ) -> None:
        """Take the weights.

        Args:
            latents: how vectors rest in the cache.
            projections: of queries and vectors.
            sink: (heads,) float32.
            output: of the heads' outputs.
            compression: None in a layer with a window alone.
        """
        self.latents = latents
        self.compression = compression
        self._projections = projections
        self._sink = sink
        self._output = output
        self._window: Planes = {}
        self._entries: Planes = {}
        self._inputs: Planes = {}

    def cache_specs(self, window: int) -> list[KVCacheSpec]:
        """What the layer keeps: the window, then entries and inputs of its compressors.

        window: positions that a token sees.
        """
        kv = self.latents.kv_planes()
        specs = [KVCacheSpec("sliding", kv, window=window)]
        if self.compression is None:
            return specs
        ratio, indexer = self.compression.ratio, self.compression.indexer
        inputs = _input_planes("", self.compression.compressor.width)
        if indexer is None:
            # Entries of a block take tokens of that block alone, each of them once.
            return [
                *specs,
                KVCacheSpec("full", kv, tokens_per_entry=ratio),
                KVCacheSpec("sliding", inputs, window=1),
            ]
        kv += self.latents.index_planes()
        inputs += _input_planes("index_", indexer.compressor.width)
        return [
            *specs,
            KVCacheSpec("full", kv, tokens_per_entry=ratio),
            KVCacheSpec("sliding", inputs, window=2 * ratio, entries_per_block=OVERLAP_ROWS),
        ]

    def bind_cache(self, planes: list[Planes]) -> None:
        """Take the planes of `cache_specs`, in their order."""
        self._window = planes[0]
        if self.compression is not None:
            _, self._entries, self._inputs = planes

    def __call__(self, x: Tensor, step: StepIndex) -> Tensor:
        """(T, hidden) normed to (T, hidden), after writing the step's vectors and entries."""
        parts, table = self._projections, self._projections.table
        compression, heads = self.compression, [parts.q_b]
        project = [] if compression is None else [compression.project]
        if compression is not None and compression.indexer is not None:
            heads.append(compression.indexer.q_proj)
        q_a, kv, *projected = multiply_group(x, [parts.q_a, parts.kv, *project])
        q, *index_q = multiply_group(q_a, heads, parts.q_norm)
        q = q.view(-1, self._sink.shape[0], self.latents.head_dim)
        queries = [LatentQueries(q, table, parts.eps, False, q.dtype)]
        rotation = step.positions, table
        vectors = LatentVectors(
            *(kv, step.positions, table, parts.kv_norm, parts.eps),
            *(_planes(self._window), step.kv_slots),
        )
        chosen, entries = None, None
        if compression is None:
            (q,) = self.latents.write_step(vectors, queries=queries)
        else:
            entries = step.compressed[compression.ratio]
            if compression.indexer is not None:
                queries.append(compression.indexer.queries(index_q[0]))
            q, chosen = self._compress(compression, projected[0], queries, vectors, step)
        out = self._attend(q, step, entries, chosen)
        output = self._output
        return multiply_group(output.wo_a(out, rotation), [output.wo_b])[0]

    def _compress(
        self,
        parts: Compression,
        projected: Tensor,
        queries: list[LatentQueries],
        vectors: LatentVectors,
        step: StepIndex,
    ) -> tuple[Tensor, Tensor | None]:
        """Write vectors and entries that complete; the queries, and what the indexer chooses."""
        entries = step.compressed[parts.ratio]
        width = parts.compressor.width
        kv, gate, *rest = projected.split_with_sizes(
            [width, width, *_index_widths(parts.indexer, projected.shape[1] - 2 * width)], dim=1
        )
        stored = self._inputs["kv"], self._inputs["gate"]
        rows = [parts.compressor.rows((kv, gate), stored, _planes(self._entries))]
        if parts.indexer is None:
            (q,) = self.latents.write_step(vectors, rows, entries, queries)
            return q, None
        index_kv, index_gate, weights = rest
        rows.append(parts.indexer.key_rows((index_kv, index_gate), self._entries, self._inputs))
        q, index_q = self.latents.write_step(vectors, rows, entries, queries)
        return q, parts.indexer(index_q, weights, self._entries, step, entries)

    def _attend(
        self, q: Tensor, step: StepIndex, entries: CompressStep | None, chosen: Tensor | None
    ) -> Tensor:
        parts = [self.latents.kv_part(self._window, step.window)]
        if entries is not None and entries.max_entries:
            tables, ids = entries.block_tables, step.rows
            if chosen is None:  # all that are visible
                listed = PagedEntries(tables, ids, entries.max_entries, ends=entries.visible)
            else:
                listed = PagedEntries(tables, ids, chosen.shape[1], chosen=chosen)
            parts.append(self.latents.kv_part(self._entries, listed))
        return sparse_attention(q, tuple(parts), self._sink, self.latents.head_dim**-0.5)


# Input rows that a block keeps for entries with overlap, at position modulo this: an entry needs
# the last 8, and 15 rejected drafts may overwrite older ones.
OVERLAP_ROWS: Final = 32


def _input_planes(prefix: str, width: int) -> tuple[Plane, ...]:
    return tuple(Plane(f"{prefix}{name}", torch.float32, (width,)) for name in ("kv", "gate"))


def _planes(planes: Planes) -> tuple[Tensor, Tensor | None]:
    """Vectors and their scales, if they are encoded."""
    return planes["kv"], planes.get("kv_scales")


def _index_widths(indexer: Indexer | None, rest: int) -> list[int]:
    """Widths of the indexer's kv, gate and weights within its projection."""
    if indexer is None:
        return []
    width = indexer.compressor.width
    return [width, width, rest - 2 * width]
