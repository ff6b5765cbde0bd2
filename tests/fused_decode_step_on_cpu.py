"""Runs the source of the fused decode step on a CPU; see cuda_on_cpu/device.hpp."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.launches_on_cpu import aligned, compile_library, describe_failure, read_kernel
from tiercel.batch import Batch
from tiercel.kernels.fused import fused_decode_step as kernel
from tiercel.kernels.fused.fused_decode_step_geometry import BLOCK_TOKENS, StepGeometry
from tiercel.kernels.fused.fused_refusal import CTAS
from tiercel.ops.fused_decode_step import FusedDecodeStepWeights

HERE = Path(__file__).parent / "cuda_on_cpu"
DEVICE = (HERE / "device.hpp", HERE / "peers_device.hpp")
RUN = (HERE / "run_ctas.hpp", HERE / "run_fused_decode_step.cpp")
MAP_BYTES = 128


def build(
    geometry: StepGeometry,
    folder: Path,
    *,
    has_qk_norm: bool,
    has_bias: bool = False,
    tokens: int = 1,
) -> ctypes.CDLL:
    """Compile the source with the headers that replace a GPU; skip where that is impossible."""
    source = kernel.cuda_source(geometry, has_qk_norm=has_qk_norm, has_bias=has_bias, tokens=tokens)
    macros = "".join(f"#define {name} {value}\n" for name, value in source.macros)
    before, after = ("".join(part.read_text() for part in parts) for parts in (DEVICE, RUN))
    text = macros + before + read_kernel(source.name) + after
    return compile_library(text, folder, "step")


@dataclass(frozen=True)
class RankInputs:
    """What a GPU gives to `ops.fused_decode_step`; keys and values of each layer."""

    weights: FusedDecodeStepWeights
    k: Sequence[Tensor]
    v: Sequence[Tensor]


def run(
    library: ctypes.CDLL,
    x: Tensor,
    weights: FusedDecodeStepWeights,
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    batch: Batch,
    *,
    seed: int = 0,
    late: int = CTAS,
) -> Tensor:
    """Like `ops.fused_decode_step`; `seed` orders warps, CTAs from `late` on start last."""
    return run_ranks(library, x, [RankInputs(weights, k, v)], batch, seed=seed, late=late)[0]


def run_ranks(
    library: ctypes.CDLL,
    x: Tensor,
    ranks: Sequence[RankInputs],
    batch: Batch,
    *,
    seed: int = 0,
    late: int | None = None,
) -> list[Tensor]:
    """Like `ops.fused_decode_step` on each GPU of those that share a model; see `run`."""
    caches = [_caches_of(one, len(ranks)) for one in ranks]
    words = [x.shape[0] * kernel.exchange_words(one.weights.geometry) for one in ranks]
    exchanges = [torch.full((size,), kernel.EXCHANGE_EMPTY, dtype=torch.int32) for size in words]
    outs = [torch.full_like(x, float("nan")) for _ in ranks]
    args = [
        _args_of(x, out, one.weights, exchange, batch)
        for one, out, exchange in zip(ranks, outs, exchanges, strict=True)
    ]
    sizes = tuple(ctypes.sizeof(found[0]) for found in (args, caches))
    assert sizes == tuple(library.struct_bytes(i) for i in range(2))
    # Tensor maps are aligned to 64 bytes, which the compiler relies on.
    buffers = [aligned((type(found[0]) * len(found))(*found)) for found in (args, caches)]
    places = (ctypes.c_void_p(place) for _, place in buffers)
    failure = library.run_step(*places, seed, CTAS * len(ranks) if late is None else late)
    assert failure == 0, describe_failure(library, failure)
    return outs


def _caches_of(one: RankInputs, ranks: int) -> ctypes.Structure:
    caches = kernel._structures(len(one.k), ranks)[1]()
    for i, plane in enumerate(plane for pair in zip(one.k, one.v, strict=True) for plane in pair):
        num_tokens = plane.shape[0] * BLOCK_TOKENS
        words = struct.pack("4Q", plane.data_ptr(), num_tokens, *plane.shape[2:])
        ctypes.memmove(ctypes.addressof(caches.maps) + MAP_BYTES * i, words, len(words))
        caches.planes[i] = plane.data_ptr()
    return caches


def _args_of(
    x: Tensor, out: Tensor, weights: FusedDecodeStepWeights, exchange: Tensor, batch: Batch
) -> ctypes.Structure:
    return kernel.make_args(
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
        memory=weights.memory,
        passed=weights.passed,
    )
