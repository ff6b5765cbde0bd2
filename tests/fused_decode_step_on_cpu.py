"""Runs the source of the fused decode step on a CPU; see cuda_on_cpu/device.hpp."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.launches_on_cpu import aligned, compile_library, describe_failure, read_kernel
from tiercel.batch import Batch
from tiercel.kernels.fused import fused_decode_step as kernel
from tiercel.kernels.fused.fused_decode_step_geometry import BLOCK_TOKENS, StepGeometry
from tiercel.ops.fused_decode_step import FusedDecodeStepWeights

HERE = Path(__file__).parent / "cuda_on_cpu"
RUN = (HERE / "run_ctas.hpp", HERE / "run_fused_decode_step.cpp")
MAP_BYTES = 128


def build(
    geometry: StepGeometry, folder: Path, *, has_qk_norm: bool, has_bias: bool = False
) -> ctypes.CDLL:
    """Compile the source with the headers that replace a GPU; skip where that is impossible."""
    source = kernel.cuda_source(geometry, has_qk_norm=has_qk_norm, has_bias=has_bias)
    macros = "".join(f"#define {name} {value}\n" for name, value in source.macros)
    run = "".join(part.read_text() for part in RUN)
    text = macros + (HERE / "device.hpp").read_text() + read_kernel(source.name) + run
    return compile_library(text, folder, "step", "-O2")


def run(
    library: ctypes.CDLL,
    x: Tensor,
    weights: FusedDecodeStepWeights,
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    batch: Batch,
    *,
    seed: int = 0,
    late: int = 128,
) -> Tensor:
    """Like `ops.fused_decode_step`; `seed` orders warps, CTAs from `late` on start last."""
    structures = kernel._structures(len(k))
    sizes = tuple(ctypes.sizeof(structure) for structure in structures)
    assert sizes == tuple(library.struct_bytes(i) for i in range(2))
    caches = structures[1]()
    for i, plane in enumerate(plane for pair in zip(k, v, strict=True) for plane in pair):
        num_tokens = plane.shape[0] * BLOCK_TOKENS
        words = struct.pack("4Q", plane.data_ptr(), num_tokens, *plane.shape[2:])
        ctypes.memmove(ctypes.addressof(caches.maps) + MAP_BYTES * i, words, len(words))
        caches.planes[i] = plane.data_ptr()
    exchange = torch.full_like(weights.exchange, kernel.EXCHANGE_EMPTY)
    out = torch.full_like(x, float("nan"))
    args = kernel.make_args(
        x,
        out,
        weights.stream.data,
        weights.starts,
        weights.shares,
        weights.geometry,
        weights.norms,
        weights.head_norms,
        weights.bias,
        weights.ropes,
        exchange,
        batch.positions,
        batch.seq_lens,
        batch.rows,
        tuple(batch.block_tables),
        tuple(batch.slot_mapping),
        eps=weights.eps,
        scale=weights.scale,
    )
    # Tensor maps are aligned to 64 bytes, which the compiler relies on.
    buffers = [aligned(argument) for argument in (args, caches)]
    places = (ctypes.c_void_p(place) for _, place in buffers)
    failure = library.run_step(*places, seed, late)
    assert failure == 0, describe_failure(library, failure)
    return out
