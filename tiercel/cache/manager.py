"""Cache manager: the blocks that each sequence holds, needs and frees, in all cache groups.

A sequence has a list of block ids per group, one per block of tokens from its first token on.
Groups without a window keep all blocks. A sliding group frees the blocks that no later token
reads; `NULL_BLOCK` replaces them, so that an index of the list always means the same tokens. A
window counts the token itself: a group with a window of 1 keeps nothing at the end of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from tiercel.cache.allocator import NULL_BLOCK, BlockAllocator
from tiercel.cache.prefix import ROOT, PrefixCache, PrefixMatch

HeldBlocks = list[list[int]]


def span_blocks(num_tokens: int, block_size: int) -> int:
    """The most blocks that consecutive tokens are in, wherever in a block the first one is."""
    return 1 + -(-(num_tokens - 1) // block_size)


class GroupBlocks(Struct, frozen=True):
    """Blocks of one group: `num_blocks` with the null block; `window` in tokens, 0 for none."""

    num_blocks: int
    window: int = 0


class BlockWrite(Struct, frozen=True):
    """Block ids that go into a row's block table from index `start` on."""

    group: int
    start: int
    block_ids: tuple[int, ...]


class CacheManager:
    """Allocates blocks of every group for sequences, and keeps computed prefixes for reuse."""

    def __init__(
        self,
        groups: Sequence[GroupBlocks],
        block_size: int,
        max_step_tokens: int,
        *,
        has_prefix_cache: bool = True,
    ) -> None:
        """Set up the manager.

        Args:
            groups: the cache groups.
            block_size: tokens of a block.
            max_step_tokens: most tokens of one sequence that a step writes.
            has_prefix_cache: whether computed blocks are kept for other sequences.
        """
        self.block_size = block_size
        self.groups = tuple(groups)
        self.allocators = [BlockAllocator(group.num_blocks) for group in groups]
        # What a sequence alone holds of a sliding group: the tokens before a step that its first
        # one sees, and the step.
        self._most = [
            span_blocks(group.window - 1 + max_step_tokens, block_size) if group.window else None
            for group in groups
        ]
        self._prefix = None
        if has_prefix_cache:
            windows = [group.window for group in groups]
            self._prefix = PrefixCache(self.allocators, windows, block_size)

    @property
    def keeps_prefixes(self) -> bool:
        """Whether computed blocks are kept for other sequences."""
        return self._prefix is not None

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for tokens that begin before `num_tokens`."""
        return -(-num_tokens // self.block_size)

    @property
    def usage(self) -> float:
        """The share of blocks that sequences hold in the fullest group, 0 to 1."""
        return max(
            1.0 - allocator.num_free / max(1, allocator.num_blocks - 1)
            for allocator in self.allocators
        )

    @property
    def capacity(self) -> int:
        """Number of tokens of the longest sequence that fits an empty cache."""
        whole = [
            allocator.num_blocks - 1
            for allocator, most in zip(self.allocators, self._most, strict=True)
            if most is None or allocator.num_blocks - 1 < most
        ]
        return min(whole, default=2**31) * self.block_size

    def find(self, token_ids: Sequence[int]) -> PrefixMatch:
        """Find the longest cached prefix of a sequence."""
        if self._prefix is None:
            return PrefixMatch(tuple(() for _ in self.groups), 0, ROOT)
        return self._prefix.find(token_ids)

    def can_enter(self, num_tokens: int, next_tokens: int, match: PrefixMatch) -> bool:
        """Whether a sequence may start with `match` now.

        Groups without a window need blocks for `num_tokens`. A sliding group needs them for its
        first step, or for one window if that is more: tokens of a step count once for all
        sequences, so each later step looks for its own (`can_grow`).

        Args:
            num_tokens: tokens that the sequence is to grow to.
            next_tokens: its tokens after the first step, at most `num_tokens`.
            match: its cached prefix.
        """
        wanted = self.blocks_for(num_tokens) - match.num_blocks
        first = self.blocks_for(next_tokens) - match.num_blocks
        for group, allocator, matched in zip(
            self.groups, self.allocators, match.block_ids, strict=True
        ):
            shared = [block_id for block_id in matched if block_id != NULL_BLOCK]
            needed = wanted
            if group.window:
                one_window = span_blocks(group.window, self.block_size) - len(shared)
                needed = max(first, min(wanted, one_window))
            if needed > allocator.num_free - sum(map(allocator.is_idle, shared)):
                return False
        return True

    def enter(self, match: PrefixMatch) -> HeldBlocks:
        """The blocks of a sequence that starts with `match`, with a reference to each of them."""
        for allocator, block_ids in zip(self.allocators, match.block_ids, strict=True):
            allocator.share([block_id for block_id in block_ids if block_id != NULL_BLOCK])
        return [list(block_ids) for block_ids in match.block_ids]

    def can_grow(self, held: HeldBlocks, num_tokens: int) -> bool:
        """Whether every group has the blocks that `num_tokens` need."""
        wanted = self.blocks_for(num_tokens)
        return all(
            wanted - len(block_ids) <= allocator.num_free
            for allocator, block_ids in zip(self.allocators, held, strict=True)
        )

    def grow(self, held: HeldBlocks, num_tokens: int) -> list[BlockWrite]:
        """Allocate the blocks that `num_tokens` need; the caller has checked `can_grow`."""
        writes = []
        for group, (allocator, block_ids) in enumerate(zip(self.allocators, held, strict=True)):
            missing = self.blocks_for(num_tokens) - len(block_ids)
            if missing > 0:
                new = allocator.allocate(missing)
                writes.append(BlockWrite(group, len(block_ids), tuple(new)))
                block_ids += new
        return writes

    def trim(self, held: HeldBlocks, num_computed: int) -> list[BlockWrite]:
        """Free the blocks of sliding groups that no token from `num_computed` on reads."""
        writes = []
        for group, (size, block_ids) in enumerate(zip(self.groups, held, strict=True)):
            if not size.window:
                continue
            stop = max(0, num_computed - size.window + 1) // self.block_size
            start = stop
            while start > 0 and block_ids[start - 1] != NULL_BLOCK:
                start -= 1
            if start < stop:
                self.allocators[group].free(block_ids[start:stop])
                block_ids[start:stop] = [NULL_BLOCK] * (stop - start)
                writes.append(BlockWrite(group, start, (NULL_BLOCK,) * (stop - start)))
        return writes

    def keep(self, parent_key: int, token_ids: Sequence[int], held: HeldBlocks, index: int) -> int:
        """Keep a sequence's computed block `index`, which follows `parent_key`; returns its key."""
        if self._prefix is None:
            return ROOT
        return self._prefix.keep(parent_key, token_ids, [block_ids[index] for block_ids in held])

    def forget(self) -> None:
        """Drop all kept blocks that no sequence holds."""
        for allocator in self.allocators:
            allocator.forget()

    def discard(self, held: HeldBlocks) -> list[list[int]]:
        """Drop blocks that a sequence with NaN kept; per group, return those that only it uses."""
        return [
            [i for i in block_ids if i != NULL_BLOCK and allocator.discard(i)]
            for allocator, block_ids in zip(self.allocators, held, strict=True)
        ]

    def release(self, held: HeldBlocks) -> None:
        """Free all blocks of a sequence."""
        for allocator, block_ids in zip(self.allocators, held, strict=True):
            allocator.free([block_id for block_id in block_ids if block_id != NULL_BLOCK])
