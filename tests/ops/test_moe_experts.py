"""The routed experts of DeepSeek-V4: reference, oracle, formats, and any distribution of tokens."""

import pytest
import torch

from tests.dsv4_cases import FORMATS, captured, case, poison, strided
from tests.packed_weights import make_weight
from tiercel.errors import ArgumentError
from tiercel.ops import moe_experts_torch as torch_ops
from tiercel.ops.block_quantize import block_quantize, round_fp8_g128
from tiercel.ops.dequantize import dequantize
from tiercel.ops.moe_experts import Experts, clamped_swiglu, moe_experts
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import moe_experts as oracle

# Tokens, experts, topk, hidden, inter: pairs below and above each limit of the tiles' table.
SHAPES = [(1, 6, 2, 160, 64), (7, 5, 3, 96, 32), (70, 9, 2, 33, 7), (800, 4, 3, 24, 12)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5}
LIMIT = 1.25  # as small as the activations, so that it clamps


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    """On a GPU too: kernels have their own file."""
    monkeypatch.setenv("TIERCEL_MOE_KERNEL", "0")


def make_stacks(num_experts, hidden, inter, device):
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    return [
        torch.randn(num_experts, *shape, device=device) * 2 / shape[1] ** 0.5 for shape in shapes
    ]


def make_routes(num_tokens, num_experts, topk, device):
    ids = torch.stack([torch.randperm(num_experts)[:topk] for _ in range(num_tokens)])
    return ids.to(device), torch.rand(num_tokens, topk, device=device) + 0.1


def check(out, x, ids, weights, stacks, limit=LIMIT):
    cpu = [tensor.cpu() for tensor in (x, ids, weights)]
    expected = oracle.moe_experts(*cpu, tuple(stack.cpu() for stack in stacks), limit)
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=2 * tolerance)


