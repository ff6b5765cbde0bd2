"""Cache layout of a layer: planes per entry, in blocks of tokens.

A block is `block_size` tokens across all layers of a group; layers with equal specs form one group
and share a pool and a column of block tables. Block 0 of every pool is the null block: it is never
written, and unused columns of a block table point to it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Cache layout of one layer.

    Attributes:
        policy: ``full`` keeps every entry; ``sliding`` those of the last `window` tokens, in blocks
            that are freed after the window has passed; ``state`` a ring of `state_len` entries per
            engine row, without blocks.
        planes: arrays per entry; dense attention keeps ``k`` and ``v``, (num_kv_heads, head_dim)
            each.
        window: number of tokens that a token sees, itself included; sliding only.
        tokens_per_entry: number of tokens in one entry; divides the block size.
        state_len: number of entries of a ring; state only.
    """

    policy: str
    planes: tuple[Plane, ...]
    window: int = 0
    tokens_per_entry: int = 1
    state_len: int = 0

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of all planes."""
        return sum(plane.entry_bytes for plane in self.planes)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one layer for a block of `block_size` tokens; 0 for a state."""
        if self.policy == "state":
            return 0
        return block_size // self.tokens_per_entry * self.entry_bytes

    def bytes_per_row(self) -> int:
        """Bytes of one layer for an engine row of any length; 0 except for a state."""
        return self.state_len * self.entry_bytes

    def first_token(self, num_computed: int) -> int:
        """The first token that the token at position `num_computed` sees."""
        return max(0, num_computed - self.window + 1) if self.policy == "sliding" else 0


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with one spec; `layers` are indices of the list that `group_specs` was given."""

    spec: KVCacheSpec
    layers: tuple[int, ...]

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of a block across the group's layers."""
        return len(self.layers) * self.spec.bytes_per_block(block_size)

    def bytes_per_row(self) -> int:
        """Bytes of an engine row across the group's layers, without blocks."""
        return len(self.layers) * self.spec.bytes_per_row()


def group_specs(specs: Sequence[KVCacheSpec]) -> tuple[CacheGroup, ...]:
    """Group equal specs, in order of first appearance."""
    members: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        members.setdefault(spec, []).append(layer)
    return tuple(CacheGroup(spec, tuple(layers)) for spec, layers in members.items())


def attention_spec(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int = 0
) -> KVCacheSpec:
    """The spec of dense attention: a key and a value of (num_kv_heads, head_dim) per token.

    window: number of tokens that a token sees; 0 for all.
    """
    shape = (num_kv_heads, head_dim)
    planes = (Plane("k", dtype, shape), Plane("v", dtype, shape))
    return KVCacheSpec("sliding" if window else "full", planes, window)
