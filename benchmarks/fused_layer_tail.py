"""From one attention to the next in one launch, in a graph, by model (Q4_K_M) and tokens.

    python -m benchmarks.fused_layer_tail --out benchmarks/results/decode_chain_sizes_h200.json
    python -m benchmarks.fused_layer_tail --only qwen3-8b

The peer is what single kernels take for the same: products, norms, SwiGLU. Floor: the weights of
four matrices once. Attention is not part of it; `tiercel bench speed` has whole steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from benchmarks.packed_matvec import random_part
from benchmarks.synthetic_model import SHAPES, Shape
from tiercel.kernels.fused.fused_layer_tail_geometry import Geometry
from tiercel.kernels.fused.fused_refusal import Refusal
from tiercel.ops.act_mul import act_mul
from tiercel.ops.dequantize import dequantize
from tiercel.ops.fused_layer_tail import (
    ChainExchange,
    ChainWeights,
    fused_layer_tail,
    make_exchange,
    prepare_fused_layer_tail,
)
from tiercel.ops.packed_matvec import PackedWeight, packed_matvec, prepare_packed
from tiercel.ops.rms_norm import rms_norm
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import fused_layer_tail as oracle

EPS = 1e-6
TOKENS = (1, 4, 8, 16)
MODELS = [name for name, shape in SHAPES.items() if shape.arch in ("qwen3", "llama")]


@dataclass(frozen=True)
class Inputs:
    """A layer and its tokens."""

    parts: dict[str, list[QuantTensor]]
    packed: dict[str, list[PackedWeight]]
    weights: ChainWeights
    attended: Tensor
    x: Tensor


def make_inputs(shape: Shape, tokens: int, seed: int, *, more_bits: bool) -> Inputs:
    """Random weights of the real shapes; those of v and down in Q6_K if they have more bits."""
    wide = QuantType.Q6_K if more_bits else QuantType.Q4_K
    hidden, attended = shape.hidden, shape.heads * shape.head_dim
    v_rows = shape.kv_heads * shape.head_dim
    shapes = {
        "o": [(QuantType.Q4_K, (hidden, attended))],
        "gate_up": [(QuantType.Q4_K, (2 * shape.intermediate, hidden))],
        "down": [(wide, (hidden, shape.intermediate))],
        "qkv": [(QuantType.Q4_K, (attended + 2 * v_rows, hidden))],
    }
    if more_bits:
        shapes["qkv"] = [(QuantType.Q4_K, (attended + v_rows, hidden)), (wide, (v_rows, hidden))]
    parts = {
        name: [random_part(qtype, size, 10 * seed + i) for i, (qtype, size) in enumerate(kinds)]
        for name, kinds in shapes.items()
    }
    packed = {
        name: [prepare_packed(part, Layout.SOA, is_dependent=True) for part in some]
        for name, some in parts.items()
    }
    # Random weights have a mean: with norms of 1 some residuals pass the range of the kernel.
    norm = torch.full((hidden,), 0.1, device="cuda")
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    weights = prepare_fused_layer_tail(*packed.values(), norm, norm, EPS, num_sms)
    assert not isinstance(weights, Refusal), weights.reason
    generator = torch.Generator("cuda").manual_seed(seed)
    attention = torch.randn(tokens, attended, device="cuda", generator=generator)
    x = torch.randn(tokens, hidden, device="cuda", generator=generator)
    return Inputs(parts, packed, weights, attention.half(), x)


class Exchanges:
    """One for each geometry; layers of a model share it, whatever their types."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], ChainExchange] = {}

    def of(self, geometry: Geometry) -> ChainExchange:
        """That of a geometry."""
        kind = geometry.columns, geometry.groups
        if kind not in self._known:
            self._known[kind] = make_exchange(geometry, torch.device("cuda"))
        return self._known[kind]


def run_single(inputs: Inputs) -> Tensor:
    """The same by a kernel for each part."""
    weights, packed = inputs.weights, inputs.packed
    update = packed_matvec(inputs.attended, packed["o"][0])
    h = rms_norm(inputs.x, weights.mlp_norm, EPS, torch.float16, update=update)
    update = packed_matvec(
        act_mul(packed_matvec(h, packed["gate_up"][0]), "silu"), packed["down"][0]
    )
    h = rms_norm(inputs.x, weights.next_norm, EPS, torch.float16, update=update)
    return torch.cat([packed_matvec(h, part) for part in packed["qkv"]], dim=1)


def check(inputs: Inputs, exchange: ChainExchange) -> float:
    """Relative error of q, k, v."""
    layer = {
        name: torch.cat([dequantize(part, torch.float32) for part in parts])
        for name, parts in inputs.parts.items()
    }
    layer["gate"], layer["up"] = layer.pop("gate_up").chunk(2)
    layer |= {"mlp_norm": inputs.weights.mlp_norm, "next_norm": inputs.weights.next_norm}
    x = inputs.x.clone()
    heads = fused_layer_tail(inputs.attended, inputs.x, inputs.weights, exchange)
    _, expected = oracle.fused_layer_tail(inputs.attended, x, layer, EPS)
    assert heads is not None
    return relative_error(heads, expected)


def make_case(model: str, tokens: int, exchanges: Exchanges, *, more_bits: bool) -> Case | None:
    """A number of tokens and a kind of layer; None for more tokens than the kernel takes."""
    shape = SHAPES[model]
    weights = make_inputs(shape, 1, 0, more_bits=more_bits).weights
    if tokens > weights.geometry.max_tokens:
        return None
    planes = [plane for matrix in weights.planes() for plane in matrix]
    exchange = exchanges.of(weights.geometry)
    return Case(
        name=f"{model}, {'v, down in Q6_K' if more_bits else 'all in Q4_K'}, tokens={tokens}",
        make=lambda seed: make_inputs(shape, tokens, seed, more_bits=more_bits),
        run=lambda inputs: fused_layer_tail(
            inputs.attended, inputs.x, inputs.weights, exchange, is_dependent=True
        ),
        check=lambda inputs: check(inputs, exchange),
        tolerance=1e-3,
        num_bytes=sum(plane.nbytes for plane in planes),
        peer=run_single,
        peer_name="single kernels",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per model, kind of layer and number of tokens."""
    if device.type == "cpu":
        raise SystemExit("fused_layer_tail: this kernel runs on a GPU.")
    exchanges = Exchanges()
    for model in MODELS:
        for more_bits in (False, True):
            for tokens in TOKENS:
                case = make_case(model, tokens, exchanges, more_bits=more_bits)
                if case is not None:
                    yield case


if __name__ == "__main__":
    main(__doc__, cases)
