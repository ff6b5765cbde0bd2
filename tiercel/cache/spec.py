"""What a layer keeps for the tokens it has seen: planes per entry, in blocks of tokens.

A block is `block_size` tokens across all layers of a group; layers with equal specs form one group
and share a block table. Block 0 of every pool is the null block: nothing writes it, and unused
columns of a block table point there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class Plane:
    """One array per entry of the cache: a name, a dtype and the shape of one entry."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer keeps.

    Attributes:
        policy: ``full`` keeps every entry.
        planes: arrays per entry; dense attention keeps ``k`` and ``v``, (num_kv_heads, head_dim)
            each.
    """

    policy: str
    planes: tuple[Plane, ...]

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes that one layer keeps for a block of `block_size` tokens."""
        return block_size * sum(plane.entry_bytes for plane in self.planes)


def full_attention_spec(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVCacheSpec:
    """The spec of dense attention: a key and a value of (num_kv_heads, head_dim) per token."""
    shape = (num_kv_heads, head_dim)
    return KVCacheSpec("full", (Plane("k", dtype, shape), Plane("v", dtype, shape)))
