"""x @ W^T on a GPU by cuBLAS, on a resident 16-bit or 32-bit copy of the weights."""

from __future__ import annotations

import torch
from torch import Tensor


def launch_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Enqueue out = x @ weight^T, accumulated in float32.

    Args:
        x: (rows, in).
        weight: (out, in), dtype of x.
        out: (rows, out), dtype of x, or float32: then nothing is rounded after the accumulation.
    """
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
