"""Rotary embedding in place against its floor in bytes, beside the usual PyTorch form.

    python -m benchmarks.rotary --device cuda --out benchmarks/results/rotary_h200.json

Floor: the rotating dimensions are read and written once, and a row of the table is read per token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops.rotary import rotary_
from tiercel.reference import rotary as oracle

POSITIONS = 40960
# (tokens, rotating heads, value heads, head_dim): query and key heads of a fused projection.
SHAPES = {
    "cuda": [(tokens, 40, 8, 128) for tokens in (1, 64, 2048, 16384)] + [(2048, 12, 3, 64)],
    "cpu": [(tokens, 12, 3, 64) for tokens in (1, 16, 512)],
}


@dataclass(frozen=True)
class Inputs:
    """Heads to rotate, (tokens, heads, head_dim), a view; where they stand; cos and sin."""

    x: Tensor
    positions: Tensor
    table: Tensor


def rotate_half(inputs: Inputs) -> Tensor:
    """As Hugging Face's models do it, out of place: x * cos + (-second, first) * sin."""
    rows = inputs.table.index_select(0, inputs.positions).to(inputs.x.dtype)
    cos, sin = (row.repeat(1, 2).unsqueeze(1) for row in rows.unbind(1))
    first, second = inputs.x.chunk(2, dim=-1)
    return inputs.x * cos + torch.cat((-second, first), dim=-1) * sin


def make_case(tokens: int, heads: int, others: int, head_dim: int, device: torch.device) -> Case:
    half = head_dim // 2
    inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(POSITIONS, dtype=torch.float64), inverse)
    table = torch.stack((angles.cos(), angles.sin()), dim=1).float().to(device)

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        shape = (tokens, heads + others, head_dim)
        x = torch.randn(shape, generator=generator, device=device).bfloat16()[:, :heads]
        places = torch.randint(0, POSITIONS, (tokens,), generator=generator, device=device)
        return Inputs(x, places.int(), table)

    def check(inputs: Inputs) -> float:
        some = slice(0, 3)
        before, places = inputs.x[some].cpu().clone(), inputs.positions[some].long().cpu()
        rotary_(inputs.x, inputs.positions, inputs.table)
        return relative_error(inputs.x[some], oracle.rotary(before, angles[places]))

    return Case(
        name=f"tokens={tokens} heads={heads} head_dim={head_dim} bf16",
        make=make,
        run=lambda inputs: rotary_(inputs.x, inputs.positions, inputs.table),
        check=check,
        tolerance=4e-3,
        num_bytes=tokens * (2 * 2 * heads * head_dim + 4 * head_dim + 4),
        peer=rotate_half,
        peer_name="x * cos + rotate_half(x) * sin in PyTorch operators",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes moved define the floor."""
    for shape in SHAPES[device.type]:
        yield make_case(*shape, device)


if __name__ == "__main__":
    main(__doc__, cases)
