"""Block allocator: which blocks of the pool are free, and how many requests use each other block.

Invariants: a block is referenced, or idle (no request uses it but its content is worth keeping),
or free; the null block is none of these. An idle block is evicted, longest idle first, only when
no free block is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

NULL_BLOCK = 0


class BlockAllocator:
    """Allocator of block ids 1 .. num_blocks - 1, lowest first, so that a lone request gets a run.

    A CPU reads contiguous blocks in place and copies scattered ones.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(NULL_BLOCK + 1, num_blocks))  # a heap
        self._references = [0] * num_blocks
        self._idle: dict[int, None] = {}  # longest idle first
        self._kept: dict[int, Callable[[int], None]] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` could return now: the free and the idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Number of blocks that no request uses but whose content is kept."""
        return len(self._idle)

    def is_idle(self, block_id: int) -> bool:
        """Whether no request uses the block though its content is kept."""
        return block_id in self._idle

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each; the caller has checked `num_free`."""
        assert count <= self.num_free, "the scheduler reserves before it allocates"
        free = self._free
        block_ids = [heapq.heappop(free) if free else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to kept blocks."""
        for block_id in block_ids:
            self._idle.pop(block_id, None)
            self._references[block_id] += 1

    def keep(self, block_id: int, on_evict: Callable[[int], None]) -> None:
        """Let a referenced block become idle, not free; `on_evict` is called when it is evicted."""
        self._kept[block_id] = on_evict

    def discard(self, block_id: int) -> bool:
        """Let a referenced block become free, not idle; returns whether it has one reference."""
        on_evict = self._kept.pop(block_id, None)
        if on_evict is not None:
            on_evict(block_id)
        return self._references[block_id] == 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Remove one reference from each block.

        Of idle blocks the last one, which depends on all before it, is evicted first.
        """
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, "a block was freed twice"
            if self._references[block_id] == 0:
                if block_id in self._kept:
                    self._idle[block_id] = None
                else:
                    heapq.heappush(self._free, block_id)

    def forget(self) -> None:
        """Make all idle blocks free."""
        while self._idle:
            heapq.heappush(self._free, self._evict())

    def _evict(self) -> int:
        block_id = next(iter(self._idle))
        del self._idle[block_id]
        self._kept.pop(block_id)(block_id)
        return block_id
