"""Token embedding, decoded from the stored blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.layers.head import own_ids
from tiercel.ops.dequantize import dequantize
from tiercel.parallel import SINGLE, Group
from tiercel.quant import QuantTensor


class Embedding:
    """Decodes the rows of a quantised table that a step needs, times a factor, as float32.

    Where several ranks share the table, each decodes the rows that it has; their sum is exact, as
    all but one are zero.
    """

    def __init__(
        self, table: QuantTensor, scale: float, group: Group = SINGLE, first_id: int = 0
    ) -> None:
        """Take the table.

        Args:
            table: (token ids of this rank, hidden).
            scale: the factor.
            group: the ranks that have the other ids.
            first_id: the first of this rank's.
        """
        self.table = table
        self.scale = scale
        self._group = group
        self._first_id = first_id

    def __call__(self, token_ids: Tensor) -> Tensor:
        count = self.table.shape[0]
        local, is_own = own_ids(token_ids, self._first_id, count, self._group)
        rows = dequantize(self.table, torch.float32, local)
        if is_own is not None:
            rows = self._group.all_reduce(rows.masked_fill_(~is_own.unsqueeze(1), 0.0))
        return rows if self.scale == 1.0 else rows.mul_(self.scale)
