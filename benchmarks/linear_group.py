"""Products of 1 to 8 tokens with the matrices of DeepSeek-V4 that read the same x.

    python -m benchmarks.linear_group --device cuda --out FILE.json

Floor: weights, scales and x are read once, the results are written once. The peer multiplies by one
matrix after the other, with the kernels of 17 to 128 tokens or cuBLAS. With `--launches`, every
order of work of the shapes with one token: what `select_linear_group` chooses from.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.kernels.block import linear_group as kernel
from tiercel.kernels.block.linear_group import GroupInput, LinearGroupConfig
from tiercel.kernels.block.q8_planes import Q8Planes
from tiercel.ops import linear_group as op
from tiercel.ops.block_matvec import block_matvec
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.linear_group import GroupMatrix, linear_group
from tiercel.quant import QuantTensor
from tiercel.quant_types import QuantType
from tiercel.reference import linear_group as oracle

# Columns; rows and format of each matrix, of Flash. A pair is followed by a "+".
SHAPES = {
    "x of CSA": (4096, (("fp8", 1536), ("bf16", 2624))),
    "x of HCA": (4096, (("fp8", 1536), ("bf16", 1024))),
    "x of window": (4096, (("fp8", 1536),)),
    "wq_b and indexer wq_b, normed": (1024, (("fp8", 32768), ("fp8", 8192))),
    "wo_a, rotated": (4096, (("fp8", 8192),)),
    "wo_b": (8192, (("fp8", 4096),)),
    "router, shared w1 and w3": (4096, (("bf16", 256), ("fp8+", 4096))),
    "shared w2": (2048, (("fp8", 4096),)),
    "wq_b in Q8_0": (1024, (("q8", 32768),)),
    "wo_b in Q8_0": (8192, (("q8", 4096),)),
}
GROUPS, HEAD, HALF, LIMIT, EPS = 8, 512, 32, 10.0, 1e-6
TOKENS = {"cuda": (1, 2, 4, 8), "cpu": (1,)}
CHECKED_ROWS = 64


@dataclass(frozen=True)
class Inputs:
    """x (T, groups * in) bfloat16, the matrices, and what x passes first."""

    x: Tensor
    matrices: list[GroupMatrix]
    norm: tuple[Tensor, float] | None
    rotation: tuple[Tensor, Tensor, int] | None


def make_weight(
    kind: str, shape: tuple[int, int], generator: torch.Generator
) -> Tensor | QuantTensor | Q8Planes:
    """Random weights of a format."""
    weight = torch.randn(shape, generator=generator, device=generator.device) / shape[1] ** 0.5
    if kind.startswith("fp8"):
        return block_quantize(weight, QuantType.FP8_BLOCK)
    if kind == "bf16":
        return weight.bfloat16()
    scale = weight.unflatten(1, (-1, 32)).abs().amax(-1) / 127
    q = (weight / scale.repeat_interleave(32, 1)).round().to(torch.int8)
    return Q8Planes(q, scale.half())


def weight_bytes(weight: Tensor | QuantTensor | Q8Planes) -> int:
    """Bytes of all planes."""
    if isinstance(weight, QuantTensor):
        return weight.nbytes
    planes = (weight.q, weight.scale) if isinstance(weight, Q8Planes) else (weight,)
    return sum(plane.numel() * plane.element_size() for plane in planes)


def run_launch(
    inputs: Inputs, config: LinearGroupConfig, num_sms: int = kernel.H200_SMS
) -> list[Tensor]:
    """The products with a launch that may not be that of the shape."""
    outs = [op._make_out(inputs.x, matrix) for matrix in inputs.matrices]
    planes = [op._planes(m, out) for m, out in zip(inputs.matrices, outs, strict=True)]
    positions, table, head_dim = inputs.rotation or (None, None, 1)
    rotation = None if positions is None or table is None else (positions, table)
    given = GroupInput(inputs.norm, rotation, head_dim, LIMIT)
    kernel.launch_linear_group(inputs.x, planes, given, config, num_sms)
    return outs


def peer_product(x: Tensor, matrix: GroupMatrix) -> Tensor:
    """One matrix by another kernel, without what is around the product."""
    weight = matrix.weight
    if isinstance(weight, QuantTensor) and x.is_cuda:
        return block_matvec(x, weight, matrix.num_groups)
    dense = weight.dense(x.dtype) if isinstance(weight, Q8Planes) else weight
    dense = dequantize(dense, x.dtype) if isinstance(dense, QuantTensor) else dense
    return x @ dense.t()


def make_case(
    name: str, num_tokens: int, device: torch.device, config: LinearGroupConfig | None = None
) -> Case:
    columns, kinds = SHAPES[name]
    scale = 1 if device.type == "cuda" else 16
    columns = max(128, columns // scale)
    is_normed, is_rotated = "normed" in name, "rotated" in name
    num_groups = GROUPS if is_rotated else 1
    rows = sum(count // scale for _, count in kinds)

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(num_tokens, num_groups * columns, generator=generator, device=device)
        matrices = [
            GroupMatrix(
                make_weight(kind, (count // scale, columns), generator),
                num_groups,
                is_pair=kind.endswith("+"),
                out_dtype=torch.float32 if kind == "bf16" else torch.bfloat16,
            )
            for kind, count in kinds
        ]
        norm = (torch.rand(columns, generator=generator, device=device), EPS)
        table = torch.randn(64, 2, HALF, generator=generator, device=device)
        positions = torch.arange(num_tokens, device=device)
        rotation = (positions, table, min(HEAD, columns))
        return Inputs(
            x.bfloat16(), matrices, norm if is_normed else None, rotation if is_rotated else None
        )

    def run(inputs: Inputs) -> list[Tensor]:
        if config is not None:
            return run_launch(inputs, config)
        x, norm, rotation = inputs.x, inputs.norm, inputs.rotation
        return linear_group(x, inputs.matrices, norm=norm, rotation=rotation, limit=LIMIT)

    def check(inputs: Inputs) -> float:  # the first rows of each matrix, all tokens
        x = inputs.x.cpu()
        if inputs.norm is not None:
            x = oracle.norm(x, inputs.norm[0].cpu(), EPS).bfloat16()
        if inputs.rotation is not None:
            positions, table, head_dim = inputs.rotation
            x = oracle.rotate_back(x, positions.cpu(), table.cpu(), head_dim).bfloat16()
        worst = 0.0
        for matrix, found in zip(inputs.matrices, run(inputs), strict=True):
            first = first_rows(matrix)
            expected = oracle.product(x[:, :columns], first, is_pair=matrix.is_pair, limit=LIMIT)
            width = expected.shape[1]
            worst = max(worst, relative_error(found[:, :width].cpu(), expected))
        return worst

    def peer(inputs: Inputs) -> list[Tensor]:
        return [peer_product(inputs.x, matrix) for matrix in inputs.matrices]

    num_bytes = sum(weight_bytes(matrix.weight) for matrix in make(0).matrices)
    label = "" if config is None else f" {config.parts} x {config.tiles} x {config.stages} x "
    label += "" if config is None else str(config.ctas)
    return Case(
        name=f"{name} {rows} x {columns} tokens={num_tokens}{label}",
        make=make,
        run=run,
        check=check,
        tolerance=5e-3,
        num_bytes=num_bytes + 2 * num_tokens * (num_groups * columns + rows),
        flops=2 * num_tokens * rows * columns,
        peer=peer,
        peer_name="one matrix after the other",
    )


def first_rows(matrix: GroupMatrix) -> Tensor:
    """The decoded rows of the first results, on the CPU."""
    weight, count = matrix.weight, min(CHECKED_ROWS, matrix.out_rows // matrix.num_groups)
    if isinstance(weight, QuantTensor):
        dense = dequantize(weight, torch.float32)
    else:
        dense = weight.dense(torch.float32) if isinstance(weight, Q8Planes) else weight.float()
    parts = [dense[:count]] + ([dense[matrix.out_rows :][:count]] if matrix.is_pair else [])
    return torch.cat(parts).cpu()


def launches(columns: int, kinds: Sequence[tuple[str, int]]) -> Iterator[LinearGroupConfig]:
    """All orders of work that are tried with a token, the one of the shape first."""
    has_q8 = any(kind == "q8" for kind, _ in kinds)
    tiles = [count // kernel.TILE_ROWS for _, count in kinds]
    chosen = kernel.select_linear_group(columns, tiles, 1, has_q8=has_q8)
    yield chosen
    for parts in (2, 4, 8):
        for stages, ctas in ((2, 3), (2, 2), (3, 2), (4, 2)):
            config = LinearGroupConfig(parts, 8 // parts, stages, ctas)
            if config != chosen and columns // kernel.UNIT_BYTES >= parts:
                yield config


def cases(device: torch.device, *, has_all_launches: bool) -> Iterator[Case]:
    """Yield one Case per shape and number of tokens, or launches."""
    for name, (columns, kinds) in SHAPES.items():
        if not has_all_launches:
            for num_tokens in TOKENS[device.type]:
                yield make_case(name, num_tokens, device)
            continue
        for config in launches(columns, kinds):
            yield make_case(name, 1, device, config)


if __name__ == "__main__":
    wants_launches = "--launches" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--launches"]
    main(__doc__, partial(cases, has_all_launches=wants_launches))
