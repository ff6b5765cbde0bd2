"""Head norm and rotation of DeepSeek-V4 against their floor in bytes.

    python -m benchmarks.latent_rope --device cuda --out FILE.json

Floor: the heads are read and written once; the table's rows are a token's 256 bytes. A write reads
a vector in bfloat16 or an index key in float32 and writes its entry.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.models.config import RopeConfig
from tiercel.models.rope import rope_table
from tiercel.ops.block_quantize import decode_index_keys, decode_kv_entries, hadamard
from tiercel.ops.latent_rope import index_key_write, latent_rope, latent_write
from tiercel.reference import latent_rope as oracle

ROTARY, HEAD_DIM, BASE, MAX_POSITIONS, EPS = 64, 512, 160000.0, 131072, 1e-6
# What rotates: heads, channels, whether there is a norm, whether the rotation is inverse.
PARTS = {
    "Flash q": (64, HEAD_DIM, True, False),
    "Pro q": (128, HEAD_DIM, True, False),
    "kv": (1, HEAD_DIM, True, False),
    "Flash attention output": (64, HEAD_DIM, False, True),
    "Pro attention output": (128, HEAD_DIM, False, True),
    "indexer q": (64, 128, False, False),
}
TOKENS = {"cuda": (1, 64, 4096), "cpu": (1, 16)}


@dataclass(frozen=True)
class Inputs:
    """Heads (T, heads, d) bfloat16 and their positions (T,) int64."""

    x: Tensor
    positions: Tensor


def make_case(name: str, num_tokens: int, table: Tensor) -> Case:
    num_heads, width, has_norm, is_inverse = PARTS[name]
    device = table.device
    eps = EPS if has_norm else None

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(num_tokens, num_heads, width, generator=generator, device=device)
        positions = torch.randint(
            0, MAX_POSITIONS, (num_tokens,), generator=generator, device=device
        )
        return Inputs(x.bfloat16(), positions)

    def run(inputs: Inputs) -> Tensor:
        return latent_rope(inputs.x, inputs.positions, table, eps=eps, inverse=is_inverse)

    def check(inputs: Inputs) -> float:
        angles = oracle.frequencies(ROTARY, BASE, 16.0, 65536)
        expected = oracle.latent_rope(
            inputs.x.cpu(), inputs.positions.cpu(), angles, eps, None, is_inverse
        )
        return relative_error(run(inputs).cpu(), expected)

    return Case(
        name=f"{name} tokens={num_tokens}",
        make=make,
        run=run,
        check=check,
        tolerance=5e-3,
        num_bytes=num_tokens * (4 * num_heads * width + 4 * ROTARY),
    )


@dataclass(frozen=True)
class Written:
    """Vectors (T, d) and the cache's planes in blocks of 128."""

    x: Tensor
    positions: Tensor
    cache: Tensor
    scales: Tensor


def make_write(num_tokens: int, table: Tensor, *, is_index: bool) -> Case:
    device = table.device
    width, sizes = (128, (64, 4)) if is_index else (HEAD_DIM, (HEAD_DIM + ROTARY, 8))
    dtype = torch.float32 if is_index else torch.bfloat16
    num_blocks = 1 + -(-num_tokens // 128)
    slots = 128 + torch.randperm(num_tokens, device=device)

    def make(seed: int) -> Written:
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(num_tokens, width, generator=generator, device=device).to(dtype)
        positions = torch.arange(num_tokens, device=device)
        planes = (torch.zeros(num_blocks, 128, n, dtype=torch.uint8, device=device) for n in sizes)
        return Written(x, positions, *planes)

    def run(inputs: Written) -> Tensor:
        planes = (inputs.cache, inputs.scales)
        if is_index:
            index_key_write(inputs.x, planes, slots)
        else:
            rope = (inputs.positions, table)
            options = {"rotary_dim": ROTARY, "rotation": rope, "norm": (EPS, None)}
            latent_write(inputs.x, planes, slots, **options)
        return inputs.cache

    def check(inputs: Written) -> float:
        run(inputs)
        cache, scales = (p.flatten(0, 1)[slots] for p in (inputs.cache, inputs.scales))
        if is_index:
            return relative_error(decode_index_keys(cache, scales), hadamard(inputs.x))
        values = latent_rope(inputs.x.float(), inputs.positions, table, eps=EPS)
        return relative_error(decode_kv_entries(cache, ROTARY, scales), values)

    return Case(
        name=f"{'index key' if is_index else 'kv'} write tokens={num_tokens}",
        make=make,
        run=run,
        check=check,
        tolerance=0.3 if is_index else 0.05,  # of E2M1 and E4M3
        num_bytes=num_tokens * (width * dtype.itemsize + sum(sizes) + 4 * ROTARY),
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per part and number of tokens; bytes moved define the floor."""
    rope = RopeConfig(BASE, ROTARY, "yarn", 16.0, 65536, attention_factor=1.0)
    table = rope_table(rope, MAX_POSITIONS).to(device)
    for num_tokens in TOKENS[device.type]:
        for name in PARTS:
            yield make_case(name, num_tokens, table)
        for is_index in (False, True):
            yield make_write(num_tokens, table, is_index=is_index)


if __name__ == "__main__":
    main(__doc__, cases)
