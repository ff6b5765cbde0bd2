"""The device memory of one cache group: one tensor per layer and plane.

A plane of a layer with blocks is (num_blocks, entries of a block, *entry shape), so that slot =
block * block_size + offset indexes its flat view where an entry is a token; a plane of a state is
(num_rows, state_len, *entry shape). Planes are zero at first: masked entries are multiplied by 0
and must be finite.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from tiercel.cache.spec import CacheGroup


class CachePool:
    """All planes of one cache group."""

    def __init__(
        self, group: CacheGroup, num_blocks: int, block_size: int, num_rows: int, device: str
    ) -> None:
        """Allocate the planes. A CPU commits pages on first write, so an unused pool costs nothing.

        Args:
            group: the cache group.
            num_blocks: number of blocks with the null block; unused by a state.
            block_size: tokens per block.
            num_rows: number of engine rows; used by a state only.
            device: device of the planes.
        """
        self.group = group
        self.num_blocks = num_blocks
        spec = group.spec
        if spec.policy == "state":
            lead = (num_rows, spec.state_len)
        else:
            lead = (num_blocks, block_size // spec.tokens_per_entry)
        self.layers: dict[int, dict[str, Tensor]] = {
            layer: {
                plane.name: _make_zeros((*lead, *plane.shape), plane.dtype, device)
                for plane in spec.planes
            }
            for layer in group.layers
        }


def _make_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy leaves zeroing to the system, which does it page by page on first use; torch.zeros
    # writes all pages: 1.4 s for the 6 GB of 16 sequences of 8,192 tokens.
    return (
        torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
    )
