"""K-quants to a plain matrix on a GPU, from either layout, at the speed of memory.

cuda/q4k_dequantize.cu rounds where `kernels/dequantize.py` does: the two are bit-exact. Floor: the
planes read once and the result written once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.kernels import rtc
from tiercel.kernels.q4k_matvec import BLOCK, OUT_CODES, KernelPlanes
from tiercel.kernels.q4k_repack import TILE_ROWS

TYPES = ("Q4_K", "Q6_K")
_THREADS = 128  # four warps of four rows


def dequantize_source(type_name: str, dtype: torch.dtype, *, in_file: bool) -> rtc.KernelSource:
    """The kernel as built for one kind of call."""
    macros = (
        ("QTYPE", 4 if type_name == "Q4_K" else 6),
        ("IN_FILE", int(in_file)),
        ("OUT", OUT_CODES[dtype]),
    )
    return rtc.KernelSource("q4k_dequantize", macros)


def launch_q4k_dequantize(planes: Sequence[Tensor], type_name: str, out: Tensor) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        planes: in their order; one, (rows, row_bytes), in the file's layout: its rows may be
            strided by multiples of 16 bytes (Q4_K) or 2 (Q6_K).
        type_name: "Q4_K" or "Q6_K".
        out: (rows, in) float16, bfloat16 or float32 on the same device, contiguous, not empty.
    """
    rows, in_features = out.shape
    in_file = len(planes) == 1
    source = dequantize_source(type_name, out.dtype, in_file=in_file)
    kernel = rtc.load_kernel(source, out.device)
    blocks = in_features // BLOCK
    arguments = [
        KernelPlanes.of(planes),
        rtc.pointer(out),
        ctypes.c_longlong(planes[0].stride(0) if in_file else 0),
        ctypes.c_int(rows),
        ctypes.c_int(blocks),
    ]
    rtc.launch(kernel, -(-rows // TILE_ROWS), _THREADS, arguments, grid_y=blocks)
