"""The CUDA sources of routed experts of many tokens, on a processor, against the oracle."""

import pytest
import torch

from tests.ops.test_moe_experts_tiles_on_cpu import make_case
from tiercel.kernels.moe import moe_experts_gemm as kernel
from tiercel.ops.moe_experts import tile_planes
from tiercel.reference import moe_experts as oracle

CPU = torch.device("cpu")
LIMIT = 1.25
TOLERANCE = 8e-3  # weights and h are rounded to 8 bits


def run(products, x, ids, weights, stacks, configs, dtype=torch.float32):
    """The kernels' result; nothing beside it is written."""
    experts, inter, hidden = stacks[0].shape
    made = kernel.GemmWorkspace.make(ids.numel(), experts, (hidden, inter), configs[0].tokens, CPU)
    for tensor in (made.image, made.h, made.y):
        tensor.fill_(float("nan"))
    wide = torch.full((x.shape[0] + 2, hidden), float("nan"), dtype=dtype)
    out = wide[1:-1]
    products.late.extend((x, ids, weights))  # the kernel ahead writes them
    kernel.launch_moe_experts_gemm(
        out, x, ids, weights, [tile_planes(stack) for stack in stacks], LIMIT, made, configs,
        is_dependent=True,
    )  # fmt: skip
    found = out.clone()
    out.fill_(float("nan"))
    assert wide.isnan().all()
    return found


def check(out, x, ids, weights, decoded):
    expected = oracle.moe_experts(x, ids, weights, tuple(decoded), LIMIT)
    error = ((out.double() - expected).norm() / expected.norm()).item()
    assert error <= TOLERANCE


CONFIGS = [kernel.GemmConfig(32, 1, 2, 3, True), kernel.GemmConfig(16, 2, 1, 9, False)]
CASES = [("MXFP4", "MXFP4", 288, 160, 0), ("NVFP4", "Q2_K", 336, 256, 1)]


@pytest.mark.parametrize(("gate", "down", "hidden", "inter", "number"), CASES)
def test_every_type_matches_oracle(gate, down, hidden, inter, number, products):
    torch.manual_seed(3)
    stacks, decoded = make_case((gate, down), 4, hidden, inter)
    x = (torch.randn(23, hidden) / decoded[0].std() / hidden**0.5).bfloat16()
    ids = torch.stack([torch.tensor([1, 3, 2])[torch.randperm(3)[:2]] for _ in range(23)])
    weights = (torch.rand(23, 2) + 0.1) / decoded[2].std()
    out = run(products, x, ids, weights, stacks, (CONFIGS[number],) * 2)
    check(out, x, ids, weights, decoded)
