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
from tiercel.ops.block_quantize import (
    encode_index_keys,
    encode_kv_entries,
    hadamard,
    round_fp4_g32,
    round_kv_entries,
)
from tiercel.ops.indexer_topk_torch import PagedKeys
from tiercel.ops.latent_rope import latent_cache_write
from tiercel.ops.sparse_attention_torch import PagedEntries, SlottedKV

Planes = Mapping[str, Tensor]
_DTYPES: Final = {"bf16": torch.bfloat16, "float32": torch.float32}
KV_GROUP: Final = 64  # channels of an encoded vector with one scale
_INDEX_GROUP: Final = 32  # channels of an encoded index key with one scale


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
        scales = -(-(self.head_dim - self.rotary_dim) // (8 * KV_GROUP)) * 8
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
            Plane("index_key_scales", torch.uint8, (self.index_dim // _INDEX_GROUP,)),
        )

    def write_kv(self, planes: Planes, values: Tensor, slots: Tensor) -> None:
        """Write latent vectors (N, head_dim) to their slots (N,) int64; -1 writes nothing."""
        if not self._is_encoded:
            values = round_kv_entries(values, self.rotary_dim) if self.is_native else values
            latent_cache_write(values, planes["kv"], slots)
            return
        encoded = encode_kv_entries(values, self.rotary_dim)
        width = self.head_dim + self.rotary_dim
        latent_cache_write(encoded[:, :width], planes["kv"], slots)
        latent_cache_write(encoded[:, width:], planes["kv_scales"], slots)

    def kv_part(self, planes: Planes, entries: PagedEntries) -> SlottedKV:
        """Vectors for attention, of the entries of each token."""
        return SlottedKV(planes["kv"], entries, planes.get("kv_scales"), self.rotary_dim)

    def write_index(self, planes: Planes, keys: Tensor, slots: Tensor) -> None:
        """Write index keys (N, index_dim) float32 to their slots."""
        keys = self._index_rotated(keys)
        if not self._is_encoded:
            keys = round_fp4_g32(keys) if self.is_native else keys
            latent_cache_write(keys, planes["index_key"], slots)
            return
        encoded, width = encode_index_keys(keys), self.index_dim // 2
        latent_cache_write(encoded[:, :width], planes["index_key"], slots)
        latent_cache_write(encoded[:, width:], planes["index_key_scales"], slots)

    def index_queries(self, q: Tensor) -> Tensor:
        """Index queries (T, heads, index_dim) as they meet the keys; bfloat16 if it holds them."""
        q = self._index_rotated(q)
        return round_fp4_g32(q).bfloat16() if self.is_native else q

    def paged_keys(self, planes: Planes, block_tables: Tensor, seq_ids: Tensor) -> PagedKeys:
        """The index keys of all sequences."""
        return PagedKeys(planes["index_key"], planes.get("index_key_scales"), block_tables, seq_ids)

    def _index_rotated(self, x: Tensor) -> Tensor:
        """Rotate where keys are rounded; otherwise the rotation cancels in the product."""
        return hadamard(x) if self._is_encoded or self.is_native else x
