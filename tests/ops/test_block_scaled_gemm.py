"""Operands of Blackwell's block-scaled products, and the kernel as far as a compiler knows it."""

import pytest
import torch

from tests.kernels.test_rtc import compile_here, registers_of
from tiercel.errors import ArgumentError
from tiercel.kernels.block import block_scaled_gemm as kernel
from tiercel.ops import block_scaled_gemm_torch as torch_ops
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.block_scaled_gemm import block_scaled_gemm, tile_gate_up, tile_operand
from tiercel.ops.dequantize import dequantize
from tiercel.quant_types import QuantType
from tiercel.reference import block_scaled_gemm as oracle

KINDS = [QuantType.MXFP4, QuantType.NVFP4]


def random_matrix(qtype, rows, columns, device="cpu"):
    weight = torch.randn(rows, columns, device=device)
    weight[::3] *= 2.0 ** torch.randint(-6, 6, (columns,), device=device)  # scales of every size
    return block_quantize(weight, qtype)


@pytest.mark.parametrize("qtype", KINDS, ids=lambda q: q.name)
@pytest.mark.parametrize(("rows", "columns"), [(3, 32), (130, 64), (9, 544)])
def test_tiles_hold_each_element_where_tensor_cores_read_it(qtype, rows, columns):
    made = random_matrix(qtype, rows, columns)
    tiled = tile_operand(made)
    assert tiled.values.shape == (-(-rows // 128), -(-columns // 256), kernel.TILE_BYTES)
    found = oracle.matrix(tiled.values, tiled.scales, tiled.group, tiled.shape)
    expected = dequantize(made, torch.float32).double() / tiled.totals[0].double()
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize(("rows", "run"), [(16, 8), (13, 8), (5, 8), (40, 8), (7, 3)])
def test_gate_and_up_come_apart_again(rows, run):
    gate, up = torch.randn(rows, 11), torch.randn(rows, 11)
    both = torch_ops.interleave(gate, up, run)
    for found in (torch_ops.deinterleave(both, run), oracle.gate_up(both, run)):
        assert torch.equal(found[0], gate)
        assert torch.equal(found[1], up)


@pytest.mark.parametrize("qtype", KINDS, ids=lambda q: q.name)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_match_the_oracle(qtype, out_dtype):
    x, weight = random_matrix(qtype, 5, 96), random_matrix(qtype, 24, 96)
    tiled = tile_operand(x), tile_operand(weight)
    found = block_scaled_gemm(*tiled, out_dtype=out_dtype)
    parts = [oracle.matrix(t.values, t.scales, t.group, t.shape) * t.totals[0] for t in tiled]
    expected = parts[0].double() @ parts[1].double().t()
    assert found.dtype == out_dtype
    limit = 2e-6 if out_dtype == torch.float32 else 4e-3
    assert (found.double() - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("qtype", KINDS, ids=lambda q: q.name)
@pytest.mark.parametrize("limit", [None, 0.7])
def test_gate_and_up_are_multiplied_as_one_matrix(qtype, limit):
    """Each has a global scale of its own."""
    x = random_matrix(qtype, 6, 64)
    gate, up = random_matrix(qtype, 16, 64), random_matrix(qtype, 16, 64)
    found = block_scaled_gemm(
        tile_operand(x), tile_gate_up(gate, up), limit=limit, out_dtype=torch.float32
    )
    dense, w1, w3 = (dequantize(one, torch.float32).double() for one in (x, gate, up))
    expected = oracle.clamped_swiglu(dense @ w1.t(), dense @ w3.t(), limit)
    assert found.shape == (6, 16)
    assert (found.double() - expected).norm() <= 1e-5 * expected.norm()


def test_no_tokens():
    x = block_quantize(torch.randn(1, 64), QuantType.MXFP4)
    empty = tile_operand(x)
    found = block_scaled_gemm(empty, tile_operand(random_matrix(QuantType.MXFP4, 8, 64)))
    assert found.shape == (1, 8)


@pytest.mark.parametrize(
    ("is_nvfp4", "is_gate_up"),
    [
        (True, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((False, False), (False, True), (True, False))
        ),
    ],
)
def test_it_compiles_for_blackwell(is_nvfp4, is_gate_up, tmp_path):
    for is_float_out in (False, True):
        source = kernel.gemm_source(
            is_nvfp4=is_nvfp4, is_gate_up=is_gate_up, is_float_out=is_float_out
        )
        cubin = compile_here(source, tmp_path, "sm_100a")
        assert registers_of(cubin, tmp_path) <= 128


def test_the_launch_fits_the_processor():
    for group in (16, 32):
        static = 8 * (2 * kernel.STAGES + 1) + 4
        assert kernel.smem_bytes(group) + static + 1024 <= 227 << 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda a, b: tile_operand(block_quantize(torch.randn(4, 128), QuantType.FP8_BLOCK)),
            "FP8",
        ),
        (lambda a, b: tile_gate_up(a, b), "gate is MXFP4"),
        (lambda a, b: block_scaled_gemm(tile_operand(a), tile_operand(b)), "groups of 32"),
        (lambda a, b: block_scaled_gemm(*[tile_operand(a)] * 2, limit=-1.0), "limit=-1.0"),
        (lambda a, b: block_scaled_gemm(*[tile_operand(a)] * 2, out_dtype=torch.half), "float16"),
    ],
)
def test_op_names_the_bad_argument(call, message):
    a, b = random_matrix(QuantType.MXFP4, 8, 64), random_matrix(QuantType.NVFP4, 8, 64)
    with pytest.raises(ArgumentError, match=message):
        call(a, b)
