"""The native library's norm of rows."""

from __future__ import annotations

from torch import Tensor

from tiercel.kernels.native.matrices import current_pool, functions


def launch_rms_norm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    update: Tensor | None = None,
    update_weight: Tensor | None = None,
) -> None:
    """Write norm(x + update) * weight to `out`; see ops/rms_norm.py.

    Args:
        x: (rows, hidden) float32 contiguous; mutated if there is an update.
        weight: (hidden,) float32.
        out: like x.
        eps: added to the mean square.
        update: like x.
        update_weight: (hidden,) float32.
    """
    rows, hidden = x.shape
    functions().tc_norm_rows(
        current_pool(),
        x.data_ptr(),
        None if update is None else update.data_ptr(),
        None if update_weight is None else update_weight.data_ptr(),
        weight.data_ptr(),
        eps,
        rows,
        hidden,
        out.data_ptr(),
    )
