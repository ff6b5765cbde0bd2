"""When prompts take the grouped product, that it compiles as designed, and the op on a GPU."""

import dataclasses
import math
import re

import pytest
import torch

from tests.dsv4_cases import captured, poison
from tests.kernels.cubin_digests import moe_gemm_sources, moe_token_sources
from tests.kernels.test_rtc import ask, check_no_spills, compile_here, registers_of
from tests.ops.test_moe_experts import make_routes
from tests.ops.test_moe_experts_tiles import FLASH, PRO, copied, make_experts
from tiercel.kernels.moe import moe_experts_gemm as kernel
from tiercel.kernels.moe.moe_experts_tiles import KINDS
from tiercel.ops.moe_experts import moe_experts, rest_experts
from tiercel.reference import moe_experts as oracle

LIMIT = 1.25
TOLERANCE = 8e-3  # weights and h are rounded to 8 bits


def test_launches_fit():
    for kind in KINDS:
        config = kernel.select_gemm(kind)
        assert config.smem_bytes(kind) <= 226 << 10
        assert config.quarters >= 3  # room for results, too
        assert config.tokens % kernel.TOKEN_STEP == 0


def test_refusals():
    def refusal(shape=FLASH, num_pairs=4096, capability=(9, 0)):
        return kernel.gemm_refusal(shape, num_pairs, capability)

    assert refusal() == "" == refusal(PRO)
    few = kernel.LEAST_PAIRS * FLASH.experts
    assert refusal(num_pairs=few) == ""
    assert "fewer than" in refusal(num_pairs=few - 1)
    assert "10.0, not 9.0" in refusal(capability=(10, 0))
    assert "more than 2048" in refusal(dataclasses.replace(FLASH, experts=2049), 1 << 20)
    assert "shared memory" in refusal(dataclasses.replace(FLASH, hidden=1 << 15))


@pytest.mark.parametrize("num_pairs", [1, 5, 24, 1000, 24576])
def test_tiles_and_rows_suffice_for_any_routing(num_pairs):
    for counts in ([num_pairs], [1] * num_pairs, [num_pairs - num_pairs // 3, num_pairs // 3]):
        experts = max(256, len(counts))
        shares = [math.ceil(count / 128) for count in counts]
        sizes = [
            math.ceil(math.ceil(count / max(tiles, 1)) / kernel.TOKEN_STEP) * kernel.TOKEN_STEP
            for count, tiles in zip(counts, shares, strict=True)
        ]
        rows = sum(tiles * size for tiles, size in zip(shares, sizes, strict=True))
        assert sum(shares) <= kernel.most_gemm_tiles(num_pairs, experts, 128)
        assert rows <= kernel.most_rows(num_pairs, experts, 128)


# Of 10 s each; by default that with the most registers, and of what is beside them one of a kind.
GEMM_SOURCES = [
    pytest.param(source, marks=[pytest.mark.slow] * (number != 15))
    for number, source in enumerate(moe_gemm_sources())
]
OTHER_SOURCES = [
    pytest.param(source, marks=[pytest.mark.slow] * (number not in (0, 1, 10)))
    for number, source in enumerate(moe_token_sources())
]


@pytest.mark.parametrize("source", GEMM_SOURCES, ids=str)
def test_products_compile_as_designed(source, tmp_path):
    """Nothing in local memory, and products that do not wait for each other."""
    cubin = compile_here(source, tmp_path)
    assert registers_of(cubin, tmp_path) <= 168  # of three warps in a part of an SM
    text = ask(cubin, tmp_path, "nvdisasm", "-c")
    products = [line for line in text.splitlines() if "HGMMA" in line]
    assert len(products) == 32 * 8  # of a unit, for each number of tokens
    in_batch = 4 * dict(source.macros)["BATCH"]
    # Else ptxas serialised them:
    assert sum("gsb0" in line for line in products) == len(products) / in_batch
    assert not re.findall(r"\b(?:LDL|STL)", text)
    assert "UBLKCP" in text
    assert "USETMAXREG" in text


@pytest.mark.parametrize("source", OTHER_SOURCES, ids=str)
def test_other_kernels_compile_without_spills(source, tmp_path):
    check_no_spills(source, tmp_path)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_op_takes_the_product_and_replays(kind, device, monkeypatch):
    if torch.cuda.get_device_capability(device) != kernel.CAPABILITY:
        pytest.skip("needs Hopper")
    experts, decoded = make_experts(kind, 7, 512, 256, device)
    size = decoded[0].std() * 512**0.5
    made = rest_experts(copied(experts), torch.bfloat16)
    calls = []
    launch = kernel.launch_moe_experts_gemm

    def counted(*arguments, **options):
        calls.append(arguments)
        launch(*arguments, **options)

    monkeypatch.setattr(kernel, "launch_moe_experts_gemm", counted)
    for num_tokens in (1, 5, 40, 300, 1500):
        x = (torch.randn(num_tokens, 512, device=device) / size).bfloat16()
        ids, weights = make_routes(num_tokens, 7, 3, device)
        weights = weights / decoded[2].std()

        def call(x=x, ids=ids, weights=weights):
            return moe_experts(x, ids, weights, made, limit=LIMIT, out_dtype=torch.float32)

        poison(device)
        calls.clear()
        out = call()
        assert bool(calls) is (3 * num_tokens >= 7 * kernel.LEAST_PAIRS)
        on_cpu = [tensor.cpu() for tensor in (x, ids, weights)]
        expected = oracle.moe_experts(*on_cpu, tuple(stack.cpu() for stack in decoded), LIMIT)
        error = ((out.double().cpu() - expected).norm() / expected.norm()).item()
        assert error <= TOLERANCE
        assert torch.equal(captured(call), out)
        if num_tokens > 40:
            part = call(x[:40], ids[:40], weights[:40])
            assert torch.equal(part, out[:40])
