"""All layers of a dense decoder in one native call, against the floor.

    python -m benchmarks.decoder_layers --device cpu --out benchmarks/results/layers_cpu.json

Four layers of Qwen2.5-1.5B in the types of Q4_K_M (150 MB, beyond most caches), random weights.
Floor: weights and caches read once at the measured copy bandwidth, or the products at the measured
float32 rate, which products of 8-bit activations can exceed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main
from tests.decoder_layers_model import Made, Model, expect, make_batch, make_tables

MODEL = Model(
    types="Q4_K Q4_K Q6_K Q4_K Q4_K Q4_K Q6_K",
    hidden=1536,
    inner=8960,
    heads=12,
    kv_heads=2,
    head_dim=128,
    half=64,
    windows=(0, 0, 0, 0),
    extras=("qkv_bias",),
    block_size=64,
)
LINEARS = ("qkv", "output", "gate_up", "down")
CHECKED = 2  # tokens, of a step of their own


def make_case(made: Made, tokens: int, past: int) -> Case:
    """One request with `tokens` new tokens after `past`."""
    tables = make_tables(made, (past + tokens,))
    batch = make_batch(made, tables, [(0, past, tokens)])
    model = made.model
    weights = sum(m.nbytes for p in made.parts for n in LINEARS for m in getattr(p, n))
    keys = 2 * model.kv_heads * model.head_dim * 2 * len(model.windows)

    def check(x: Tensor) -> float:
        made.reset()
        few = make_batch(made, tables, [(0, 0, CHECKED)])
        found, expected = made.run(x[:1].repeat(CHECKED, 1), few), expect(made, x[:1].repeat(2, 1))
        for planes in made.caches:  # what the timed step reads
            for plane in planes.values():
                plane.normal_()
        return float((found.double() - expected).norm() / expected.norm())

    parts = sum(p.shape[0] * p.shape[1] for n in LINEARS for p in getattr(made.parts[0], n))
    return Case(
        name=f"{len(model.windows)} layers, {tokens} tokens after {past}",
        make=lambda seed: torch.randn(
            tokens, model.hidden, generator=torch.Generator().manual_seed(seed)
        ),
        run=lambda x: made.run(x, batch),
        check=check,
        tolerance=3e-2,
        num_bytes=weights + (past + tokens) * keys,
        flops=2 * tokens * parts * len(model.windows),
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Steps of one request; a GPU has no such op."""
    if device.type != "cpu":
        return
    made = Made(MODEL)
    for tokens, past in ((1, 0), (1, 300), (8, 0), (16, 0), (64, 0), (256, 0)):
        yield make_case(made, tokens, past)


if __name__ == "__main__":
    main(__doc__, cases)
