"""RMSNorm of rows and of heads against its floor in bytes, beside PyTorch's operator.

    python -m benchmarks.rms_norm --device cuda --out benchmarks/results/rms_norm_h200.json

Floor: x is read once and the result written once. The table of warps in kernels/rms_norm.py is
judged here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops.rms_norm import rms_norm
from tiercel.reference import rms_norm as oracle

EPS = 1e-6
# (rows, heads, hidden): hidden states, then heads cut out of a fused projection.
SHAPES = {
    "cuda": [
        *[(rows, 1, 4096) for rows in (1, 64, 2048, 16384)],
        *[(2048, 1, hidden) for hidden in (576, 1024, 2048, 8192, 16384)],
        *[(rows, 32, 128) for rows in (1, 64, 2048)],
    ],
    "cpu": [(1, 1, 576), (64, 1, 576), (512, 1, 576), (1, 1, 4096), (64, 4, 256)],
}


@dataclass(frozen=True)
class Inputs:
    """Rows (rows, heads, hidden), a view; the weight, and as the peer wants it."""

    x: Tensor
    weight: Tensor
    weight16: Tensor


def make_case(rows: int, heads: int, hidden: int, device: torch.device) -> Case:
    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        wide = heads + 2 * (heads > 1)
        x = torch.randn(rows, wide, hidden, generator=generator, device=device).bfloat16()
        weight = torch.randn(hidden, generator=generator, device=device)
        return Inputs(x[:, :heads], weight, weight.bfloat16())

    def run(inputs: Inputs) -> Tensor:
        return rms_norm(inputs.x, inputs.weight, EPS)

    def check(inputs: Inputs) -> float:
        return relative_error(run(inputs), oracle.rms_norm(inputs.x, inputs.weight, EPS))

    elements = rows * heads * hidden
    return Case(
        name=f"rows={rows} heads={heads} hidden={hidden} bf16",
        make=make,
        run=run,
        check=check,
        tolerance=4e-3,
        num_bytes=2 * 2 * elements + 4 * hidden,
        peer=lambda inputs: torch.nn.functional.rms_norm(inputs.x, (hidden,), inputs.weight16, EPS),
        peer_name="torch.nn.functional.rms_norm, bfloat16 weight",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes moved define the floor."""
    for shape in SHAPES[device.type]:
        yield make_case(*shape, device)


if __name__ == "__main__":
    main(__doc__, cases)
