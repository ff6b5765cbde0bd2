"""The kernels of routed experts, format by format, against the oracle of decoded weights."""

import pytest
import torch

from tests.dsv4_cases import captured, poison
from tests.ops.test_moe_experts import make_ggml_stack, make_routes, make_stacks
from tiercel.kernels.moe import moe_experts as kernels
from tiercel.ops import moe_experts_torch as torch_ops
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.moe_experts import MANY_ROWS, Experts, kernel_stacks, moe_experts, run_kernels
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import moe_experts as oracle

LIMIT = 1.25
# Relative to the largest value: h is rounded to 8 bits before w2. Triton's interpreter cuts where a
# GPU rounds.
IS_EXACT = torch.cuda.is_available()
TOLERANCE = {torch.bfloat16: 1e-2 if IS_EXACT else 2.5e-2, torch.float16: 2e-3}
BLOCK_TYPES = {"MXFP4": QuantType.MXFP4, "NVFP4": QuantType.NVFP4, "FP8": QuantType.FP8_BLOCK}


def make_case(kind, num_experts, hidden, inter, device):
    """Stacks as they are stored, and decoded."""
    if kind == "Q2_K":
        shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
        stored = [make_ggml_stack(kind, num_experts, *shape, device) for shape in shapes]
    else:
        dense = make_stacks(num_experts, hidden, inter, device)
        dense[1][-1] *= 30  # scales of their own for each matrix
        if kind in BLOCK_TYPES:
            stored = [block_quantize(stack, BLOCK_TYPES[kind]) for stack in dense]
        else:
            stored = [stack.to(kind) for stack in dense]
    decoded = [
        dequantize(stack, torch.float32) if isinstance(stack, QuantTensor) else stack.float()
        for stack in stored
    ]
    return Experts(*stored), decoded


def check(out, x, ids, weights, decoded, limit, tolerance):
    cpu = [tensor.cpu() for tensor in (x, ids, weights)]
    expected = oracle.moe_experts(*cpu, tuple(stack.cpu() for stack in decoded), limit)
    error = (out.double().cpu() - expected).abs().max() / expected.abs().max()
    assert error <= tolerance  # NaN fails


def run(x, ids, weights, experts, limit=LIMIT):
    out = torch.full(x.shape, float("nan"), dtype=torch.float32, device=x.device)
    poison(x.device)
    run_kernels(out, x, ids, weights, kernel_stacks(experts, x.dtype), limit)
    return out


