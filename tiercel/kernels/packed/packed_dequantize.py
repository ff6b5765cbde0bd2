"""Quantised weights to a plain matrix on a GPU, from either layout, at the speed of memory.

cuda/packed_dequantize.cu rounds where `ops/dequantize_torch.py` does: the two are bit-exact. Rows
of the file's layout may be picked by number, in place. Floor: the planes read once and the
result written once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.kernels.packed.packed_matvec import OUT_CODES, KernelPlanes
from tiercel.kernels.packed.packed_repack import TILE_ROWS
from tiercel.kernels.packed.packed_types import UNIT_TYPES, num_units
from tiercel.kernels.runtime import rtc

_THREADS = 128  # four warps of four rows


def dequantize_source(type_name: str, dtype: torch.dtype, *, in_file: bool) -> rtc.KernelSource:
    """The kernel as built for one kind of call."""
    macros = (
        ("QTYPE", UNIT_TYPES[type_name].code),
        ("IN_FILE", int(in_file)),
        ("OUT", OUT_CODES[dtype]),
        ("IN_STEP", int(UNIT_TYPES[type_name].in_step)),
    )
    return rtc.KernelSource("packed_dequantize", macros)


def launch_packed_dequantize(
    planes: Sequence[Tensor], type_name: str, out: Tensor, index: Tensor | None = None
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        planes: in their order; one, (rows, row_bytes), in the file's layout: its rows may be
            strided by multiples of 16 bytes (Q4_K) or 2 (others).
        type_name: of `packed_types.UNIT_TYPES`.
        out: (rows, in) float16, bfloat16 or float32 on the same device, contiguous, not empty.
        index: (rows,) int32, which rows of the planes these are, in layout FILE; None for all.
    """
    rows, in_features = out.shape
    in_file = len(planes) == 1
    source = dequantize_source(type_name, out.dtype, in_file=in_file)
    kernel = rtc.load_kernel(source, out.device)
    arguments = [
        KernelPlanes.of(planes),
        rtc.pointer(out),
        ctypes.c_longlong(planes[0].stride(0) if in_file else 0),
        ctypes.c_void_p(None if index is None else index.data_ptr()),
        ctypes.c_int(rows),
        ctypes.c_int(in_features),
    ]
    rtc.launch(
        kernel,
        -(-rows // TILE_ROWS),
        _THREADS,
        arguments,
        grid_y=num_units(in_features),
        is_dependent=rtc.is_dependent(out.device),
    )
