"""Writing keys and values into their slots against the floor in bytes, beside index_copy_.

    python -m benchmarks.kv_write --device cuda --out benchmarks/results/kv_write_h200.json

Floor: each key and value is read once and written once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main
from tiercel.ops.kv_write import kv_write
from tiercel.reference import kv_write as oracle

BLOCK_SIZE = 64
# (tokens, query heads beside them in the fused row, kv heads, head_dim)
SHAPES = {
    "cuda": [(tokens, 32, 8, 128) for tokens in (1, 64, 2048, 16384)] + [(2048, 9, 3, 64)],
    "cpu": [(tokens, 9, 3, 64) for tokens in (1, 16, 512)],
}


@dataclass(frozen=True)
class Inputs:
    """Keys and values, views of a fused row, their caches and slots."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor


def run(inputs: Inputs) -> None:
    kv_write(inputs.k, inputs.v, inputs.k_cache, inputs.v_cache, inputs.slots)


def copy_by_index(inputs: Inputs) -> None:
    """Two operators, which know no slot of -1."""
    inputs.k_cache.flatten(0, 1).index_copy_(0, inputs.slots, inputs.k)
    inputs.v_cache.flatten(0, 1).index_copy_(0, inputs.slots, inputs.v)


def check(inputs: Inputs) -> float:
    """0 where every bit is right, else infinity."""
    caches = [inputs.k_cache.cpu().clone(), inputs.v_cache.cpu().clone()]
    oracle.kv_write(inputs.k.cpu(), inputs.v.cpu(), *caches, inputs.slots.cpu())
    run(inputs)
    same = torch.equal(inputs.k_cache.cpu(), caches[0])
    return 0.0 if same and torch.equal(inputs.v_cache.cpu(), caches[1]) else float("inf")


def make_case(tokens: int, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> Case:
    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        shape = (tokens, heads + 2 * kv_heads, head_dim)
        fused = torch.randn(shape, generator=generator, device=device).bfloat16()
        num_blocks = 2 + 2 * tokens // BLOCK_SIZE
        cache = (num_blocks, BLOCK_SIZE, kv_heads, head_dim)
        k_cache, v_cache = (
            torch.zeros(cache, dtype=torch.bfloat16, device=device) for _ in range(2)
        )
        # Blocks in random order, filled from their start, as requests fill them.
        order = 1 + torch.randperm(num_blocks - 1, generator=generator, device=device)
        slots = (order[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten()
        k, v = fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]
        return Inputs(k, v, k_cache, v_cache, slots[:tokens].contiguous())

    return Case(
        name=f"tokens={tokens} kv_heads={kv_heads} head_dim={head_dim} bf16",
        make=make,
        run=run,
        check=check,
        tolerance=0.0,
        num_bytes=tokens * (4 * 2 * kv_heads * head_dim + 8),
        peer=copy_by_index,
        peer_name="index_copy_ for keys, then for values",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes moved define the floor."""
    for shape in SHAPES[device.type]:
        yield make_case(*shape, device)


if __name__ == "__main__":
    main(__doc__, cases)
