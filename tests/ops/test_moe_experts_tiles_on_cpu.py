"""The CUDA source of routed experts in layout TILES, on a processor, against the oracle."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.launches_on_cpu import QUICK_TO_COMPILE, QUICK_TO_RUN
from tests.ops.test_moe_experts import make_ggml_stack
from tiercel.kernels.moe import moe_experts_tiles as kernel
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.moe_experts import tile_planes
from tiercel.ops.moe_experts_torch import make_tiles, most_tiles
from tiercel.quant_tiles import tile_stack, untile_stack
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import moe_experts as oracle

CPU = torch.device("cpu")
LIMIT = 1.25
TOLERANCE = 6e-3  # h is rounded to 8 bits


def make_stack(kind, num_experts, out, cols):
    if kind in ("MXFP4", "NVFP4"):
        dense = torch.randn(num_experts, out, cols) * 2 / cols**0.5
        dense[-1] *= 3  # scales of their own for each matrix
        return block_quantize(dense, QuantType[kind])
    return make_ggml_stack(kind, num_experts, out, cols, CPU)


def make_case(kinds, num_experts, hidden, inter):
    """Stacks in layout TILES, and decoded."""
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    stored = [
        make_stack(kind, num_experts, *shape)
        for kind, shape in zip((kinds[0], *kinds), shapes, strict=True)
    ]
    decoded = [dequantize(stack, torch.float32) for stack in stored]
    return [tile_stack(stack) for stack in stored], decoded


def shape_of(stacks, topk):
    experts, inter, hidden = stacks[0].shape
    return kernel.ExpertsShape(
        experts, hidden, inter, topk, stacks[0].qtype.name, stacks[2].qtype.name
    )


def run(
    products, x, ids, weights, stacks, config, ctas=3, is_folded=True, limit=LIMIT, addend=None
):
    """The kernel's result; nothing beside it is written, and the tickets are zeros again."""
    num_tokens, topk = ids.shape
    shape = shape_of(stacks, topk)
    assert kernel.smem_bytes(shape, config) <= kernel.H200.smem_bytes
    wide = torch.full((num_tokens + 2, shape.hidden), float("nan"))
    out = wide[1:-1]
    h = torch.full((num_tokens * topk, shape.inter), float("nan"), dtype=torch.bfloat16)
    y = torch.full((num_tokens * topk, shape.hidden), float("nan"))
    num_chunks = kernel.MOST_FOLDED
    chunks = None
    if not is_folded:
        num_chunks = most_tiles(ids.numel(), shape.experts, config.columns)
        tiles = make_tiles(ids, shape.experts, config.columns, num_chunks)
        chunks = (tiles.experts, tiles.pairs)
    tickets = torch.zeros(kernel.num_tickets(num_chunks), dtype=torch.int32)
    products.late.append(x)  # the kernel ahead writes it
    products.late.append(weights)
    if is_folded:
        products.late.append(ids)
    kernel.launch_moe_experts_tiles(
        out, x, ids, weights, chunks, [tile_planes(stack) for stack in stacks], limit,
        (h, y, tickets), config,
        num_sms=ctas, is_dependent=True, addend=addend,
    )  # fmt: skip
    found = out.clone()
    out.fill_(float("nan"))
    assert wide.isnan().all()
    assert not tickets.any()
    return found


def check(out, x, ids, weights, decoded, limit=LIMIT):
    expected = oracle.moe_experts(x, ids, weights, tuple(decoded), limit)
    error = ((out.double() - expected).norm() / expected.norm()).item()
    assert error <= TOLERANCE


CASES = [("MXFP4", "MXFP4", 288, 160), ("NVFP4", "NVFP4", 336, 48), ("Q2_K", "Q2_K", 512, 256)]
CASES += [("IQ2_XXS", "Q3_K", 256, 512), ("Q4_K", "Q6_K", 512, 256), ("Q5_K", "Q8_0", 256, 256)]


@pytest.mark.parametrize(("gate", "down", "hidden", "inter"), CASES)
def test_every_type_matches_oracle(gate, down, hidden, inter, products):
    stacks, decoded = make_case((gate, down), 4, hidden, inter)
    x = (torch.randn(5, hidden) / decoded[0].std() / hidden**0.5).bfloat16()
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(5)])
    weights = (torch.rand(5, 2) + 0.1) / decoded[2].std()
    config = kernel.TilesConfig(4, 4, 2, 2)
    out = run(products, x, ids, weights, stacks, config)
    check(out, x, ids, weights, decoded)


@pytest.mark.parametrize("kind", kernel.KINDS)
def test_tiles_are_a_permutation_of_the_file(kind):
    odd = 288 if kind in ("MXFP4", "NVFP4", "Q8_0") else 256
    for out, cols in ((32, 512), (35, odd)):
        stack = make_stack(kind, 3, out, cols)
        kept = {name: plane.clone() for name, plane in stack.planes.items()}
        tiles = tile_stack(stack)
        assert tiles.layout is Layout.TILES
        back = untile_stack(tiles)
        back.check("test")
        assert back.layout is not Layout.TILES
        for name, plane in kept.items():
            assert torch.equal(back.planes[name].view(torch.uint8), plane.view(torch.uint8))


