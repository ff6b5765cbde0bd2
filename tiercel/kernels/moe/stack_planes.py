"""Stacks of experts as the kernels read them; without Triton, which CPUs may lack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

MAX_SORTED: Final = 1024
"""Pairs that one program sorts."""


@dataclass(frozen=True, slots=True)
class StackPlanes:
    """A stack of matrices as the kernels read it.

    Attributes:
        kind: of `FORMATS`.
        q: codes, blocks or floats, contiguous.
        scale: of groups; None without.
        total: (experts,) float32, of whole matrices; None without.
        is_divisor: whether weights are divided by `total`.
        block: rows and columns of a scale of FP8_BLOCK.
    """

    kind: str
    q: Tensor
    scale: Tensor | None = None
    total: Tensor | None = None
    is_divisor: bool = False
    block: tuple[int, int] = (1, 1)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pointers: a plane that is missing is not read."""
        return (
            self.q,
            self.q if self.scale is None else self.scale,
            self.q if self.total is None else self.total,
        )

    @property
    def strides(self) -> tuple[int, int]:
        """Elements of one matrix of codes and of its scales."""
        return self.q[0].numel(), 0 if self.scale is None else self.scale[0].numel()
