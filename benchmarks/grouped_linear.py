"""The grouped linear layer wo_a of DeepSeek-V4 against its floor in bytes and FLOPs.

    python -m benchmarks.grouped_linear --device cuda --out FILE.json

Floor: FP8 weights and their scales, inputs and outputs move once; 2 FLOPs per token and weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.grouped_linear import grouped_linear
from tiercel.quant import QuantTensor
from tiercel.quant_types import QuantType
from tiercel.reference import grouped_linear as oracle

GROUPS = {"Flash": 8, "Pro": 16}
COLS = 4096  # inputs of a group
ROWS = {"cuda": 1024, "cpu": 128}  # outputs of a group
TOKENS = {"cuda": (1, 8, 16, 64, 256, 4096), "cpu": (1, 16)}


@dataclass(frozen=True)
class Inputs:
    """x (T, groups * in) bfloat16 and the weight in FP8 blocks."""

    x: Tensor
    weight: QuantTensor


def make_case(model: str, num_tokens: int, device: torch.device) -> Case:
    num_groups, rows = GROUPS[model], ROWS[device.type]

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(num_tokens, num_groups * COLS, generator=generator, device=device)
        weight = torch.randn(num_groups * rows, COLS, generator=generator, device=device)
        return Inputs(x.bfloat16(), block_quantize(weight / 64, QuantType.FP8_BLOCK))

    def run(inputs: Inputs) -> Tensor:
        return grouped_linear(inputs.x, inputs.weight, num_groups)

    def check(inputs: Inputs) -> float:  # a few tokens: the oracle's matrix is dense
        x, weight = inputs.x[:4].cpu(), dequantize(inputs.weight, torch.float32).cpu()
        groups = zip(x.chunk(num_groups, dim=1), weight.chunk(num_groups), strict=True)
        parts = [oracle.grouped_linear(part, matrix, 1) for part, matrix in groups]
        return relative_error(run(inputs)[:4].cpu(), torch.cat(parts, dim=1))

    weights = num_groups * rows * COLS
    return Case(
        name=f"{model} wo_a fp8 tokens={num_tokens}",
        make=make,
        run=run,
        check=check,
        tolerance=5e-3,
        num_bytes=weights + weights // 16384 + 2 * num_tokens * num_groups * (COLS + rows),
        flops=2 * num_tokens * weights,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes and FLOPs define the floor."""
    for model in GROUPS:
        for num_tokens in TOKENS[device.type]:
            yield make_case(model, num_tokens, device)


if __name__ == "__main__":
    main(__doc__, cases)