# Columns of several units; rows and columns that fill up no tile.
HIDDEN, INTER, EXPERTS, TOPK = 1056, 544, 5, 3
CONFIGS = [kernel.TilesConfig(*config) for config in [(1, 5, 3, 2), (4, 10, 1, 1), (8, 5, 2, 2)]]
CONFIGS += [kernel.TilesConfig(16, 10, 2, 1)]


@pytest.fixture(scope="module")
def wide_case():
    torch.manual_seed(5)
    stacks, decoded = make_case(("NVFP4", "MXFP4"), EXPERTS, HIDDEN, INTER)
    return stacks, decoded


def make_routes(kind, num_tokens):
    torch.manual_seed(num_tokens)
    if kind == "distinct":
        return torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(num_tokens)])
    if kind == "one":
        return torch.full((num_tokens, TOPK), 3)
    ids = torch.randint(0, 2, (num_tokens, TOPK))  # repeated, and three experts are empty
    return ids * 4


ROUTES = [("distinct", 1, 0), ("repeated", 2, 2), ("distinct", 7, 1), ("one", 16, 3)]
ROUTES += [("distinct", 17, 2), pytest.param("repeated", 40, 3, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def _every_launch(built_products, wide_case):
    shape = shape_of(wide_case[0], TOPK)
    built_products.level = QUICK_TO_RUN
    built_products.build(
        [
            kernel.cuda_source(shape, config, torch.float32, (1, 0), is_folded=is_folded)
            for config in CONFIGS
            for is_folded in (True, False)
        ]
    )
    built_products.level = QUICK_TO_COMPILE


@pytest.mark.usefixtures("_every_launch")
@pytest.mark.parametrize(("kind", "num_tokens", "number"), ROUTES, ids=str)
def test_any_distribution_of_tokens(kind, num_tokens, number, wide_case, products):
    """And the same bits from another launch, from sorted pairs, and of fewer tokens."""
    stacks, decoded = wide_case
    x = torch.randn(num_tokens, HIDDEN).bfloat16()
    ids = make_routes(kind, num_tokens)
    weights = torch.rand(num_tokens, TOPK) + 0.1
    products.seed = num_tokens
    out = run(products, x, ids, weights, stacks, CONFIGS[number], ctas=2)
    check(out, x, ids, weights, decoded)
    other = run(
        products,
        x,
        ids,
        weights,
        stacks,
        CONFIGS[number - 1],
        ctas=5,
        is_folded=num_tokens % 2 == 0,
    )
    assert torch.equal(other, out)
    addend = torch.randn(num_tokens, HIDDEN)
    added = run(products, x, ids, weights, stacks, CONFIGS[number], addend=addend)
    assert torch.equal(added, out + addend)
    few = max(1, num_tokens // 2)
    part = run(products, x[:few], ids[:few], weights[:few], stacks, CONFIGS[0], limit=LIMIT)
    assert torch.equal(part, out[:few])


@pytest.mark.usefixtures("_every_launch")
def test_without_a_clamp(wide_case, products):
    stacks, decoded = wide_case
    x, ids = 3 * torch.randn(2, HIDDEN).bfloat16(), make_routes("distinct", 2)
    weights = torch.rand(2, TOPK) + 0.1
    out = run(products, x, ids, weights, stacks, CONFIGS[1], limit=None)
    check(out, x, ids, weights, decoded, None)


# Warps that share an item: as many as parts, or one for one or two units; 4 may be left over.
SINGLE = [pytest.param("Q2_K", "Q2_K", 256, 2048, 5, 16, (1, 8), marks=pytest.mark.slow)]
SINGLE += [("Q2_K", "MXFP4", 4096, 32, 2, 8, (8, 1))]
SINGLE += [("NVFP4", "MXFP4", 544, 96, 4, 6, (3, 1)), ("Q4_K", "Q3_K", 256, 2048, 3, 12, (1, 8))]


@pytest.mark.parametrize(("gate", "down", "hidden", "inter", "topk", "warps", "single"), SINGLE)
def test_a_single_token_has_the_bits_of_many(
    gate, down, hidden, inter, topk, warps, single, products
):
    stacks, decoded = make_case((gate, down), 6, hidden, inter)
    x = (torch.randn(3, hidden) / decoded[0].std() / hidden**0.5).bfloat16()
    ids = torch.stack([torch.randperm(6)[:topk] for _ in range(3)])
    ids[2, 1] = ids[2, 0]  # an expert twice
    weights = (torch.rand(3, topk) + 0.1) / decoded[2].std()
    many = run(products, x, ids, weights, stacks, kernel.TilesConfig(4, warps, 2, 1))
    check(many, x, ids, weights, decoded)
    for row, ctas in itertools.product((0, 2), (1, 3)):
        one = slice(row, row + 1)
        config = kernel.TilesConfig(1, warps, 2, 2, single=single)
        if ctas > 1:
            config = replace(config, stages=3, has_counter=True)
        products.seed = ctas
        addend = torch.randn(1, hidden)
        out = run(
            products, x[one], ids[one], weights[one], stacks, config, ctas=ctas, addend=addend
        )
        assert torch.equal(out, many[one] + addend)
