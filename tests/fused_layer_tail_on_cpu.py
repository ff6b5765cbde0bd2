"""Runs the source of the fused layer tail on a CPU; see cuda_on_cpu/."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
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
    device = [
        HERE / f"{name}.hpp" for name in ("device", "q4k_device", "peers_device", "chain_device")
    ]
    run = [HERE / "run_ctas.hpp", HERE / "run_fused_layer_tail.cpp"]
    macros = "".join(f"#define {name} {value}\n" for name, value in source.macros)
    before, after = ("".join(part.read_text() for part in parts) for parts in (device, run))
    text = macros + before + read_kernel(source.name) + after
    return compile_library(text, folder, "chain")


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
    one = RankInputs(attended, x, weights, exchange)
    return run_ranks(library, [one], seed=seed, late=late)[0]


@dataclass(frozen=True)
class RankInputs:
    """What a GPU gives to `ops.fused_layer_tail`."""

    attended: Tensor
    x: Tensor
    weights: ChainWeights
    exchange: ChainExchange


def run_ranks(
    library: ctypes.CDLL, ranks: Sequence[RankInputs], *, seed: int = 0, late: int | None = None
) -> list[Tensor | None]:
    """Like `ops.fused_layer_tail` on each GPU of those that share a model; see `run`."""
    geometry, (num_rows, width) = ranks[0].weights.geometry, ranks[0].x.shape
    wide = [torch.full((num_rows + 2, width), float("nan")) for _ in ranks]
    heads_width = geometry.shape.heads_width
    wide_heads = [torch.full((num_rows + 2, heads_width), float("nan")).half() for _ in ranks]
    has_heads = bool(ranks[0].weights.qkv)
    heads = [padded[1:-1] if has_heads else None for padded in wide_heads]
    args = []
    for one, padded, found in zip(ranks, wide, heads, strict=True):
        padded[1:-1] = one.x
        args.append(one.weights.arguments(one.attended, padded[1:-1], found, one.exchange))
    assert ctypes.sizeof(args[0]) == library.struct_bytes()
    assert kernel.smem_bytes(num_rows, geometry) == library.smem_bytes()
    together = (type(args[0]) * len(args))(*args)
    first_late = geometry.ctas * len(ranks) if late is None else late
    failure = library.run_chain(together, seed, first_late)
    assert failure == 0, describe_failure(library, failure)
    for one, padded in zip(ranks, wide, strict=True):
        one.x.copy_(padded[1:-1])
    for beside in (*wide, *wide_heads):  # nothing else was written
        assert beside[:: num_rows + 1].isnan().all()
    return heads
