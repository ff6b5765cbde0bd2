"""Runs the source of the fused batch step on a CPU; see cuda_on_cpu/."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from tests.launches_on_cpu import compile_library, describe_failure, read_kernel
from tiercel.batch import Batch
from tiercel.kernels.fused import fused_batch_step as kernel
from tiercel.ops.fused_batch_step import BatchStepWeights

HERE = Path(__file__).parent / "cuda_on_cpu"
DEVICE = ("device", "q4k_device", "peers_device", "chain_device", "batch_step_device")


def build(tokens: int, weights: BatchStepWeights, folder: Path, **macros: int) -> ctypes.CDLL:
    """Compile the source with the headers that replace a GPU; skip where that is impossible."""
    source = kernel.cuda_source(tokens, weights.geometry)
    defined = dict(source.macros) | macros
    run = [HERE / "run_ctas.hpp", HERE / "run_fused_batch_step.cpp"]
    before = "".join((HERE / f"{name}.hpp").read_text() for name in DEVICE)
    text = "".join(f"#define {name} {value}\n" for name, value in defined.items())
    text += before + read_kernel(source.name) + "".join(part.read_text() for part in run)
    return compile_library(text, folder, "batch_step")


def run(
    library: ctypes.CDLL,
    heads: Tensor,
    x: Tensor,
    weights: BatchStepWeights,
    batch: Batch,
    *,
    seed: int = 0,
    late: int | None = None,
) -> None:
    """Like `ops.fused_batch_step`; `seed` orders warps, CTAs from `late` on start last."""
    tokens, geometry = x.shape[0], weights.geometry
    padded = torch.full((tokens + 2, x.shape[1]), float("nan"))
    padded[1:-1] = x
    args = weights.arguments(heads, padded[1:-1], batch, 0)
    assert ctypes.sizeof(args) == library.struct_bytes()
    assert ctypes.sizeof(kernel.LayerRow) == library.layer_bytes()
    assert kernel.smem_bytes(tokens, geometry) == library.smem_bytes()
    ctas = geometry.tail.ctas
    failure = library.run_step(ctypes.byref(args), seed, ctas if late is None else late)
    assert failure == 0, describe_failure(library, failure)
    x.copy_(padded[1:-1])
    assert padded[:: tokens + 1].isnan().all()  # nothing else was written
