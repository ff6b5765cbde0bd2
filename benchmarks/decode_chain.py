"""From one attention of Qwen3-8B (Q4_K_M) to the next in one launch, in a graph, by tokens.

    python -m benchmarks.decode_chain --out benchmarks/results/decode_chain_h200.json

The peer is what single kernels take for the same: products, norms, SwiGLU. Floor: the weights of
four matrices once. Attention is not part of it; `tiercel bench speed` has whole steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from benchmarks.q4k_matvec import random_part
from tiercel.ops.act_mul import act_mul
from tiercel.ops.decode_chain import (
    ChainExchange,
    ChainWeights,
    decode_chain,
    make_exchange,
    prepare_decode_chain,
)
from tiercel.ops.dequantize import dequantize
from tiercel.ops.q4k_matvec import Q4kWeight, prepare_q4k, q4k_matvec
from tiercel.ops.rms_norm import rms_norm
from tiercel.quant import Layout, QuantTensor, QuantType
from tiercel.reference import decode_chain as oracle

HIDDEN, SLICES, EPS = 4096, 3, 1e-6
TOKENS = (1, 4, 8, 16)


@dataclass(frozen=True)
class Inputs:
    """A layer and its tokens."""

    parts: dict[str, list[QuantTensor]]
    packed: dict[str, list[Q4kWeight]]
    weights: ChainWeights
    exchange: ChainExchange
    attended: Tensor
    x: Tensor


def make_inputs(tokens: int, seed: int, exchange: ChainExchange, *, more_bits: bool) -> Inputs:
    """Random weights of the real shapes; those of v and down in Q6_K if they have more bits."""
    wide = QuantType.Q6_K if more_bits else QuantType.Q4_K
    inner = SLICES * HIDDEN
    shapes = {
        "o": [(QuantType.Q4_K, (HIDDEN, HIDDEN))],
        "gate_up": [(QuantType.Q4_K, (2 * inner, HIDDEN))],
        "down": [(wide, (HIDDEN, inner))],
        "qkv": [(QuantType.Q4_K, (6144, HIDDEN))],
    }
    if more_bits:
        shapes["qkv"] = [(QuantType.Q4_K, (5120, HIDDEN)), (wide, (1024, HIDDEN))]
    parts = {
        name: [random_part(qtype, shape, 10 * seed + i) for i, (qtype, shape) in enumerate(kinds)]
        for name, kinds in shapes.items()
    }
    packed = {
        name: [prepare_q4k(part, Layout.SOA, is_dependent=True) for part in some]
        for name, some in parts.items()
    }
    # Random weights have a mean: with norms of 1 some residuals pass what the kernel can take.
    norm = torch.full((HIDDEN,), 0.1, device="cuda")
    weights = prepare_decode_chain(*packed.values(), norm, norm, EPS)
    assert weights is not None
    generator = torch.Generator("cuda").manual_seed(seed)
    attended, x = torch.randn(2, tokens, HIDDEN, device="cuda", generator=generator)
    return Inputs(parts, packed, weights, exchange, attended.half(), x)


def run_single(inputs: Inputs) -> Tensor:
    """The same by a kernel for each part."""
    weights, packed = inputs.weights, inputs.packed
    update = q4k_matvec(inputs.attended, packed["o"][0])
    h = rms_norm(inputs.x, weights.mlp_norm, EPS, torch.float16, update=update)
    update = q4k_matvec(act_mul(q4k_matvec(h, packed["gate_up"][0]), "silu"), packed["down"][0])
    h = rms_norm(inputs.x, weights.next_norm, EPS, torch.float16, update=update)
    return torch.cat([q4k_matvec(h, part) for part in packed["qkv"]], dim=1)


def run_chain(inputs: Inputs) -> Tensor | None:
    """In one launch."""
    return decode_chain(
        inputs.attended, inputs.x, inputs.weights, inputs.exchange, is_dependent=True
    )


def check(inputs: Inputs) -> float:
    """Relative error of q, k, v."""
    layer = {
        name: torch.cat([dequantize(part, torch.float32) for part in parts])
        for name, parts in inputs.parts.items()
    }
    layer["gate"], layer["up"] = layer.pop("gate_up").chunk(2)
    layer |= {"mlp_norm": inputs.weights.mlp_norm, "next_norm": inputs.weights.next_norm}
    x = inputs.x.clone()
    heads = run_chain(inputs)
    _, expected = oracle.decode_chain(inputs.attended, x, layer, EPS)
    assert heads is not None
    return relative_error(heads, expected)


def make_case(tokens: int, exchange: ChainExchange, *, more_bits: bool) -> Case:
    """A number of tokens and a kind of layer."""
    sample = make_inputs(1, 0, exchange, more_bits=more_bits)
    planes = [plane for matrix in sample.weights.planes() for plane in matrix]
    return Case(
        name=f"{'v, down in Q6_K' if more_bits else 'all in Q4_K'}, tokens={tokens}",
        make=lambda seed: make_inputs(tokens, seed, exchange, more_bits=more_bits),
        run=run_chain,
        check=check,
        tolerance=1e-3,
        num_bytes=sum(plane.nbytes for plane in planes),
        peer=run_single,
        peer_name="single kernels",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per kind of layer and number of tokens."""
    if device.type == "cpu":
        raise SystemExit("decode_chain: this kernel runs on a GPU.")
    exchange = make_exchange(SLICES, device)
    for more_bits in (False, True):
        for tokens in TOKENS:
            yield make_case(tokens, exchange, more_bits=more_bits)


if __name__ == "__main__":
    main(__doc__, cases)
