"""Full blocks of tokens that were computed before, found again by their content.

A block's keys and values depend on its tokens and on all tokens before it. So an entry is found
under (the link of the block before it, its token ids): a chain, as in a hash chain, but the table
compares the token ids themselves, so that no collision can give one user's cache to another. A link
is a number that is never used twice; an entry whose forerunner was given away is therefore never
found again and leaves when its own block does.

Source: "Efficient Memory Management for Large Language Model Serving with PagedAttention",
arXiv 2309.06180, section 4.4; the chain of vLLM's automatic prefix caching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercel.cache.allocator import BlockAllocator

ROOT = 0  # the link before a first block


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that hold the start of a sequence, and the link of the last of them."""

    block_ids: tuple[int, ...]
    link: int


@dataclass(frozen=True, slots=True)
class _Entry:
    block_id: int
    link: int


class PrefixCache:
    """Finds and keeps full blocks of one allocator."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._entries: dict[tuple[int, tuple[int, ...]], _Entry] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._last_link = ROOT

    def find(self, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest run of kept blocks that begins a sequence, short of its last token.

        The last token is always computed, for its logits.
        """
        size, link = self._block_size, ROOT
        block_ids = []
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            entry = self._entries.get((link, tuple(token_ids[start : start + size])))
            if entry is None:
                break
            block_ids.append(entry.block_id)
            link = entry.link
        return PrefixMatch(tuple(block_ids), link)

    def keep(self, link: int, token_ids: Sequence[int], block_id: int) -> int:
        """Keep a computed block that follows `link`; returns its own link.

        If an equal block is kept already, that one stays and this one is freed with its request.
        """
        key = (link, tuple(token_ids))
        entry = self._entries.get(key)
        if entry is None:
            self._last_link += 1
            entry = self._entries[key] = _Entry(block_id, self._last_link)
            self._key_of[block_id] = key
            self._allocator.keep(block_id, self._forget)
        return entry.link

    def _forget(self, block_id: int) -> None:
        del self._entries[self._key_of.pop(block_id)]
