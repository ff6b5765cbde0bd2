"""Oracle of the product with a K-quantised matrix, in float64 on weights decoded one at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tiercel.reference.dequantize import dequantize


def packed_matvec(x: Tensor, data: Tensor, type_name: str) -> Tensor:
    """X @ W^T.

    Args:
        x: (tokens, in) on any device.
        data: (rows, row_bytes) uint8, W in the layout of the file.
        type_name: as in GGML, for instance "Q4_K".

    Returns:
        (tokens, rows) float64 on the CPU.
    """
    weight = dequantize(data.cpu().numpy(), type_name)
    return x.cpu().double() @ torch.from_numpy(weight.astype(np.float64)).t()