@pytest.mark.parametrize("limit", [None, LIMIT], ids=["free", "clamped"])
@pytest.mark.parametrize(
    ("kind", "hidden", "inter"),
    [
        ("MXFP4", 160, 96),
        ("NVFP4", 176, 80),
        ("FP8", 200, 136),
        ("Q2_K", 256, 256),
        (torch.bfloat16, 72, 33),
        (torch.float32, 72, 33),
    ],
    ids=str,
)
def test_kernels_match_oracle(kind, hidden, inter, limit, device):
    experts, decoded = make_case(kind, 3, hidden, inter, device)
    size = decoded[0].std() * hidden**0.5
    x = (torch.randn(4, hidden, device=device) / size).bfloat16()
    ids, weights = make_routes(4, 3, 2, device)
    weights = weights / decoded[2].std()
    out = run(x, ids, weights, experts, limit)
    check(out, x, ids, weights, decoded, limit, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("kind", ["MXFP4", "FP8"])
def test_float16(kind, device):
    experts, decoded = make_case(kind, 3, 96, 64, device)
    x = torch.randn(5, 96, device=device).half()
    ids, weights = make_routes(5, 3, 2, device)
    out = run(x, ids, weights, experts)
    check(out, x, ids, weights, decoded, LIMIT, TOLERANCE[torch.float16])


def test_a_divisor_in_place_of_a_factor(device):
    experts, decoded = make_case("NVFP4", 3, 64, 32, device)

    def inverted(stack):
        planes = dict(stack.planes)
        planes["divisor"] = 1 / planes.pop("global_scale")
        return QuantTensor(stack.qtype, Layout.BLOCKS, stack.shape, planes)

    stacks = Experts(*(inverted(stack) for stack in (experts.w1, experts.w3, experts.w2)))
    x = torch.randn(4, 64, device=device).bfloat16()
    ids, weights = make_routes(4, 3, 2, device)
    out = run(x, ids, weights, stacks)
    check(out, x, ids, weights, decoded, LIMIT, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_experts_with_no_token_and_with_all(num_tokens, device):
    experts, decoded = make_case("MXFP4", 6, 64, 32, device)
    x = torch.randn(num_tokens, 64, device=device).bfloat16()
    weights = torch.rand(num_tokens, 2, device=device)
    every = torch.tensor([[4, 0]], device=device).repeat(num_tokens, 1)
    one = every.clone()
    one[-1, 1] = 2
    for ids in (every, one, torch.full_like(every, 5)):
        out = run(x, ids, weights, experts)
        check(out, x, ids, weights, decoded, LIMIT, TOLERANCE[torch.bfloat16])


def test_many_tokens_take_wide_tiles(device):
    experts, decoded = make_case("MXFP4", 2, 64, 32, device)
    x = torch.randn(40, 64, device=device).bfloat16()
    ids, weights = make_routes(40, 2, 2, device)
    assert torch_ops.most_tiles(ids.numel(), 2, MANY_ROWS) == 3
    out = run(x, ids, weights, experts)
    check(out, x, ids, weights, decoded, LIMIT, TOLERANCE[torch.bfloat16])


def test_a_token_has_the_same_bits_in_every_batch(device):
    experts, _ = make_case("MXFP4", 5, 96, 64, device)
    x = torch.randn(16, 96, device=device).bfloat16()
    ids, weights = make_routes(16, 5, 2, device)
    whole = run(x, ids, weights, experts)
    for count in (1, 5):
        part = run(x[:count], ids[:count], weights[:count], experts)
        assert torch.equal(part, whole[:count])


@pytest.mark.parametrize(
    ("num_pairs", "num_experts", "rows"), [(1, 1, 16), (37, 3, 16), (200, 7, 16)]
)
def test_tiles_are_those_of_pytorch(num_pairs, num_experts, rows, device):
    ids = torch.randint(0, num_experts, (num_pairs,), device=device)
    num_tiles = torch_ops.most_tiles(num_pairs, num_experts, rows)
    tiles = torch.full((num_tiles,), 99, device=device)
    pairs = torch.full((num_tiles, rows), 99, device=device)
    first = torch.empty(num_experts, dtype=torch.int32, device=device)
    kernels.launch_moe_tiles(tiles, pairs, ids, first)
    made = torch_ops.make_tiles(ids.unsqueeze(1), num_experts, rows, num_tiles)
    assert torch.equal(pairs, made.pairs)
    used = (made.pairs < num_pairs).any(1)
    assert torch.equal(tiles[used], made.experts[used])
    assert (tiles[~used] == -1).all()


def test_what_the_kernels_do_not_take(device):
    experts, decoded = make_case("MXFP4", 3, 64, 32, device)
    assert (
        kernel_stacks(Experts(experts.w1, decoded[1], experts.w2), torch.bfloat16) is None
    )  # a mix
    assert kernel_stacks(Experts(experts.w1, experts.w3, decoded[2]), torch.bfloat16) is not None
    q8 = [make_ggml_stack("Q8_0", 3, *shape, device) for shape in ((32, 64), (32, 64), (64, 32))]
    assert kernel_stacks(Experts(*q8), torch.bfloat16) is None
    odd = block_quantize(decoded[0], QuantType.FP8_BLOCK, block=(32, 32))
    assert kernel_stacks(Experts(odd, odd, experts.w2), torch.bfloat16) is None
    assert kernel_stacks(experts, torch.float32) is None
    nvfp4, _ = make_case("NVFP4", 3, 64, 32, device)
    assert kernel_stacks(nvfp4, torch.bfloat16) is not None
    assert kernel_stacks(nvfp4, torch.float16) is None


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [3, 400])
def test_the_op_takes_the_kernels_and_replays(num_tokens, device, monkeypatch):
    experts, decoded = make_case("MXFP4", 6, 128, 64, device)
    x = torch.randn(num_tokens, 128, device=device).bfloat16()
    ids, weights = make_routes(num_tokens, 6, 2, device)

    def call():
        return moe_experts(x, ids, weights, experts, limit=LIMIT, out_dtype=torch.float32)

    out = call()
    check(out, x, ids, weights, decoded, LIMIT, TOLERANCE[torch.bfloat16])
    assert torch.equal(captured(call), out)
    monkeypatch.setenv("TIERCEL_MOE_KERNEL", "0")
    slow = call()
    assert not torch.equal(slow, out)  # rounded elsewhere
    check(slow, x, ids, weights, decoded, LIMIT, 1e-5)
