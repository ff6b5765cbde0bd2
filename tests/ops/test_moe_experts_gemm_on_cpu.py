"""The CUDA sources of routed experts of many tokens, on a processor, against the oracle."""

import functools

import pytest
import torch

from tests.launches_on_cpu import QUICK_TO_RUN
from tests.ops.test_moe_experts_tiles_on_cpu import make_case
from tiercel.kernels.moe import moe_experts_gemm as kernel
from tiercel.ops.moe_experts import tile_planes
from tiercel.reference import moe_experts as oracle

LEVEL = QUICK_TO_RUN
CPU = torch.device("cpu")
LIMIT = 1.25
TOLERANCE = 8e-3  # weights and h are rounded to 8 bits
SMALL = kernel.GemmConfig(tokens=32, groups=1, units=2, quarters=3, batch=1)
TALL = kernel.GemmConfig(tokens=16, groups=3, units=1, quarters=9, batch=2)
WIDE = kernel.GemmConfig(tokens=48, groups=2, units=1, quarters=6, batch=1)
WIDEST = kernel.GemmConfig(tokens=128, groups=2, units=1, quarters=4, batch=2)


def run(products, x, ids, weights, stacks, configs, limit=LIMIT, dtype=torch.float32):
    """The kernels' result; nothing beside it is written."""
    experts, inter, hidden = stacks[0].shape
    made = kernel.GemmWorkspace.make(ids.numel(), experts, (hidden, inter), configs[0].tokens, CPU)
    for tensor in (made.image, made.h, made.y):
        tensor.fill_(float("nan"))
    for tensor in (made.tiles, made.pairs, made.places):
        tensor.fill_(0x7F7F7F7F)
    wide = torch.full((x.shape[0] + 2, hidden), float("nan"), dtype=dtype)
    out = wide[1:-1]
    launch = functools.partial(
        kernel.launch_moe_experts_gemm,
        out, x, ids, weights, [tile_planes(stack) for stack in stacks], limit, made, configs,
        is_dependent=True,
    )  # fmt: skip
    products.build_all_of(launch)
    products.late.extend((x, ids, weights))  # the kernel ahead writes them
    launch()
    found = out.clone()
    out.fill_(float("nan"))
    assert wide.isnan().all()
    return found


def check(out, x, ids, weights, decoded, limit=LIMIT):
    expected = oracle.moe_experts(x, ids, weights, tuple(decoded), limit)
    error = ((out.double() - expected).norm() / expected.norm()).item()
    assert error <= TOLERANCE


# Types of gate and up, and of down; hidden and inter.
CASES = [("MXFP4", "MXFP4", 288, 160), ("NVFP4", "Q2_K", 336, 256), ("Q2_K", "NVFP4", 512, 48)]
CASES += [("IQ2_XXS", "Q3_K", 256, 256), ("Q4_K", "Q6_K", 256, 256), ("Q6_K", "Q4_K", 256, 256)]
CASES += [("Q3_K", "IQ2_XXS", 256, 256), ("Q5_K", "Q8_0", 256, 288), ("Q8_0", "Q5_K", 288, 256)]
# Of each type one case by default.
RARE = {
    ("MXFP4", "MXFP4"),
    ("Q2_K", "NVFP4"),
    ("Q6_K", "Q4_K"),
    ("Q3_K", "IQ2_XXS"),
    ("Q8_0", "Q5_K"),
}
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case[:2] in RARE)) for case in CASES]


@pytest.mark.parametrize(("gate", "down", "hidden", "inter"), CASES)
def test_every_type_matches_oracle(gate, down, hidden, inter, products):
    """In either form of operands, of which an expert without tokens has none."""
    torch.manual_seed(3)
    stacks, decoded = make_case((gate, down), 4, hidden, inter)
    x = (torch.randn(11, hidden) / decoded[0].std() / hidden**0.5).bfloat16()
    ids = torch.stack([torch.tensor([1, 3, 2])[torch.randperm(3)[:2]] for _ in range(11)])
    weights = (torch.rand(11, 2) + 0.1) / decoded[2].std()
    config = SMALL if gate == "NVFP4" or down == "NVFP4" else TALL
    check(run(products, x, ids, weights, stacks, (config, config)), x, ids, weights, decoded)


# Pairs of each expert: tiles of each number of tokens, several of an expert, and no token.
COUNTS = (3, 17, 0, 40, 62, 70, 90, 97, 120, 141)
HIDDEN, INTER, TOPK = 288, 160, 2


@pytest.fixture(scope="module")
def many():
    """Inputs of many tokens: experts in any order, also twice for a token."""
    torch.manual_seed(5)
    stacks, decoded = make_case(("MXFP4", "MXFP4"), len(COUNTS), HIDDEN, INTER)
    ids = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    ids = ids[torch.randperm(len(ids))].view(-1, TOPK)
    x = (torch.randn(len(ids), HIDDEN) / decoded[0].std() / HIDDEN**0.5).bfloat16()
    weights = (torch.rand(len(ids), TOPK) + 0.1) / decoded[2].std()
    return (x, ids, weights, stacks), decoded


@pytest.mark.parametrize(
    "config", [WIDE, pytest.param(WIDEST, marks=pytest.mark.slow)], ids=lambda c: c.tokens
)
def test_any_number_of_tokens_and_any_tile_give_the_same_bits(config, many, products):
    (x, ids, weights, stacks), decoded = many
    out = run(products, x, ids, weights, stacks, (config, config))
    check(out, x, ids, weights, decoded)
    few = [number[70:93].contiguous() for number in (x, ids, weights)]
    for products.seed, config in enumerate((SMALL, TALL), 1):
        part = run(products, *few, stacks, (config, config))
        assert torch.equal(part, out[70:93])


def test_without_a_clamp_and_rounded_once(many, products):
    (x, ids, weights, stacks), decoded = many
    few = [number[:9].contiguous() for number in (3 * x, ids, weights)]
    exact = run(products, *few, stacks, (TALL, TALL), limit=None)
    check(exact, *few, decoded, None)
    for dtype in (torch.float16, torch.bfloat16):
        out = run(products, *few, stacks, (TALL, TALL), limit=None, dtype=dtype)
        assert torch.equal(out, exact.to(dtype))


def test_tiles_hold_each_pair_once(many, products):
    """Of an expert as few as hold its pairs, of about equal size, and none overlaps another."""
    (x, ids, weights, stacks), _ = many
    num_pairs, experts = ids.numel(), len(COUNTS)
    made = kernel.GemmWorkspace.make(num_pairs, experts, (HIDDEN, INTER), WIDE.tokens, CPU)
    kernel.launch_moe_experts_gemm(
        torch.empty(x.shape), x, ids, weights, [tile_planes(stack) for stack in stacks], LIMIT,
        made, (WIDE, WIDE), is_dependent=False,
    )  # fmt: skip
    tiles = made.tiles[: made.tiles[-1, 0]].tolist()
    found, next_row = [], 0
    for expert, first, size, tokens in tiles:
        if size:
            assert first == next_row
            assert size <= tokens
            assert tokens % kernel.TOKEN_STEP == 0
            pairs = made.pairs[first : first + size].tolist()
            assert all(ids.flatten()[pair] == expert for pair in pairs)
            found += pairs
            next_row += tokens
    assert sorted(found) == list(range(num_pairs))
    assert [size for expert, _, size, _ in tiles if expert == 7] == [33, 33, 31]
    assert next_row <= made.pairs.shape[0]