def test_swiglu_matches_the_reference_and_oracle(device):
    data = case("swiglu", device)
    out = clamped_swiglu(strided(data["gate"]), data["up"], 2.0)
    torch.testing.assert_close(out, data["out_limit2"], rtol=0, atol=1e-5)
    gate, up = 5 * torch.randn(2, 7, 13, device=device)
    for limit in (None, 0.5, 3.0):
        expected = oracle.swiglu(gate.cpu(), up.cpu(), limit)
        out = clamped_swiglu(gate, up, limit).double().cpu()
        torch.testing.assert_close(out, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_oracle(shape, dtype, device):
    num_tokens, num_experts, topk, hidden, inter = shape
    x = strided(torch.randn(num_tokens, hidden, device=device).to(dtype))
    ids, weights = make_routes(num_tokens, num_experts, topk, device)
    stacks = make_stacks(num_experts, hidden, inter, device)
    poison(device)
    out = moe_experts(x, ids, weights, Experts(*stacks), limit=LIMIT)
    assert out.is_contiguous()
    assert out.dtype == dtype
    check(out, x, ids, weights, stacks)


@pytest.mark.parametrize("num_tokens", [1, 20, 90])
def test_an_expert_with_0_1_or_all_tokens(num_tokens, device):
    x = torch.randn(num_tokens, 24, device=device)
    stacks = make_stacks(5, 24, 12, device)
    stacks[0][3] = float("nan")  # an expert without tokens is never in the result
    weights = torch.rand(num_tokens, 2, device=device)
    every = torch.tensor([[4, 0]], device=device).repeat(num_tokens, 1)
    one = every.clone()
    one[-1, 1] = 2
    for ids in (every, one, torch.full_like(every, 4), torch.zeros_like(every)):
        poison(device)
        check(moe_experts(x, ids, weights, Experts(*stacks), limit=LIMIT), x, ids, weights, stacks)


@pytest.mark.parametrize("qtype", FORMATS, ids=lambda q: q.name)
def test_blocks_are_their_decoded_weights(qtype, device):
    x = torch.randn(9, 96, device=device)
    ids, weights = make_routes(9, 6, 2, device)
    stacks = [stack * 3 for stack in make_stacks(6, 96, 64, device)]
    stacks[1][2] *= 30  # scales of their own for each matrix
    blocks = [block_quantize(stack, qtype) for stack in stacks]
    decoded = [dequantize(stack, torch.float32) for stack in blocks]
    out = moe_experts(x, ids, weights, Experts(*blocks), limit=LIMIT)
    dense = moe_experts(x, ids, weights, Experts(*decoded), limit=LIMIT)
    assert torch.equal(out, dense)
    check(out / 100, x, ids, weights / 100, decoded)
    mixed = Experts(blocks[0], decoded[1], blocks[2])
    assert torch.equal(moe_experts(x, ids, weights, mixed, limit=LIMIT), dense)


def make_ggml_stack(name, num_experts, out, cols, device):
    matrix = make_weight(QuantType[name], num_experts * out, cols, device, seed=out)
    data = matrix.planes["data"].unflatten(0, (num_experts, out))
    return QuantTensor(matrix.qtype, Layout.FILE, (num_experts, out, cols), {"data": data})


@pytest.mark.parametrize("names", [("IQ2_XXS", "Q4_K"), ("Q8_0", "Q6_K"), ("MXFP4", "MXFP4")])
def test_ggml_stacks(names, device):
    """Types of their own for w1 and w3, and w2."""
    stacks = [make_ggml_stack(names[0], 5, 512, 256, device) for _ in range(2)]
    stacks.append(make_ggml_stack(names[1], 5, 256, 512, device))
    decoded = [dequantize(stack, torch.float32) for stack in stacks]
    size = [stack.std() for stack in decoded]
    x = torch.randn(6, 256, device=device) / size[0] / 16
    ids, weights = make_routes(6, 5, 2, device)
    weights = weights / size[2]
    poison(device)
    out = moe_experts(x, ids, weights, Experts(*stacks), limit=LIMIT)
    check(out, x, ids, weights, decoded)


def test_float_stacks_of_the_file(device):
    x = torch.randn(6, 24, device=device)
    ids, weights = make_routes(6, 5, 2, device)
    stacks = [stack.bfloat16() for stack in make_stacks(5, 24, 12, device)]
    stored = [
        QuantTensor(QuantType.BF16, Layout.FILE, tuple(s.shape), {"data": s.view(torch.uint8)})
        for s in stacks
    ]
    expected = moe_experts(x, ids, weights, Experts(*stacks), limit=LIMIT)
    assert torch.equal(moe_experts(x, ids, weights, Experts(*stored), limit=LIMIT), expected)


def test_small_workspace_gives_the_same(monkeypatch, device):
    x = torch.randn(40, 24, device=device)
    ids, weights = make_routes(40, 7, 3, device)
    experts = Experts(*make_stacks(7, 24, 12, device))
    whole = moe_experts(x, ids, weights, experts, limit=None)
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", 1)  # a tile at a time
    out = moe_experts(x, ids, weights, experts, limit=None)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)


def test_native_numerics_round_both_inputs(device):
    x = torch.randn(3, 160, device=device)
    ids, weights = make_routes(3, 4, 1, device)
    w1, w3, w2 = make_stacks(4, 160, 64, device)
    out = moe_experts(x, ids, weights, Experts(w1, w3, w2), limit=LIMIT, rounds_activations=True)
    for t in range(3):
        expert = ids[t, 0]
        token = round_fp8_g128(x[t : t + 1])
        h = clamped_swiglu(token @ w1[expert].t(), token @ w3[expert].t(), LIMIT) * weights[t]
        expected = round_fp8_g128(h) @ w2[expert].t()
        torch.testing.assert_close(out[t], expected[0], rtol=1e-4, atol=1e-4)


