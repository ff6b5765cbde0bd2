"""The routed experts of DeepSeek-V4 against their floor in bytes and FLOPs.

    python -m benchmarks.moe_experts --device cuda --out FILE.json

Floor: the packed weights of each expert in use, inputs and outputs move once; 2 FLOPs per pair and
weight. On a CPU there are 8 experts, and sizes are a sixteenth.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.moe_experts import Experts, moe_experts
from tiercel.quant import QuantTensor
from tiercel.quant_types import QuantType
from tiercel.reference import moe_experts as oracle

LIMIT, TOPK = 10.0, 6
# Experts, hidden, inter.
SHAPES = {
    "cuda": {"Flash": (256, 4096, 2048), "Pro": (384, 7168, 3072)},
    "cpu": {"Flash / 16": (8, 256, 128), "Pro / 16": (8, 448, 192)},
}
TOKENS = {"cuda": (1, 8, 64, 512, 4096), "cpu": (1, 8)}
FORMATS = (QuantType.MXFP4, QuantType.NVFP4)
ZIPF = 1.2  # exponent of the skewed routing


@dataclass(frozen=True)
class Inputs:
    """x (T, hidden) bfloat16, ids and weights (T, topk)."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def make_stack(shape: tuple[int, int, int], kind: QuantType, device: torch.device) -> QuantTensor:
    """A stack in a block format: 8 matrices are encoded and repeated."""
    num_experts, out, cols = shape
    generator = torch.Generator(device).manual_seed(out)
    few = torch.randn(8, out, cols, generator=generator, device=device) / cols**0.5
    index = torch.arange(num_experts, device=device) % 8
    return block_quantize(few, kind).take(index)


def make_inputs(seed: int, num_tokens: int, shape: tuple[int, int], is_skewed: bool,
                device: torch.device) -> Inputs:  # fmt: skip
    num_experts, hidden = shape
    generator = torch.Generator(device).manual_seed(seed)
    rank = torch.arange(1, num_experts + 1, device=device).double()
    odds = rank ** (-ZIPF if is_skewed else 0.0)
    ids = torch.multinomial(odds.expand(num_tokens, -1), TOPK, generator=generator)
    x = torch.randn(num_tokens, hidden, generator=generator, device=device).bfloat16()
    weights = torch.rand(num_tokens, TOPK, generator=generator, device=device)
    return Inputs(x, ids, weights)


def make_case(
    name: str, num_tokens: int, experts: Experts, is_skewed: bool, device: torch.device
) -> Case:
    num_experts, inter, hidden = experts.w1.shape

    def make(seed: int) -> Inputs:
        return make_inputs(seed, num_tokens, (num_experts, hidden), is_skewed, device)

    def run(inputs: Inputs) -> Tensor:
        return moe_experts(inputs.x, inputs.ids, inputs.weights, experts, limit=LIMIT)

    def check(inputs: Inputs) -> float:  # two tokens and their experts
        ids = inputs.ids[-2:]
        used, places = ids.unique(return_inverse=True)
        stacks = [
            dequantize(stack.take(used), torch.float32).cpu()
            for stack in (experts.w1, experts.w3, experts.w2)
            if isinstance(stack, QuantTensor)
        ]
        rows = (inputs.x[-2:].cpu(), places.cpu(), inputs.weights[-2:].cpu())
        expected = oracle.moe_experts(*rows, (stacks[0], stacks[1], stacks[2]), LIMIT)
        return relative_error(run(inputs)[-2:].cpu(), expected)

    used = make(0).ids.unique().numel()
    assert isinstance(experts.w1, QuantTensor)
    return Case(
        name=name,
        make=make,
        run=run,
        check=check,
        tolerance=1e-2,
        num_bytes=used * 3 * experts.w1.nbytes // num_experts + 4 * num_tokens * hidden,
        flops=6 * num_tokens * TOPK * hidden * inter,
        max_sets=8,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape, format and routing; bytes and FLOPs define the floor."""
    for model, (num_experts, hidden, inter) in SHAPES[device.type].items():
        for kind in FORMATS:
            up, down = (num_experts, inter, hidden), (num_experts, hidden, inter)
            stacks = [make_stack(shape, kind, device) for shape in (up, up, down)]
            experts = Experts(*stacks)
            for num_tokens in TOKENS[device.type]:
                for is_skewed in (False, True):
                    routing = "zipf" if is_skewed else "uniform"
                    name = f"{model} {kind.name.lower()} {routing} tokens={num_tokens}"
                    yield make_case(name, num_tokens, experts, is_skewed, device)


if __name__ == "__main__":
    main(__doc__, cases)
