"""Attention of DeepSeek-V4 against its floor in bytes and FLOPs.

    python -m benchmarks.sparse_attention --device cuda --out FILE.json

Floor: the encoded entries that a token lists are read once, 584 bytes each (those of a prefill
overlap: each slot of the pool once), and 4 FLOPs per head, channel and key.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops.block_quantize import decode_kv_entries, encode_kv_entries
from tiercel.ops.sparse_attention import SlottedKV, sparse_attention
from tiercel.reference import sparse_attention as oracle

HEAD_DIM, ROTARY, WINDOW, ENTRY_BYTES, PER_BLOCK = 512, 64, 128, 584, 32
HEADS = {"Flash": 64, "Pro": 128}
# Tokens, selected entries beside the window: none, top-k of Flash and Pro, HCA at 128 k and 1 M.
SHAPES = {
    "cuda": [
        *[(num_tokens, 512) for num_tokens in (1, 16, 64, 256, 4096)],
        (64, 0),
        (64, 1024),
        (1, 1024),
        (1, 8192),
        (16, 8192),
    ],
    "cpu": [(1, 0), (1, 512), (4, 512)],
}
POOL_SLOTS = 65536  # most slots of the pool; 38 MB


@dataclass(frozen=True)
class Inputs:
    """q (T, heads, 512) bfloat16, encoded window and entries, sink (heads,)."""

    q: Tensor
    parts: tuple[SlottedKV, ...]
    sink: Tensor


def make_case(model: str, num_tokens: int, selected: int, device: torch.device) -> Case:
    num_heads, num_keys = HEADS[model], WINDOW + selected
    slots_in_use = min(POOL_SLOTS, num_tokens * num_keys)
    num_blocks = -(-slots_in_use // PER_BLOCK)

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)

        def sample(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        pool = encode_kv_entries(sample(num_blocks, PER_BLOCK, HEAD_DIM), ROTARY)
        order = torch.randperm(slots_in_use, generator=generator, device=device)
        index = torch.arange(num_tokens * num_keys, device=device) % slots_in_use
        slots = order[index].view(num_tokens, num_keys)
        # Planes of their own, as in the cache.
        data = pool[..., : HEAD_DIM + ROTARY].contiguous()
        scales = pool[..., HEAD_DIM + ROTARY :].contiguous()
        parts = [SlottedKV(data, slots[:, :WINDOW], scales, ROTARY)]
        if selected:
            parts.append(SlottedKV(data, slots[:, WINDOW:], scales, ROTARY))
        q = sample(num_tokens, num_heads, HEAD_DIM).bfloat16()
        return Inputs(q, tuple(parts), sample(num_heads))

    def run(inputs: Inputs) -> Tensor:
        return sparse_attention(inputs.q, inputs.parts, inputs.sink, HEAD_DIM**-0.5)

    def check(inputs: Inputs) -> float:  # the last token
        part = inputs.parts[0]
        assert part.scales is not None
        vectors = decode_kv_entries(part.cache, ROTARY, part.scales).flatten(0, 1)
        slots = torch.cat([part.slots[-1] for part in inputs.parts])
        rows = (inputs.q[-1:].cpu(), [vectors[slots].cpu()], inputs.sink.cpu())
        expected, _ = oracle.sparse_attention(*rows, HEAD_DIM**-0.5)
        return relative_error(run(inputs)[-1:].cpu(), expected)

    return Case(
        name=f"{model} tokens={num_tokens} keys={num_keys}",
        make=make,
        run=run,
        check=check,
        tolerance=5e-3,
        num_bytes=slots_in_use * ENTRY_BYTES + 4 * num_tokens * num_heads * HEAD_DIM,
        flops=4 * num_tokens * num_heads * num_keys * HEAD_DIM,
        max_sets=16,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per model and shape; bytes and FLOPs define the floor."""
    for model in HEADS:
        for shape in SHAPES[device.type]:
            yield make_case(model, *shape, device)


if __name__ == "__main__":
    main(__doc__, cases)
