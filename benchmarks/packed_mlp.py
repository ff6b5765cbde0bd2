"""Gated MLPs of an 8B model for dozens of tokens, in graphs, from cold memory.

    python -m benchmarks.packed_mlp --out benchmarks/results/packed_mlp_h200.json

Floor: the larger of the bytes of both matrices, x and the result moved once, and the products at
the measured matrix rate. Launches depend on the one before (PDL). The peer is two products with the
activation between them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from benchmarks.packed_matvec import random_part
from tiercel.ops.act_mul import act_mul
from tiercel.ops.dequantize import dequantize
from tiercel.ops.packed_gemm import packed_gemm
from tiercel.ops.packed_matvec import PackedWeight, prepare_packed
from tiercel.ops.packed_mlp import packed_mlp
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType

# Types of gate and up and of down, hidden and inner: Qwen3-8B, 4B and 14B, Llama-3.2-3B.
SHAPES = (
    (QuantType.Q4_K, QuantType.Q4_K, 4096, 12288),
    (QuantType.Q4_K, QuantType.Q6_K, 4096, 12288),
    (QuantType.Q4_K, QuantType.Q4_K, 2560, 9728),
    (QuantType.Q4_K, QuantType.Q4_K, 5120, 17408),
    (QuantType.Q4_K, QuantType.Q4_K, 3072, 8192),
)
TOKENS = (17, 24, 32, 48, 64, 96)
SETS = 4  # of weights, each larger than the cache


@dataclass(frozen=True)
class Inputs:
    """Activations, both matrices as they rest, and in the layout of the file."""

    x: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    parts: tuple[QuantTensor, QuantTensor]


def in_steps(inputs: Inputs) -> Tensor:
    """Without the op."""
    h = act_mul(packed_gemm(inputs.x, inputs.gate_up), "silu")
    return packed_gemm(h, inputs.down)


def error_of(inputs: Inputs) -> float:
    """Against products in float32; the oracle would take minutes."""
    gate_up, down = (dequantize(part, torch.float32) for part in inputs.parts)
    gate, up = (inputs.x.float() @ gate_up.t()).chunk(2, dim=1)
    expected = (torch.nn.functional.silu(gate) * up) @ down.t()
    return relative_error(packed_mlp(inputs.x, inputs.gate_up, inputs.down, "silu"), expected)


def make_case(types: tuple[QuantType, QuantType], hidden: int, inner: int, tokens: int) -> Case:
    shapes = (2 * inner, hidden), (hidden, inner)

    def make(seed: int) -> Inputs:
        parts = tuple(
            random_part(qtype, shape, 2 * seed + i)
            for i, (qtype, shape) in enumerate(zip(types, shapes, strict=True))
        )
        gate_up, down = (prepare_packed(p, Layout.SOA, is_dependent=True) for p in parts)
        x = torch.randn(tokens, hidden, device="cuda").half()
        return Inputs(x, gate_up, down, (parts[0], parts[1]))

    weights = sum(
        rows * qtype.row_bytes(columns)
        for qtype, (rows, columns) in zip(types, shapes, strict=True)
    )
    return Case(
        name=f"{types[0].name} {types[1].name} {hidden}x{inner} tokens={tokens}",
        make=make,
        run=lambda inputs: packed_mlp(inputs.x, inputs.gate_up, inputs.down, "silu"),
        check=error_of,
        tolerance=1e-3,
        num_bytes=weights + 4 * tokens * hidden,
        flops=6 * tokens * hidden * inner,
        peer=in_steps,
        peer_name="two products and the activation",
        max_sets=SETS,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per MLP and number of tokens; a GPU's kernels alone."""
    if device.type == "cpu":
        raise SystemExit("packed_mlp: these kernels run on a GPU; a CPU has benchmarks/linear.py.")
    for *types, hidden, inner in SHAPES:
        for tokens in TOKENS:
            yield make_case((types[0], types[1]), hidden, inner, tokens)


if __name__ == "__main__":
    main(__doc__, cases)
