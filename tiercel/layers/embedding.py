"""Token embedding, decoded from the stored blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.ops.dequantize import dequantize
from tiercel.quant import QuantTensor


class Embedding:
    """Decodes the rows of a quantised table that a step needs, times a factor, as float32."""

    def __init__(self, table: QuantTensor, scale: float) -> None:
        self.table = table
        self.scale = scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = dequantize(self.table, torch.float32, token_ids)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)
