"""x @ W^T on a GPU by cuBLAS for wide results, on a resident 16-bit copy of the weights."""

from __future__ import annotations

import torch
from torch import Tensor


def launch_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Enqueue out = x @ weight^T, accumulated in float32 and not rounded after it.

    Args:
        x: (rows, in).
        weight: (out, in), dtype of x.
        out: (rows, out) float32.
    """
    torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
