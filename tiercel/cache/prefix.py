"""Prefix cache: full blocks of tokens that were computed before, found by their content.

What a block holds depends on its tokens and on all tokens before it. So an entry is found under
(its parent key, its token ids), where the parent key is the key of the block before it: a chain, as
in a hash chain, but the table compares the token ids themselves, so that no collision can give one
user's cache to another. A key is a number that is never reused; an entry whose parent was evicted
is therefore never found again.

An entry names a block in each cache group. Groups evict blocks independently: an entry may lack
its block in a sliding group, where only the blocks of the last window are needed, and leaves the
table when it lacks a block that every continuation needs.

Source: "Efficient Memory Management for Large Language Model Serving with PagedAttention",
arXiv 2309.06180, section 4.4; the chain of vLLM's automatic prefix caching.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from tiercel.cache.allocator import NULL_BLOCK, BlockAllocator

ROOT = 0  # the parent key of a first block


class PrefixMatch(Struct, frozen=True):
    """The cached prefix of a sequence.

    Attributes:
        block_ids: per group, the blocks from the first token on; `NULL_BLOCK` for blocks that no
            later token reads.
        num_blocks: how many blocks of tokens.
        parent_key: key of the last of them, the parent key of the block after it.
    """

    block_ids: tuple[tuple[int, ...], ...]
    num_blocks: int
    parent_key: int


class _Entry(Struct):
    found_under: tuple[int, tuple[int, ...]]  # parent key, token ids
    key: int
    block_ids: list[int]  # per group; NULL_BLOCK where the block was evicted


class PrefixCache:
    """Finds and keeps full blocks of all groups."""

    def __init__(
        self, allocators: Sequence[BlockAllocator], windows: Sequence[int], block_size: int
    ) -> None:
        """Set up the prefix cache.

        Args:
            allocators: one per group.
            windows: per group, the tokens that a token sees; 0 for all.
            block_size: tokens of a block, in every group.
        """
        self._allocators = allocators
        self._windows = windows
        self._block_size = block_size
        self._entries: dict[tuple[int, tuple[int, ...]], _Entry] = {}
        self._last_key = ROOT

    def find(self, token_ids: Sequence[int]) -> PrefixMatch:
        """Find the longest cached prefix of a sequence, without its last token.

        The last token is always computed, for its logits.
        """
        size, parent_key = self._block_size, ROOT
        entries: list[_Entry] = []
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            entry = self._entries.get((parent_key, tuple(token_ids[start : start + size])))
            if entry is None:
                break
            entries.append(entry)
            parent_key = entry.key
        while entries and not self._is_whole(entries):
            entries.pop()
        count = len(entries)
        block_ids = []
        for group, window in enumerate(self._windows):
            first = self._first_needed(count, window)
            ids = [entry.block_ids[group] for entry in entries[first:]]
            block_ids.append((*[NULL_BLOCK] * first, *ids))
        return PrefixMatch(tuple(block_ids), count, entries[-1].key if entries else ROOT)

    def keep(self, parent_key: int, token_ids: Sequence[int], block_ids: Sequence[int]) -> int:
        """Keep a computed block of every group after `parent_key`; returns the block's own key.

        If an equal block is kept already, it stays and this one is freed with its request.
        """
        found_under = (parent_key, tuple(token_ids))
        entry = self._entries.get(found_under)
        if entry is None:
            self._last_key += 1
            entry = _Entry(found_under, self._last_key, [NULL_BLOCK] * len(block_ids))
            self._entries[found_under] = entry
        for group, block_id in enumerate(block_ids):
            if entry.block_ids[group] == NULL_BLOCK and block_id != NULL_BLOCK:
                entry.block_ids[group] = block_id
                self._allocators[group].keep(block_id, partial(self._forget, entry, group))
        return entry.key

    def _first_needed(self, count: int, window: int) -> int:
        """The first of `count` blocks that the token after them sees."""
        if not window:
            return 0
        return max(0, count * self._block_size - window + 1) // self._block_size

    def _is_whole(self, entries: Sequence[_Entry]) -> bool:
        """Whether sliding groups still have the blocks that the token after these entries sees.

        A group without a window has all blocks: an entry that loses one leaves the table.
        """
        count = len(entries)
        return all(
            entry.block_ids[group] != NULL_BLOCK
            for group, window in enumerate(self._windows)
            if window
            for entry in entries[self._first_needed(count, window) :]
        )

    def _forget(self, entry: _Entry, group: int, _block_id: int) -> None:
        entry.block_ids[group] = NULL_BLOCK
        is_broken = not self._windows[group] or not any(entry.block_ids)
        if is_broken and self._entries.get(entry.found_under) is entry:
            del self._entries[entry.found_under]
