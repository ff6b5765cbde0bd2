"""Products of 1 to 256 tokens with FP8 weights of DeepSeek-V4, as stored, against their floor.

    python -m benchmarks.block_matvec --device cuda --out FILE.json

Floor: weights, scales and x are read once, the result is written once. The peer decodes the weights
to bfloat16 and multiplies by cuBLAS, as for many tokens. With `--tiles`, every tile and number of
splits of the shapes with one token: what `select_tiles` chooses from.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.kernels.block import block_matvec as kernel
from tiercel.ops.block_matvec import block_matvec
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.grouped_linear_torch import product
from tiercel.quant import QuantTensor
from tiercel.quant_types import QuantType
from tiercel.reference import block_matvec as oracle

# Groups, rows of a group, columns, of Flash.
SHAPES = {
    "wq_a and wkv": (1, 1536, 4096),
    "wq_b": (1, 32768, 1024),
    "wo_a": (8, 1024, 4096),
    "wo_b": (1, 4096, 8192),
    "shared w1 and w3": (1, 4096, 4096),
    "shared w2": (1, 4096, 2048),
    "indexer wq_b": (1, 8192, 1024),
}
TOKENS = (1, 8, 16, 32, 64, 128, 256)
CHECKED_ROWS = 256


@dataclass(frozen=True)
class Inputs:
    """x (T, groups * in) bfloat16 and the weight in FP8 blocks."""

    x: Tensor
    weight: QuantTensor


def run_tiles(inputs: Inputs, num_groups: int, tiles: kernel.Tiles) -> Tensor:
    """The product with tiles that may not be those of the shape."""
    rows = inputs.weight.shape[0]
    out = torch.empty(inputs.x.shape[0], rows, dtype=torch.bfloat16, device=inputs.x.device)
    parts = None
    if tiles.splits > 1:
        parts = torch.empty(tiles.splits, *out.shape, device=out.device)
    planes = inputs.weight.planes
    matrix = kernel.Planes(planes["q"], planes["scale"], inputs.weight.block, None, False)
    kernel.launch_block_matvec(inputs.x, matrix, num_groups, tiles, out, parts)
    return out


def make_case(
    name: str, num_tokens: int, device: torch.device, tiles: kernel.Tiles | None = None
) -> Case:
    num_groups, rows, cols = SHAPES[name]

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        weight = torch.randn(num_groups * rows, cols, generator=generator, device=device)
        x = torch.randn(num_tokens, num_groups * cols, generator=generator, device=device)
        return Inputs(x.bfloat16(), block_quantize(weight / cols**0.5, QuantType.FP8_BLOCK))

    def run(inputs: Inputs) -> Tensor:
        if tiles is not None:
            return run_tiles(inputs, num_groups, tiles)
        return block_matvec(inputs.x, inputs.weight, num_groups)

    def check(inputs: Inputs) -> float:  # the first rows of the first group, all tokens
        matrix = dequantize(inputs.weight.rows(0, CHECKED_ROWS), torch.float32)
        expected = oracle.block_matvec(inputs.x[:, :cols], matrix)
        return relative_error(run(inputs)[:, :CHECKED_ROWS].cpu(), expected)

    def decoded(inputs: Inputs) -> Tensor:
        return product(inputs.x, dequantize(inputs.weight, torch.bfloat16), num_groups)

    weights = num_groups * rows * cols
    label = "" if tiles is None else f" tile={tiles.rows} splits={tiles.splits}"
    return Case(
        name=f"{name} {num_groups} x {rows} x {cols} tokens={num_tokens}{label}",
        make=make,
        run=run,
        check=check,
        tolerance=5e-3,
        num_bytes=weights + weights // 16384 + 2 * num_tokens * num_groups * (cols + rows),
        flops=2 * num_tokens * weights,
        peer=decoded,
        peer_name="decoded to bfloat16, then cuBLAS",
    )


def cases(device: torch.device, *, has_all_tiles: bool) -> Iterator[Case]:
    """Yield one Case per shape and number of tokens, or tiles."""
    for name, (num_groups, rows, cols) in SHAPES.items():
        if not has_all_tiles:
            for num_tokens in TOKENS:
                yield make_case(name, num_tokens, device)
            continue
        for tile in kernel.STAGES:
            for splits in (1, 2, 4, 8, 16):
                programs = num_groups * -(-rows // tile) * splits
                if 64 <= programs <= 1200 and cols // kernel.COLS >= splits:
                    yield make_case(name, 1, device, kernel.Tiles(tile, kernel.FEW_TOKENS, splits))


if __name__ == "__main__":
    wants_tiles = "--tiles" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--tiles"]
    main(__doc__, partial(cases, has_all_tiles=wants_tiles))
