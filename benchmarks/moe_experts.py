"""The routed experts of DeepSeek-V4 against their floor in bytes and FLOPs.

    python -m benchmarks.moe_experts --device cuda --out FILE.json

Floor: the packed weights of each expert in use, inputs and outputs move once; 2 FLOPs per pair and
weight. Experts rest as in a model, so on a GPU in layout TILES (`TIERCEL_MOE_TILES=0`: as in the
file). Routing: uniform, skewed, or all tokens to the same experts. On a CPU there are 8 experts,
and sizes are a sixteenth.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.moe_experts import moe_experts, rest_experts
from tiercel.ops.moe_experts_torch import Experts, decoded
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import moe_experts as oracle

LIMIT, TOPK = 10.0, 6
# Experts, hidden, inter.
SHAPES = {
    "cuda": {"Flash": (256, 4096, 2048), "Pro": (384, 7168, 3072)},
    "cpu": {"Flash / 16": (8, 256, 128), "Pro / 16": (8, 448, 192)},
}
TOKENS = {"cuda": (1, 8, 64, 512, 4096), "cpu": (1, 8)}
# Types of w1 and w3, and of w2.
FORMATS = {
    "cuda": (
        (QuantType.Q2_K, QuantType.Q2_K),
        (QuantType.MXFP4, QuantType.MXFP4),
        (QuantType.NVFP4, QuantType.NVFP4),
        (QuantType.Q2_K, QuantType.Q3_K),
        (QuantType.IQ2_XXS, QuantType.Q2_K),
        (QuantType.Q4_K, QuantType.Q6_K),
    ),
    "cpu": ((QuantType.MXFP4, QuantType.MXFP4), (QuantType.NVFP4, QuantType.NVFP4)),
}
# Of the GGML types: where a block's float16 factors are, and their bytes.
FACTORS = {
    QuantType.Q2_K: (80, 4),
    QuantType.Q3_K: (108, 2),
    QuantType.Q4_K: (0, 4),
    QuantType.Q6_K: (208, 2),
    QuantType.IQ2_XXS: (0, 2),
}
FACTOR = 0.001  # about: weights are below 1
ZIPF = 1.2  # exponent of the skewed routing
ROUTINGS = ("uniform", "zipf", "one")


@dataclass(frozen=True)
class Inputs:
    """x (T, hidden) bfloat16, ids and weights (T, topk)."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def make_stack(shape: tuple[int, int, int], kind: QuantType, device: torch.device) -> QuantTensor:
    """A stack: in a block format 8 matrices are encoded and repeated, else blocks are random."""
    num_experts, out, cols = shape
    generator = torch.Generator(device).manual_seed(out)
    if kind not in FACTORS:
        few = torch.randn(8, out, cols, generator=generator, device=device) / cols**0.5
        index = torch.arange(num_experts, device=device) % 8
        return block_quantize(few, kind).take(index)
    blocks = (num_experts, out, cols // kind.block_weights)
    data = torch.randint(
        0, 256, (*blocks, kind.block_bytes), generator=generator, device=device, dtype=torch.uint8
    )
    start, size = FACTORS[kind]
    drawn = torch.rand((*blocks, 2), generator=generator, device=device)
    data[..., start : start + size] = ((1 + drawn) * FACTOR).half().view(torch.uint8)[..., :size]
    return QuantTensor(kind, Layout.FILE, shape, {"data": data.flatten(2)})


def make_inputs(
    seed: int, num_tokens: int, shape: tuple[int, int], routing: str, device: torch.device
) -> Inputs:
    """Random inputs, and experts of a routing."""
    num_experts, hidden = shape
    generator = torch.Generator(device).manual_seed(seed)
    rank = torch.arange(1, num_experts + 1, device=device).double()
    odds = rank ** (-ZIPF if routing == "zipf" else 0.0)
    ids = torch.multinomial(odds.expand(num_tokens, -1), TOPK, generator=generator)
    if routing == "one":
        ids = ids[:1].repeat(num_tokens, 1)
    x = torch.randn(num_tokens, hidden, generator=generator, device=device).bfloat16()
    weights = torch.rand(num_tokens, TOPK, generator=generator, device=device)
    return Inputs(x, ids, weights)


@functools.lru_cache(1)  # of all formats together there is no room
def make_experts(
    shape: tuple[int, int, int], kinds: tuple[QuantType, QuantType], device: torch.device
) -> Experts:
    """Experts as they rest in a model; shape: experts, hidden, inter."""
    num_experts, hidden, inter = shape
    up, down = (num_experts, inter, hidden), (num_experts, hidden, inter)
    gate = make_stack(up, kinds[0], device)
    made = Experts(gate, make_stack(up, kinds[0], device), make_stack(down, kinds[1], device))
    return rest_experts(made, torch.bfloat16)


def expert_bytes(kinds: tuple[QuantType, QuantType], hidden: int, inter: int) -> int:
    """Packed bytes of one expert."""
    shape = (1, 256, 256)
    few = [make_stack(shape, kind, torch.device("cpu")).nbytes for kind in (kinds[0], *kinds)]
    return sum(few) * hidden * inter // (256 * 256)


def make_case(
    name: str,
    num_tokens: int,
    shape: tuple[int, int, int],
    kinds: tuple[QuantType, QuantType],
    routing: str,
    device: torch.device,
) -> Case:
    """One Case; shape: experts, hidden, inter; `routing` of `ROUTINGS`."""
    num_experts, hidden, inter = shape
    get: Callable[[], Experts] = lambda: make_experts(shape, kinds, device)  # noqa: E731

    def make(seed: int) -> Inputs:
        return make_inputs(seed, num_tokens, (num_experts, hidden), routing, device)

    def run(inputs: Inputs) -> Tensor:
        return moe_experts(inputs.x, inputs.ids, inputs.weights, get(), limit=LIMIT)

    def check(inputs: Inputs) -> float:  # two tokens and their experts
        ids, experts = inputs.ids[-2:], get()
        used, places = ids.unique(return_inverse=True)
        stacks = [decoded(stack, used).cpu() for stack in (experts.w1, experts.w3, experts.w2)]
        rows = (inputs.x[-2:].cpu(), places.cpu(), inputs.weights[-2:].cpu())
        expected = oracle.moe_experts(*rows, (stacks[0], stacks[1], stacks[2]), LIMIT)
        return relative_error(run(inputs)[-2:].cpu(), expected)

    used = make(0).ids.unique().numel()
    return Case(
        name=name,
        make=make,
        run=run,
        check=check,
        tolerance=1e-2,
        num_bytes=used * expert_bytes(kinds, hidden, inter) + 4 * num_tokens * hidden,
        flops=6 * num_tokens * TOPK * hidden * inter,
        max_sets=8,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape, format and routing; bytes and FLOPs define the floor."""
    for model, shape in SHAPES[device.type].items():
        for kinds in FORMATS[device.type]:
            names = dict.fromkeys(kind.name.lower() for kind in kinds)
            for num_tokens in TOKENS[device.type]:
                for routing in ROUTINGS:
                    name = f"{model} {'+'.join(names)} {routing} tokens={num_tokens}"
                    yield make_case(name, num_tokens, shape, kinds, routing, device)


if __name__ == "__main__":
    main(__doc__, cases)
