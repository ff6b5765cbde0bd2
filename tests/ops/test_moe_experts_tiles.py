"""Which experts rest in layout TILES, and that every path reads them; the kernel on a GPU."""

import dataclasses
import re

import pytest
import torch

from tests.dsv4_cases import captured, poison
from tests.kernels.cubin_digests import SMALL, moe_sources
from tests.kernels.test_rtc import ask, compile_here, registers_of
from tests.ops.test_moe_experts import make_ggml_stack, make_routes, make_stacks
from tiercel.errors import ArgumentError
from tiercel.kernels.moe import moe_experts_tiles as kernel
from tiercel.kernels.moe.stack_planes import StackPlanes
from tiercel.ops import moe_experts as op
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.moe_experts import Experts, moe_experts, rest_experts, tile_planes
from tiercel.quant_tiles import MOST_E8M0, TILE_TYPES, tile_stack, unit_bytes
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import moe_experts as oracle

LIMIT = 1.25
FLASH = kernel.ExpertsShape(256, 4096, 2048, 6, "Q2_K", "Q2_K")
PRO = kernel.ExpertsShape(384, 7168, 3072, 6, "MXFP4", "MXFP4")


def make_experts(kind, num_experts, hidden, inter, device):
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    if kind in ("MXFP4", "NVFP4"):
        dense = make_stacks(num_experts, hidden, inter, device)
        stored = [block_quantize(stack, QuantType[kind]) for stack in dense]
    else:
        stored = [make_ggml_stack(kind, num_experts, *shape, device) for shape in shapes]
    decoded = [dequantize(stack, torch.float32) for stack in stored]
    return Experts(*stored), decoded


def copied(experts):
    """Experts that may be rearranged."""
    stacks = (
        dataclasses.replace(stack, planes={name: p.clone() for name, p in stack.planes.items()})
        for stack in (experts.w1, experts.w3, experts.w2)
    )
    return Experts(*stacks)


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4", "Q2_K", "Q8_0"])
def test_without_the_kernel_the_bits_are_those_of_the_file(kind, device, monkeypatch):
    monkeypatch.setenv("TIERCEL_MOE_KERNEL", "0")
    experts, _ = make_experts(kind, 4, 256, 256, device)
    x = torch.randn(3, 256, device=device)
    ids, weights = make_routes(3, 4, 2, device)
    for rounds in (False, True):
        expected = moe_experts(x, ids, weights, experts, limit=LIMIT, rounds_activations=rounds)
        made = copied(experts)
        tiles = Experts(*(tile_stack(stack) for stack in (made.w1, made.w3, made.w2)))
        out = moe_experts(x, ids, weights, tiles, limit=LIMIT, rounds_activations=rounds)
        assert torch.equal(out, expected)


def test_whole_planes_are_rearranged_in_place():
    """So a model's largest weights are never there twice."""
    stack = make_ggml_stack("Q2_K", 3, 32, 512, torch.device("cpu"))
    assert tile_stack(stack).planes["data"].data_ptr() == stack.planes["data"].data_ptr()
    padded = make_ggml_stack("Q2_K", 3, 33, 512, torch.device("cpu"))
    before = padded.planes["data"].clone()
    tiles = tile_stack(padded)
    assert torch.equal(padded.planes["data"], before)
    assert tiles.planes["data"].shape == (3, 3, 2, 1344)
    view = dataclasses.replace(padded, planes={"data": before}).rows(0, 32)  # a part of each matrix
    assert torch.equal(tile_stack(view).planes["data"], tiles.planes["data"][:, :2])


def test_what_no_tiles_are_made_of():
    cpu = torch.device("cpu")
    for stack in (
        make_ggml_stack("Q4_0", 2, 16, 256, cpu),
        tile_stack(make_ggml_stack("Q2_K", 2, 16, 256, cpu)),
    ):
        with pytest.raises(ArgumentError, match="tile_stack"):
            tile_stack(stack)
    tiles = tile_stack(make_ggml_stack("Q2_K", 2, 16, 256, cpu))
    with pytest.raises(ArgumentError, match="cannot be cut"):
        tiles.rows(0, 16)


