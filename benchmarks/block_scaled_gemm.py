"""Block-scaled products in FP4 against their floor: experts of DeepSeek-V4 with x in FP4.

    python -m benchmarks.block_scaled_gemm --device cuda --out FILE.json

Needs a Blackwell of a data centre for the kernel; other devices decode both operands and multiply.
Floor: both operands and the result move once; 2 FLOPs a row, column and result, at the rate of
bfloat16, which a Blackwell passes four times.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.block_scaled_gemm import TiledOperand, block_scaled_gemm, tile_operand
from tiercel.ops.dequantize import dequantize
from tiercel.quant import QuantTensor
from tiercel.quant_types import QuantType

SHAPES = {"cuda": ((4096, 4096), (4096, 2048)), "cpu": ((256, 512),)}  # w1 and w3, w2 of Flash
TOKENS = {"cuda": (128, 1024, 4096), "cpu": (16,)}


@dataclass(frozen=True)
class Inputs:
    """x (T, columns) and weights (rows, columns), as stored and in tiles."""

    stored: tuple[QuantTensor, QuantTensor]
    tiled: tuple[TiledOperand, TiledOperand]


def make_case(
    qtype: QuantType, shape: tuple[int, int], num_tokens: int, device: torch.device
) -> Case:
    rows, columns = shape

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        sizes = ((num_tokens, columns), (rows, columns))
        dense = [torch.randn(size, generator=generator, device=device) for size in sizes]
        x, weight = (block_quantize(one, qtype) for one in dense)
        return Inputs((x, weight), (tile_operand(x), tile_operand(weight)))

    def run(inputs: Inputs) -> Tensor:
        return block_scaled_gemm(*inputs.tiled)

    def check(inputs: Inputs) -> float:
        x, weight = (dequantize(one, torch.float32).double() for one in inputs.stored)
        return relative_error(run(inputs), x @ weight.t())

    return Case(
        name=f"{qtype.name} {rows} x {columns} tokens={num_tokens}",
        make=make,
        run=run,
        check=check,
        tolerance=5e-3,
        num_bytes=(num_tokens + rows) * columns * 9 // 16 + 2 * num_tokens * rows,
        flops=2 * num_tokens * rows * columns,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per format and shape."""
    for qtype in (QuantType.MXFP4, QuantType.NVFP4):
        for shape in SHAPES[device.type]:
            for num_tokens in TOKENS[device.type]:
                yield make_case(qtype, shape, num_tokens, device)


if __name__ == "__main__":
    main(__doc__, cases)
