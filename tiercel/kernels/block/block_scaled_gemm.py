"""Two matrices in FP4 with scales of blocks, multiplied on Blackwell: block_scaled_gemm.cu.

Compiled for sm_100a, never run. A CTA has a tile of 128 x 128 results: a thread copies tiles of
both operands through a ring, one issues products, four warps read the sums from tensor memory.

Floor: 2 FLOPs a row, column and result at the FP4 rate; few rows: the weights, read once.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch

from tiercel.kernels.runtime import rtc

if TYPE_CHECKING:
    from torch import Tensor

CAPABILITY: Final = (10, 0)  # tcgen05; of this major version alone
TILE_ROWS, TILE_COLUMNS = 128, 256
RUN: Final = 8  # rows of gate, then of up
TILE_BYTES: Final = TILE_ROWS * TILE_COLUMNS // 2
STAGES: Final = 4  # 144 KB; 8 have no room in tensor memory for their scales
_THREADS: Final = 192


def gemm_source(*, is_nvfp4: bool, is_gate_up: bool, is_float_out: bool) -> rtc.KernelSource:
    """The kernel for one kind of operands and results."""
    macros = (
        ("IS_NVFP4", int(is_nvfp4)),
        ("IS_GATE_UP", int(is_gate_up)),
        ("IS_FLOAT_OUT", int(is_float_out)),
        ("STAGES", STAGES),
    )
    return rtc.KernelSource("block_scaled_gemm", macros)


def smem_bytes(group: int) -> int:
    """Dynamic shared memory of a CTA; `group`: columns of a scale."""
    scales = TILE_ROWS * TILE_COLUMNS // group
    return STAGES * 2 * (TILE_BYTES + scales)


class _Operand(ctypes.Structure):
    """`Operand` of the kernel."""

    _fields_ = (("values", ctypes.c_void_p), ("scales", ctypes.c_void_p))


def launch_block_scaled_gemm(
    out: Tensor,
    x: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    totals: Tensor,
    group: int,
    limit: float | None,
    *,
    is_gate_up: bool,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        out: (rows, columns) bfloat16 or float32, contiguous columns.
        x: values (row tiles, column tiles, 16 KB) and scales (row tiles, column tiles, bytes).
        weight: likewise.
        totals: (2,) float32, factors of the results, or of gate and up.
        group: columns of a scale, 16 or 32.
        limit: of the clamped SwiGLU; None for no clamp.
        is_gate_up: whether rows of the weights are gate and up in turns of `RUN`.
    """
    source = gemm_source(
        is_nvfp4=group == 16, is_gate_up=is_gate_up, is_float_out=out.dtype == torch.float32
    )
    rtc.launch(
        rtc.load_kernel(source, out.device, smem_bytes(group)),
        weight[0].shape[0],
        _THREADS,
        [
            rtc.pointer(out),
            *(_Operand(values.data_ptr(), scales.data_ptr()) for values, scales in (x, weight)),
            rtc.pointer(totals),
            *(ctypes.c_int(n) for n in (*out.shape, out.stride(0), x[0].shape[1])),
            ctypes.c_float(limit or 0.0),
        ],
        grid_y=x[0].shape[0],
        is_dependent=rtc.is_dependent(out.device),
    )