def test_types_of_the_kernel_are_those_of_the_layout():
    assert {kind.name for kind in TILE_TYPES} == set(kernel.KINDS)
    for kind in TILE_TYPES:
        planes = ("q", "scale") if kind.name in ("MXFP4", "NVFP4") else ("data",)
        assert kernel.UNITS[kind.name].num_bytes == sum(unit_bytes(kind, p) for p in planes)


def planes_of(kind, total=False):
    q = torch.empty((8, 1, 1, 16), dtype=torch.uint8)
    return StackPlanes(kind, q, q, torch.empty(8) if total else None)


def test_refusals():
    def refusal(stacks, shape=(4096, 2048), dtype=torch.bfloat16, capability=(9, 0), limits=SMALL):
        return kernel.tiles_refusal(stacks, shape, dtype, capability, limits)

    fp4, q2, nv = planes_of("MXFP4"), planes_of("Q2_K"), planes_of("NVFP4", total=True)
    assert refusal((fp4, fp4, q2)) == ""
    assert "alone" in refusal((fp4, fp4, None))
    assert "alone" in refusal((planes_of("FLOAT"), fp4, fp4))
    assert "different types" in refusal((fp4, q2, q2))
    assert "different types" in refusal((nv, planes_of("NVFP4"), nv))
    assert refusal((q2, q2, q2), dtype=torch.float16) == "activations are float16, not bfloat16"
    assert "7.5, below 8.0" in refusal((q2, q2, q2), capability=(7, 5))
    assert "multiples of 8" in refusal((q2, q2, q2), shape=(4096, 2044))
    assert "shared memory" in refusal((q2, q2, q2), shape=(1 << 20, 2048))


def test_a_cpu_and_a_toggle_keep_the_files_layout(monkeypatch):
    experts, _ = make_experts("MXFP4", 3, 64, 64, torch.device("cpu"))
    assert op.tiles_refusal(experts, torch.bfloat16) == "they are on a CPU"
    assert rest_experts(experts, torch.bfloat16) is experts
    monkeypatch.setattr(op, "tiles_refusal", lambda *_: "")
    for name in ("TIERCEL_MOE_TILES", "TIERCEL_MOE_KERNEL"):
        monkeypatch.setenv(name, "0")
        assert rest_experts(experts, torch.bfloat16) is experts
        monkeypatch.delenv(name)
    made = rest_experts(experts, torch.bfloat16)
    assert made.w1.layout is made.w3.layout is made.w2.layout is Layout.TILES
    assert made.tickets.numel() == kernel.num_tickets(kernel.MOST_FOLDED)
    assert not made.tickets.any()


@pytest.mark.parametrize("shape", [FLASH, PRO], ids=["flash", "pro"])
def test_launches_fit_and_parts_are_equal(shape):
    """Each number of tokens has a launch; the order of sums follows from the shape alone."""
    for kind in kernel.KINDS:
        of_kind = dataclasses.replace(shape, gate=kind, down=kind)
        for num_tokens in (1, 2, 5, 8, 64, 4096):
            for limits in (kernel.H200, SMALL):
                config = kernel.select_tiles(of_kind, num_tokens, limits)
                assert config is not None
                assert kernel.smem_bytes(of_kind, config) <= limits.smem_bytes
                assert config.columns < 2 * num_tokens
    for columns in (shape.hidden, shape.inter):
        units = kernel.num_units(columns)
        assert units % kernel.select_parts(units) == 0
    assert [kernel.select_parts(units) for units in (1, 2, 3, 4, 8, 16)] == [1, 2, 3, 4, 4, 8]


