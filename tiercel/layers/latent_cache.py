"""How DeepSeek-V4's latent vectors and index keys rest in the cache, and how they are rounded.

A latent vector is the key and the value of all heads. It rests as plain floats or in the released
encoding (584 bytes for 512 channels); index keys likewise (68 bytes for 128 channels). Encoded
index keys are Hadamard-rotated, and so are the queries that meet them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tiercel.cache.spec import Plane
from tiercel.ops.block_quantize import hadamard, round_fp4_g32, round_kv_entries
from tiercel.ops.indexer_topk_torch import PagedKeys
from tiercel.ops.latent_rope import (
    index_key_write,
    latent_cache_write,
    latent_rope,
    latent_write,
)
from tiercel.ops.sparse_attention_torch import PagedEntries, SlottedKV
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

    def write_kv(
        self,
        planes: Planes,
        values: Tensor,
        slots: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        norm: tuple[float, Tensor] | None = None,
    ) -> None:
        """Write latent vectors (N, head_dim) to their slots (N,) int64; -1 writes nothing.

        Args:
            planes: of the cache.
            values: the vectors.
            slots: of the vectors.
            rotation: positions and table; None where the vectors are normed and rotated.
            norm: eps and weight; only with a rotation.
        """
        if self.is_native and not self._is_encoded:
            if rotation is not None:
                eps, weight = norm or (None, None)
                values = latent_rope(values.float(), *rotation, eps=eps, weight=weight)
            values = round_kv_entries(values, self.rotary_dim)
            rotation, norm = None, None
        parts = (planes["kv"], planes.get("kv_scales"))
        latent_write(values, parts, slots, rotary_dim=self.rotary_dim, rotation=rotation, norm=norm)

    def kv_part(self, planes: Planes, entries: PagedEntries) -> SlottedKV:
        """Vectors for attention, of the entries of each token."""
        return SlottedKV(planes["kv"], entries, planes.get("kv_scales"), self.rotary_dim)

    def write_index(self, planes: Planes, keys: Tensor, slots: Tensor) -> None:
        """Write index keys (N, index_dim) float32 to their slots."""
        if self._is_encoded:
            parts = (planes["index_key"], planes["index_key_scales"])
            index_key_write(keys, parts, slots)
            return
        if self.is_native:
            keys = round_fp4_g32(hadamard(keys))
        latent_cache_write(keys, planes["index_key"], slots)

    def index_queries(self, q: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """Index queries (T, heads, index_dim), rotated, as they meet the keys.

        They are float32, or bfloat16 if it holds them. Where keys are rounded, both pass a Hadamard
        rotation; otherwise it cancels in the product.
        """
        has_hadamard = self._is_encoded or self.is_native
        q = latent_rope(q, positions, table, has_hadamard=has_hadamard, out_dtype=torch.float32)
        return round_fp4_g32(q).bfloat16() if self.is_native else q

    def paged_keys(self, planes: Planes, block_tables: Tensor, seq_ids: Tensor) -> PagedKeys:
        """The index keys of all sequences."""
        return PagedKeys(planes["index_key"], planes.get("index_key_scales"), block_tables, seq_ids)
