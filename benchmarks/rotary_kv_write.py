"""Norm, rotation and cache write of heads against their floor in bytes, beside PyTorch operators.

    python -m benchmarks.rotary_kv_write --device cuda --out result.json

Floor: every head is read once, queries and keys are written once, keys and values once more; a row
of the table is read per token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops.rotary_kv_write import rotary_kv_write
from tiercel.reference import rotary_kv_write as oracle

POSITIONS = 40960
BLOCK_SIZE = 64
EPS = 1e-6
# (tokens, query heads, key/value heads, head_dim), and whether heads are normed.
SHAPES = {
    "cuda": [
        *[(tokens, 32, 8, 128, True) for tokens in (1, 8, 64, 512, 4096)],
        (64, 32, 8, 128, False),
        (2048, 9, 3, 64, False),
    ],
    "cpu": [(tokens, 9, 3, 64, False) for tokens in (1, 16, 512)] + [(64, 16, 8, 128, True)],
}


@dataclass(frozen=True)
class Inputs:
    """Heads (tokens, all heads, head_dim), where they stand and go; cos and sin; norms."""

    heads: Tensor
    positions: Tensor
    slots: Tensor
    caches: tuple[Tensor, Tensor]
    table: Tensor
    weights: tuple[Tensor, Tensor] | None


def run(inputs: Inputs) -> None:
    q_weight, k_weight = inputs.weights or (None, None)
    rotary_kv_write(
        inputs.heads,
        inputs.positions,
        inputs.table,
        *inputs.caches,
        inputs.slots,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=EPS,
    )


def operators(inputs: Inputs) -> None:
    """As PyTorch models do it, out of place: norm, x * cos + (-second, first) * sin, index_copy."""
    kv_heads = inputs.caches[0].shape[2]
    queries = inputs.heads.shape[1] - 2 * kv_heads
    x, v = inputs.heads[:, :-kv_heads], inputs.heads[:, -kv_heads:]
    if inputs.weights is not None:
        q, k = x[:, :queries], x[:, queries:]
        norm = torch.nn.functional.rms_norm
        size = (x.shape[2],)
        q_weight, k_weight = (weight.to(x.dtype) for weight in inputs.weights)
        x = torch.cat((norm(q, size, q_weight, EPS), norm(k, size, k_weight, EPS)), dim=1)
    rows = inputs.table.index_select(0, inputs.positions).to(x.dtype)
    cos, sin = (row.repeat(1, 2).unsqueeze(1) for row in rows.unbind(1))
    first, second = x.chunk(2, dim=-1)
    x = x * cos + torch.cat((-second, first), dim=-1) * sin
    inputs.caches[0].flatten(0, 1).index_copy_(0, inputs.slots, x[:, queries:])
    inputs.caches[1].flatten(0, 1).index_copy_(0, inputs.slots, v)


def make_case(
    tokens: int, heads: int, kv_heads: int, head_dim: int, has_norms: bool, device: torch.device
) -> Case:
    half = head_dim // 2
    inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(POSITIONS, dtype=torch.float64), inverse)
    table = torch.stack((angles.cos(), angles.sin()), dim=1).float().to(device)
    blocks = 2 + tokens // BLOCK_SIZE

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        shape = (tokens, heads + 2 * kv_heads, head_dim)
        x = torch.randn(shape, generator=generator, device=device).half()
        places = torch.randint(0, POSITIONS, (tokens,), generator=generator, device=device)
        caches = torch.zeros(2, blocks, BLOCK_SIZE, kv_heads, head_dim, device=device).half()
        slots = torch.randperm(blocks * BLOCK_SIZE, generator=generator, device=device)[:tokens]
        weights = torch.randn(2, head_dim, generator=generator, device=device)
        pair = (weights[0], weights[1]) if has_norms else None
        return Inputs(x, places.int(), slots, (caches[0], caches[1]), table, pair)

    def check(inputs: Inputs) -> float:
        few = min(tokens, 3)
        weights = inputs.weights and tuple(weight.cpu() for weight in inputs.weights)
        wanted = torch.zeros(blocks, BLOCK_SIZE, kv_heads, head_dim, dtype=torch.float64)
        expected = oracle.rotary_kv_write(
            inputs.heads[:few].cpu(),
            angles[inputs.positions[:few].long().cpu()],
            wanted,
            wanted.clone(),
            inputs.slots[:few].cpu(),
            weights,
            EPS,
        )
        run(inputs)
        return relative_error(inputs.heads[:few], expected)

    row_bytes = 2 * head_dim * (2 * (heads + 2 * kv_heads) + kv_heads)
    return Case(
        name=f"tokens={tokens} heads={heads}/{kv_heads} head_dim={head_dim} norms={has_norms} fp16",
        make=make,
        run=run,
        check=check,
        tolerance=1e-3,
        num_bytes=tokens * (row_bytes + 4 * head_dim + 12),
        peer=operators,
        peer_name="PyTorch operators: rms_norm, rotate_half, index_copy",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes moved define the floor."""
    for shape in SHAPES[device.type]:
        yield make_case(*shape, device)


if __name__ == "__main__":
    main(__doc__, cases)
