"""How DeepSeek-V4's latent vectors and index keys rest in the cache, and how they are rounded.

A latent vector is the key and the value of all heads. It rests as plain floats or in the released
encoding (584 bytes for 512 channels); index keys likewise (68 bytes for 128 channels). Encoded
index keys are Hadamard-rotated, and so are the queries that meet them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tiercel.cache.spec import Plane
from tiercel.ops.block_quantize import hadamard, round_fp4_g32, round_kv_entries
from tiercel.ops.indexer_topk_torch import PagedKeys
from tiercel.ops.kv_compress import kv_compress_step
from tiercel.ops.latent_rope import latent_cache_write, latent_rope
from tiercel.ops.latent_step_write import (
    CompressedRows,
    LatentQueries,
    LatentVectors,
    latent_step_write,
)
from tiercel.ops.sparse_attention_torch import PagedEntries, SlottedKV
from tiercel.ops.step_index_torch import CompressStep
from tiercel.quant_types import INDEX_GROUP, KV_GROUP, SCALE_PAD

Planes = Mapping[str, Tensor]
_DTYPES: Final = {"bf16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LatentFormat:
    """Storage of vectors of `head_dim` channels, of which the last `rotary_dim` rotate.

    Attributes:
        head_dim: channels of a latent vector.
        rotary_dim: of them, those that rotate.
        index_dim: channels of an index key, a power of two.
        kv_dtype: ``fp8`` for the released encodings, ``bf16`` or ``float32``.
        is_native: whether values are rounded as in the published code, however they rest.
    """

    head_dim: int
    rotary_dim: int
    index_dim: int
    kv_dtype: str
    is_native: bool = False

    @property
    def _is_encoded(self) -> bool:
        return self.kv_dtype == "fp8"

    def kv_planes(self) -> tuple[Plane, ...]:
        """Planes of latent vectors."""
        if not self._is_encoded:
            return (Plane("kv", _DTYPES[self.kv_dtype], (self.head_dim,)),)
        scales = -(-(self.head_dim - self.rotary_dim) // (SCALE_PAD * KV_GROUP)) * SCALE_PAD
        return (
            Plane("kv", torch.uint8, (self.head_dim + self.rotary_dim,)),
            Plane("kv_scales", torch.uint8, (scales,)),
        )

    def index_planes(self) -> tuple[Plane, ...]:
        """Planes of index keys."""
        if not self._is_encoded:
            return (Plane("index_key", _DTYPES[self.kv_dtype], (self.index_dim,)),)
        return (
            Plane("index_key", torch.uint8, (self.index_dim // 2,)),
            Plane("index_key_scales", torch.uint8, (self.index_dim // INDEX_GROUP,)),
        )

    @property
    def has_index_hadamard(self) -> bool:
        """Whether index keys and queries pass a Hadamard rotation; else it cancels in products."""
        return self._is_encoded or self.is_native

    def write_step(
        self,
        vectors: LatentVectors,
        compressed: Sequence[CompressedRows] = (),
        step: CompressStep | None = None,
        queries: Sequence[LatentQueries] = (),
    ) -> list[Tensor]:
        """Write a step's vectors, and what its compressors add; norm and rotate its queries.

        Args:
            vectors: of the step.
            compressed: of the compressors of entries and index keys.
            step: which entries complete; None without compressors.
            queries: of the step's tokens.

        Returns:
            The queries (T, heads, d).
        """
        if not self.is_native or self._is_encoded:
            return latent_step_write(vectors, self.rotary_dim, compressed, step, queries)
        rows = latent_rope(
            *(vectors.x.float(), vectors.positions, vectors.table),
            eps=vectors.eps,
            weight=vectors.weight,
        )
        latent_cache_write(
            round_kv_entries(rows, self.rotary_dim), vectors.planes[0], vectors.slots
        )
        for part in compressed:
            assert step is not None, "compressors come with a step"
            new = kv_compress_step(
                *(part.inputs, part.bias, step.phase, part.stored, step.input_slots),
                *(step.terms, part.weight, part.table),
                eps=part.eps,
            )
            is_key = part.has_hadamard
            new = round_fp4_g32(hadamard(new)) if is_key else round_kv_entries(new, self.rotary_dim)
            latent_cache_write(new, part.planes[0], step.entry_slots)
        return [query.turned(vectors.positions) for query in queries]

    def kv_part(self, planes: Planes, entries: PagedEntries) -> SlottedKV:
        """Vectors for attention, of the entries of each token."""
        return SlottedKV(planes["kv"], entries, planes.get("kv_scales"), self.rotary_dim)

    def index_queries(self, q: Tensor, table: Tensor) -> LatentQueries:
        """Index queries (T, heads, index_dim), still to be rotated, as they meet the keys.

        They become float32. Where keys are rounded, both pass a Hadamard rotation; otherwise it
        cancels in the product.
        """
        return LatentQueries(q, table, None, self.has_index_hadamard, torch.float32)

    def round_index_queries(self, q: Tensor) -> Tensor:
        """Rotated index queries, as published code rounds them; bfloat16 holds those."""
        return round_fp4_g32(q).bfloat16() if self.is_native else q

    def paged_keys(self, planes: Planes, block_tables: Tensor, seq_ids: Tensor) -> PagedKeys:
        """The index keys of all sequences."""
        return PagedKeys(planes["index_key"], planes.get("index_key_scales"), block_tables, seq_ids)
