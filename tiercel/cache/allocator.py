"""Which blocks of the pool are free.

Invariant: every block but the null block is either free or owned by exactly one request.
"""

from __future__ import annotations

NULL_BLOCK = 0


class BlockAllocator:
    """Hands out block ids 1 .. num_blocks - 1, lowest first, so that a lone request gets a run."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has checked `num_free`."""
        assert count <= self.num_free, "the scheduler reserves before it allocates"
        return [self._free.pop() for _ in range(count)]

    def free(self, block_ids: list[int]) -> None:
        """Give blocks back; their order is kept, so that the next owner gets the same run."""
        self._free.extend(reversed(block_ids))
