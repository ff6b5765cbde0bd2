"""The router of DeepSeek-V4 against its floor in bytes.

    python -m benchmarks.moe_route --device cuda --out FILE.json

Floor: the logits are read once; ids and weights are written once. The product with the router's
weights is not part of the op.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops.moe_route import moe_route, moe_route_hash
from tiercel.reference import moe_route as oracle

TOPK, SCALE, VOCAB = 6, 1.5, 129280
EXPERTS = {"Flash": 256, "Pro": 384}
TOKENS = {"cuda": (1, 64, 512, 4096), "cpu": (1, 64)}
Inputs = tuple[Tensor, Tensor]  # logits (T, experts), and the bias or the token ids


def learned_case(model: str, num_tokens: int, device: torch.device) -> Case:
    num_experts = EXPERTS[model]

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        logits = torch.randn(num_tokens, num_experts, generator=generator, device=device)
        return logits, torch.randn(num_experts, generator=generator, device=device)

    def run(inputs: Inputs) -> Tensor:
        return moe_route(*inputs, topk=TOPK, scale=SCALE)[1]

    def check(inputs: Inputs) -> float:
        expected = oracle.learned(inputs[0].cpu(), inputs[1].cpu(), TOPK, SCALE)[1]
        return relative_error(run(inputs).cpu(), expected)

    return Case(
        name=f"{model} learned tokens={num_tokens}",
        make=make,
        run=run,
        check=check,
        tolerance=1e-5,
        num_bytes=num_tokens * (4 * num_experts + 12 * TOPK) + 4 * num_experts,
    )


def hash_case(model: str, num_tokens: int, device: torch.device) -> Case:
    num_experts = EXPERTS[model]
    # Row v has the experts v, v + 7, v + 14, ... modulo their number.
    table = torch.arange(VOCAB, device=device)[:, None] + 7 * torch.arange(TOPK, device=device)
    table = table % num_experts

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        logits = torch.randn(num_tokens, num_experts, generator=generator, device=device)
        return logits, torch.randint(0, VOCAB, (num_tokens,), generator=generator, device=device)

    def run(inputs: Inputs) -> Tensor:
        return moe_route_hash(inputs[0], table, inputs[1], scale=SCALE)[1]

    def check(inputs: Inputs) -> float:
        ids = table[inputs[1]].cpu()
        expected = oracle.weights(oracle.scores(inputs[0].cpu()), ids, SCALE)
        return relative_error(run(inputs).cpu(), expected)

    return Case(
        name=f"{model} hash tokens={num_tokens}",
        make=make,
        run=run,
        check=check,
        tolerance=1e-5,
        num_bytes=num_tokens * (4 * TOPK + 8 + 20 * TOPK),  # the chosen logits alone
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes moved define the floor."""
    for model in EXPERTS:
        for num_tokens in TOKENS[device.type]:
            yield learned_case(model, num_tokens, device)
            yield hash_case(model, num_tokens, device)


if __name__ == "__main__":
    main(__doc__, cases)
