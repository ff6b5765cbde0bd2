"""The gated activation against its floor in bytes, beside two PyTorch operators.

    python -m benchmarks.act_mul --device cuda --out benchmarks/results/act_mul_h200.json

Floor: gate and up are read once, the product is written once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops.act_mul import act_mul
from tiercel.reference import act_mul as oracle

# Rows, inner columns, activation.
SHAPES = {
    "cuda": [
        *[(rows, 12288, "silu") for rows in (1, 64, 2048, 16384)],
        (2048, 1536, "silu"),
        (2048, 12288, "gelu_tanh"),
    ],
    "cpu": [(1, 1536, "silu"), (16, 1536, "silu"), (512, 1536, "silu"), (64, 1152, "gelu_tanh")],
}


def two_operators(x: Tensor, activation: str) -> Tensor:
    """The activation, then the product."""
    gate, up = x.chunk(2, dim=1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def make_case(rows: int, inner: int, activation: str, device: torch.device) -> Case:
    def make(seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(rows, 2 * inner, generator=generator, device=device).bfloat16()

    return Case(
        name=f"rows={rows} inner={inner} {activation} bf16",
        make=make,
        run=lambda x: act_mul(x, activation),
        check=lambda x: relative_error(act_mul(x, activation), oracle.act_mul(x, activation)),
        tolerance=5e-3,
        num_bytes=3 * 2 * rows * inner,
        peer=lambda x: two_operators(x, activation),
        peer_name="activation and product as two PyTorch operators",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes moved define the floor."""
    for shape in SHAPES[device.type]:
        yield make_case(*shape, device)


if __name__ == "__main__":
    main(__doc__, cases)
