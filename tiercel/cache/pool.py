"""The device memory behind the blocks: one tensor per layer and plane.

A plane of a layer is (num_blocks, block_size, *entry shape), so that slot = block * block_size + offset
indexes its flat view.
"""

from __future__ import annotations

import torch

from tiercel.cache.spec import KVCacheSpec


class CachePool:
    """All planes of one cache group."""

    def __init__(
        self, specs: list[KVCacheSpec], num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        """Allocate. A CPU commits the pages on first write, so an unused pool costs nothing.

        Args:
            specs: one per layer.
            num_blocks: blocks including the null block.
            block_size: tokens per block.
            device: where.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = [
            {
                plane.name: torch.zeros(
                    (num_blocks, block_size, *plane.shape), dtype=plane.dtype, device=device
                )
                for plane in spec.planes
            }
            for spec in specs
        ]
