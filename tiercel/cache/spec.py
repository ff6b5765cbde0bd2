"""Cache layout of a layer: planes per entry, in blocks of tokens.

A block is `block_size` tokens across all layers of a group; equal specs form one group and share a
pool and a column of block tables. A layer may have several specs, each in its own group. Block 0 of
every pool is the null block: it is never written, and unused columns of a block table point to it.

An entry is `tokens_per_entry` tokens and is written with the last of them. A block may have fewer
entries than its tokens complete: then a later entry takes the place of an earlier one, and the
block keeps its last ones (the inputs of a compressor, of which only the last few are read).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from msgspec import Struct

from tiercel.ops.prepare_step import SlotLayout


class Plane(Struct, frozen=True):
    """One array per entry of the cache: a name, a dtype and the shape of one entry."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return prod(self.shape) * self.dtype.itemsize


class KVCacheSpec(Struct, frozen=True):
    """Cache layout of one layer, or of a part of what it keeps.

    Attributes:
        policy: ``full`` keeps every entry; ``sliding`` those of the last `window` tokens, in blocks
            that are freed after the window has passed.
        planes: arrays per entry; dense attention keeps ``k`` and ``v``, (num_kv_heads, head_dim)
            each.
        window: number of tokens that a token sees, itself included; sliding only.
        tokens_per_entry: number of tokens in one entry; divides the block size.
        entries_per_block: number of entries in a block; divides the number that its tokens
            complete. None for all of them.
    """

    policy: str
    planes: tuple[Plane, ...]
    window: int = 0
    tokens_per_entry: int = 1
    entries_per_block: int | None = None

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of all planes."""
        return sum(plane.entry_bytes for plane in self.planes)

    def block_entries(self, block_size: int) -> int:
        """Number of entries in a block of `block_size` tokens."""
        return self.entries_per_block or block_size // self.tokens_per_entry

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one spec for a block of `block_size` tokens."""
        return self.block_entries(block_size) * self.entry_bytes

    def first_token(self, num_computed: int) -> int:
        """The first token that the token at position `num_computed` sees."""
        return max(0, num_computed - self.window + 1) if self.policy == "sliding" else 0


class CacheGroup(Struct, frozen=True):
    """Equal specs; `layers` are their indices in the list that `group_specs` was given."""

    spec: KVCacheSpec
    layers: tuple[int, ...]

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of a block across the group's layers."""
        return len(self.layers) * self.spec.bytes_per_block(block_size)


def group_specs(specs: Sequence[KVCacheSpec]) -> tuple[CacheGroup, ...]:
    """Group equal specs, in order of first appearance."""
    members: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        members.setdefault(spec, []).append(layer)
    return tuple(CacheGroup(spec, tuple(layers)) for spec, layers in members.items())


def slot_layout(groups: Sequence[CacheGroup], block_size: int) -> SlotLayout:
    """Where the entries of tokens are in the blocks of each group."""
    return SlotLayout(
        block_size,
        tuple(group.spec.tokens_per_entry for group in groups),
        tuple(group.spec.block_entries(block_size) for group in groups),
    )


def attention_spec(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int = 0
) -> KVCacheSpec:
    """The spec of dense attention: a key and a value of (num_kv_heads, head_dim) per token.

    window: number of tokens that a token sees; 0 for all.
    """
    shape = (num_kv_heads, head_dim)
    planes = (Plane("k", dtype, shape), Plane("v", dtype, shape))
    return KVCacheSpec("sliding" if window else "full", planes, window)
