"""Runs the source of the fused layer tail on a CPU; see cuda_on_cpu/."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from tests.launches_on_cpu import compile_library, describe_failure, read_kernel
from tiercel.kernels.fused import fused_layer_tail as kernel
from tiercel.ops.fused_layer_tail import ChainExchange, ChainWeights

HERE = Path(__file__).parent / "cuda_on_cpu"


def build(tokens: int, weights: ChainWeights, folder: Path) -> ctypes.CDLL:
    """Compile the source with the headers that replace a GPU; skip where that is impossible."""
    source = kernel.cuda_source(tokens, weights.geometry)
    device = [HERE / f"{name}.hpp" for name in ("device", "q4k_device", "chain_device")]
    run = [HERE / "run_ctas.hpp", HERE / "run_fused_layer_tail.cpp"]
    macros = "".join(f"#define {name} {value}\n" for name, value in source.macros)
    before, after = ("".join(part.read_text() for part in parts) for parts in (device, run))
    text = macros + before + read_kernel(source.name) + after
    return compile_library(text, folder, "chain", "-O2")


def run(
    library: ctypes.CDLL,
    attended: Tensor,
    x: Tensor,
    weights: ChainWeights,
    exchange: ChainExchange,
    *,
    seed: int = 0,
    late: int | None = None,
) -> Tensor | None:
    """Like `ops.fused_layer_tail`; `seed` orders warps, CTAs from `late` on start last."""
    geometry, rows = weights.geometry, x.shape[0] + 2
    wide = torch.full((rows, x.shape[1]), float("nan"))
    wide_heads = torch.full((rows, geometry.shape.heads_width), float("nan")).half()
    wide[1:-1] = x
    heads = wide_heads[1:-1] if weights.qkv else None
    args = weights.arguments(attended, wide[1:-1], heads, exchange)
    assert ctypes.sizeof(args) == library.struct_bytes()
    assert kernel.smem_bytes(x.shape[0], geometry) == library.smem_bytes()
    failure = library.run_chain(ctypes.byref(args), seed, geometry.ctas if late is None else late)
    assert failure == 0, describe_failure(library, failure)
    x.copy_(wide[1:-1])
    for beside in (wide, wide_heads):  # nothing else was written
        assert beside[:: x.shape[0] + 1].isnan().all()
    return heads