# By default the first type for one token, the second for many, and the last, of tensor cores.
SOURCES = [
    pytest.param(source, "sm_90a", marks=[pytest.mark.slow] * (number not in (0, 3, 16)))
    for number, source in enumerate(moe_sources())
]
SOURCES += [
    pytest.param(source, arch, marks=pytest.mark.slow)
    for source in moe_sources()
    for arch in ("sm_80", "sm_89", "sm_120a")
]


@pytest.mark.parametrize(("source", "arch"), SOURCES, ids=str)
def test_kernels_compile_without_spills(source, arch, tmp_path):
    cubin = compile_here(source, tmp_path, arch)
    text = ask(cubin, tmp_path, "nvdisasm", "-c")
    of_bytes = dict(source.macros)["GATE_TYPE"] == kernel.UNITS["Q2_K"].code
    assert ("IMMA.16832.U8.S8" if of_bytes else "HMMA.16816.F32.BF16") in text
    assert "LDGSTS.E.BYPASS.128" in text
    assert not re.findall(r"\b(?:LDL|STL)", text)
    macros = dict(source.macros)
    assert registers_of(cubin, tmp_path) * 32 * macros["WARPS"] * macros["CTAS"] <= 65536


# ---- on a GPU


def check(out, x, ids, weights, decoded):
    cpu = [tensor.cpu() for tensor in (x, ids, weights)]
    expected = oracle.moe_experts(*cpu, tuple(stack.cpu() for stack in decoded), LIMIT)
    error = ((out.double().cpu() - expected).norm() / expected.norm()).item()
    assert error <= 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", kernel.KINDS)
def test_the_op_takes_the_kernel_and_replays(kind, device, monkeypatch):
    monkeypatch.setenv("TIERCEL_MOE_GEMM", "0")
    experts, decoded = make_experts(kind, 7, 512, 256, device)
    size = decoded[0].std() * 512**0.5
    made = rest_experts(copied(experts), torch.bfloat16)
    assert made.tickets is not None
    for num_tokens in (1, 5, 40, 300):  # of the last the pairs are sorted by PyTorch
        x = (torch.randn(num_tokens, 512, device=device) / size).bfloat16()
        ids, weights = make_routes(num_tokens, 7, 3, device)
        weights = weights / decoded[2].std()

        def call(x=x, ids=ids, weights=weights):
            return moe_experts(x, ids, weights, made, limit=LIMIT, out_dtype=torch.float32)

        poison(device)
        out = call()
        check(out, x, ids, weights, decoded)
        assert torch.equal(captured(call), out)
        assert torch.equal(
            moe_experts(x[:1], ids[:1], weights[:1], made, limit=LIMIT, out_dtype=torch.float32),
            out[:1],
        )
        assert not made.tickets.any()


@pytest.mark.gpu
def test_replays_on_changing_inputs(device):
    """A kernel reads what the one ahead of it wrote, and its own counters start anew."""
    experts, _ = make_experts("MXFP4", 16, 512, 512, device)
    made = rest_experts(experts, torch.bfloat16)
    x = torch.randn(6, 512, device=device).bfloat16()
    ids, weights = make_routes(6, 16, 4, device)

    def chain():
        out = x
        for _ in range(4):
            out = moe_experts(out, ids, weights, made, limit=LIMIT)
        return out

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(200):
        x.normal_()
        ids.copy_(torch.rand(6, 16, device=device).argsort(1)[:, :4])
        graph.replay()
        assert torch.equal(out, chain())


@pytest.mark.gpu
def test_scales_beyond_the_operands_are_refused(device):
    experts, _ = make_experts("MXFP4", 3, 64, 64, device)
    assert op.tiles_refusal(experts, torch.bfloat16) == ""
    experts.w3.planes["scale"][1, 2, 1] = MOST_E8M0 + 1
    assert "scale" in op.tiles_refusal(experts, torch.bfloat16)
    assert tile_planes(tile_stack(experts.w1)).kind == "MXFP4"
