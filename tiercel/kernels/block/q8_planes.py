"""Q8_0 in two planes: bytes that a GPU loads 8 at a time, where the file's blocks have 34 bytes."""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

GROUP = 32  # columns of a scale


class Q8Planes(Struct, frozen=True):
    """A matrix in Q8_0.

    Attributes:
        q: (rows, columns) int8.
        scale: (rows, columns / 32) float16.
    """

    q: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.q.shape[0], self.q.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both planes."""
        return self.q.nbytes + self.scale.nbytes

    @classmethod
    def of_file(cls, data: Tensor) -> Q8Planes:
        """Planes of (rows, row_bytes) uint8: blocks of a float16 and 32 bytes."""
        blocks = data.reshape(data.shape[0], -1, 2 + GROUP)
        scale = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
        return cls(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), scale)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """(rows, columns); formed in float32 and rounded once."""
        rows, columns = self.shape
        groups = self.q.view(rows, columns // GROUP, GROUP).float()
        return (groups * self.scale.float().unsqueeze(-1)).view(rows, columns).to(dtype)
