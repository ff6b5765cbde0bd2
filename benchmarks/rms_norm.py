"""RMSNorm with the sum before it against the floor in bytes, beside PyTorch operators.

    python -m benchmarks.rms_norm --device cuda --out benchmarks/results/rms_norm_h200.json

Floor: x and the update are read once, the sum and the result written once. The table of warps in
kernels/fused/rms_norm.py is judged here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops.rms_norm import rms_norm
from tiercel.reference import rms_norm as oracle

EPS = 1e-6
# (rows, hidden, whether there is an update), of a float32 residual.
SHAPES = {
    "cuda": [
        *[(rows, 4096, True) for rows in (1, 8, 64, 512, 4096)],
        *[(2048, hidden, True) for hidden in (576, 1024, 2048, 8192, 16384)],
        (64, 4096, False),
    ],
    "cpu": [(1, 576, True), (64, 576, True), (512, 576, True), (1, 4096, True), (64, 256, False)],
}


@dataclass(frozen=True)
class Inputs:
    """Residual (rows, hidden) float32, its update in float16, and the weight."""

    x: Tensor
    update: Tensor | None
    weight: Tensor


def operators(inputs: Inputs) -> Tensor:
    """Sum, norm, rounding."""
    if inputs.update is not None:
        inputs.x.add_(inputs.update)
    normed = torch.nn.functional.rms_norm(inputs.x, inputs.weight.shape, inputs.weight, EPS)
    return normed.half()


def make_case(rows: int, hidden: int, has_update: bool, device: torch.device) -> Case:
    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(rows, hidden, generator=generator, device=device)
        update = torch.randn(rows, hidden, generator=generator, device=device).half()
        weight = torch.randn(hidden, generator=generator, device=device)
        return Inputs(x, update if has_update else None, weight)

    def run(inputs: Inputs) -> Tensor:
        return rms_norm(inputs.x, inputs.weight, EPS, torch.float16, update=inputs.update)

    def check(inputs: Inputs) -> float:
        expected = inputs.x.double()
        if inputs.update is not None:
            expected = expected + inputs.update
        return relative_error(run(inputs), oracle.rms_norm(expected, inputs.weight, EPS))

    return Case(
        name=f"rows={rows} hidden={hidden} update={has_update} fp32",
        make=make,
        run=run,
        check=check,
        tolerance=1e-3,
        num_bytes=rows * hidden * (12 if has_update else 6) + 4 * hidden,
        peer=operators,
        peer_name="add_, torch.nn.functional.rms_norm, half",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes moved define the floor."""
    for shape in SHAPES[device.type]:
        yield make_case(*shape, device)


if __name__ == "__main__":
    main(__doc__, cases)