def test_tiles_suffice_for_any_routing():
    for num_pairs in (1, 2, 15, 16, 17, 100, 2048, 2049, 5000):
        for num_experts in (1, 3, 40, 384):
            rows, num_tiles = torch_ops.select_tiles(num_pairs, num_experts)
            used = min(num_experts, num_pairs)  # the worst: all experts but one have one pair
            worst = used - 1 + -(-(num_pairs - used + 1) // rows)
            assert worst <= num_tiles <= num_pairs


def test_each_pair_is_in_one_tile_of_its_expert(device):
    ids = torch.randint(0, 7, (50, 3), device=device)
    tiles = torch_ops.make_tiles(ids, 7, *torch_ops.select_tiles(ids.numel(), 7))
    real = tiles.pairs < 150
    assert torch.equal(tiles.pairs[real].sort().values, torch.arange(150, device=device))
    experts = tiles.experts[:, None].expand_as(tiles.pairs)[real]
    assert torch.equal(experts, ids.flatten()[tiles.pairs[real]])


def test_no_tokens(device):
    experts = Experts(*make_stacks(3, 24, 12, device))
    ids = torch.empty(0, 2, dtype=torch.int64, device=device)
    empty = torch.empty(0, 24, device=device)
    assert moe_experts(empty, ids, ids.float(), experts, limit=1.0).shape == (0, 24)


def test_op_names_the_bad_argument(device):
    x = torch.randn(2, 32, device=device)
    ids, weights = make_routes(2, 3, 2, device)
    stacks = make_stacks(3, 32, 64, device)
    experts = Experts(*stacks)
    with pytest.raises(ArgumentError, match=r"x is \(32,\)"):
        moe_experts(x[0], ids, weights, experts, limit=1.0)
    with pytest.raises(ArgumentError, match=r"ids are \(2, 2\) torch.int32"):
        moe_experts(x, ids.int(), weights, experts, limit=1.0)
    with pytest.raises(ArgumentError, match=r"weights \(2, 1\) for 2 tokens"):
        moe_experts(x, ids, weights[:, :1], experts, limit=1.0)
    with pytest.raises(ArgumentError, match=r"limit=0\.0"):
        moe_experts(x, ids, weights, experts, limit=0.0)
    with pytest.raises(ArgumentError, match=r"w1, w3 and w2 are \(\(3, 64, 32\)") as error:
        moe_experts(x, ids, weights, Experts(stacks[0], stacks[1], stacks[1]), limit=1.0)
    assert "(experts, hidden, inter)" in error.value.hint
    blocks = [block_quantize(stack, QuantType.MXFP4) for stack in stacks]
    blocks[1].planes["scale"] = blocks[1].planes["scale"][:2]
    with pytest.raises(ArgumentError, match=r"moe_experts: the scales of MXFP4 \(3, 64, 32\)"):
        moe_experts(x, ids, weights, Experts(*blocks), limit=1.0)
    with pytest.raises(ArgumentError, match=r"gate is \(2, 32\) but up is \(2, 31\)"):
        clamped_swiglu(x, x[:, :31], 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 50])
def test_replay_equals_eager(num_tokens, device):
    x = torch.randn(num_tokens, 96, device=device).bfloat16()
    ids, weights = make_routes(num_tokens, 6, 2, device)
    stacks = [block_quantize(s, QuantType.MXFP4) for s in make_stacks(6, 96, 64, device)]

    def run():
        return moe_experts(x, ids, weights, Experts(*stacks), limit=LIMIT)

    assert torch.equal(captured(run), run())


def test_an_addend_is_added_to_a_float32_sum():
    experts = Experts(torch.randn(3, 8, 16), torch.randn(3, 8, 16), torch.randn(3, 16, 8))
    x, ids = torch.randn(2, 16), torch.tensor([[0, 2], [1, 0]])
    given = (x, ids, torch.rand(2, 2), experts)
    addend = torch.randn(2, 16)
    both = moe_experts(*given, limit=None, addend=addend)
    assert torch.equal(both, moe_experts(*given, limit=None) + addend)
    with pytest.raises(ArgumentError, match=r"addend is \(2, 15\)"):
        moe_experts(*given, limit=None, addend=addend[:, 1:])
    with pytest.raises(ArgumentError, match="bfloat16"):
        moe_experts(*given, limit=None, addend=addend, out_dtype=torch.bfloat16)
