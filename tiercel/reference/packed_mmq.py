"""Oracle of the product of 8-bit tokens with a K-quantised matrix, in float64, rows at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tiercel.reference.dequantize import dequantize

GROUP = 32


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each 32 columns of a token to 8 bits.

    The step is max |x| / 127 in float32, cut to 22 bits. x * (127 / max |x|) is rounded,
    halves to even.

    Args:
        x: (tokens, in) float16.

    Returns:
        (tokens, in / 32, 32) integers of at most 127 and (tokens, in / 32) steps, float64.
    """
    tokens, columns = x.shape
    values = np.zeros((tokens, columns // GROUP, GROUP))
    steps = np.zeros((tokens, columns // GROUP))
    one = np.float32
    for token, row in enumerate(x.cpu().numpy().astype(one).reshape(tokens, -1, GROUP)):
        for place, group in enumerate(row):
            most = np.abs(group).max()
            step = (most * one(1 / 127)).view(np.uint32) & np.uint32(0xFFFFFFFC)
            steps[token, place] = step.view(one)
            if step.view(one) > 0:
                values[token, place] = np.rint(group * (one(127) / most))
    return torch.from_numpy(values), torch.from_numpy(steps)


def packed_mmq(x: Tensor, data: Tensor, type_name: str) -> Tensor:
    """Rounded x @ W^T.

    Args:
        x: (tokens, in) float16 on any device.
        data: (rows, row_bytes) uint8, W in the layout of the file.
        type_name: as in GGML, for instance "Q4_K".

    Returns:
        (tokens, rows) float64 on the CPU.
    """
    values, steps = quantise(x)
    weight = dequantize(data.cpu().numpy(), type_name)
    rounded = (values * steps[:, :, None]).flatten(1)
    return rounded @ torch.from_numpy(weight.astype(np.float64)).t()
