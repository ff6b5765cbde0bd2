"""Rows of matrices among the weights of a whole decode step, as other kernels find them."""

from dataclasses import replace

import pytest
import torch

from tests.fused_decode_step_model import V_AND_DOWN, columns_of, make_shape, rows_of
from tests.ops.test_packed_gemm_on_cpu import multiply as multiply_many
from tests.ops.test_packed_matvec_on_cpu import multiply as multiply_few
from tests.packed_weights import make_tokens, make_weight
from tiercel.errors import ArgumentError
from tiercel.kernels.fused.fused_decode_step_geometry import MATRICES, make_geometry
from tiercel.kernels.packed import packed_dequantize as dequantizer
from tiercel.kernels.packed import packed_gemm as gemm
from tiercel.kernels.packed import packed_matvec as matvec
from tiercel.kernels.packed.packed_types import num_units
from tiercel.ops.dequantize import dequantize
from tiercel.ops.fused_decode_step import StepStream
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant_types import Layout, QuantType

CPU = torch.device("cpu")
# Units of one row and of several, slices of a row in several warps and after each other.
SHAPES = {
    "tiny": make_shape(hidden=512, inner=768, heads=8, kv_heads=2, head_dim=64),
    "slices": make_shape(hidden=2304, inner=1280, heads=8, kv_heads=2),
    "wide": make_shape(hidden=4352, inner=4352, heads=40),
}


def rest_in_step(shape, masks, names=MATRICES, seed=0):
    """Random matrices among the weights of a step, and the same as in a file."""
    stream = StepStream(make_geometry(replace(shape, num_layers=len(masks)), masks), CPU)
    stream.data.fill_(255)  # what fills lines is read by no one
    rows, columns, found = rows_of(shape), columns_of(shape), []
    for layer in range(len(masks)):
        for i, name in enumerate(names):
            qtype = QuantType[stream.geometry.qtype(layer, name)]
            count = rows[name] * (2 if name == "gate_up" else 1)
            part = make_weight(qtype, count, columns[name], CPU, seed=seed + 10 * layer + i)
            stream.write(layer, name, part.planes["data"])
            found.append((stream.matrix(layer, name), part))
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "tiny")) for name in SHAPES]
)
def test_rows_are_those_of_the_file(name):
    for weight, part in rest_in_step(SHAPES[name], (0, V_AND_DOWN)):
        assert weight.layout is Layout.STEP
        assert weight.shape == part.shape
        assert torch.equal(packed_repack(weight, Layout.FILE).planes["data"], part.planes["data"])


def test_matrices_of_other_types_have_no_table():
    stream = StepStream(make_geometry(SHAPES["tiny"], (1 << 6,)), CPU)
    with pytest.raises(ArgumentError, match="Q5_K"):
        stream.matrix(0, "q")
    assert stream.matrix(0, "k").qtype is QuantType.Q4_K


# ---- the kernels that read them, on a processor; what they give for planes is the expected result
TOKENS = 11
ROWS = 70  # four tiles and a part of one
LAUNCHES = {
    QuantType.Q4_K: (2, 2, 1, 1),  # groups, stages, early, buffers
    QuantType.Q6_K: (1, 1, 1, 2),  # its next unit is copied while it multiplies
}


MANY = {  # rings that come round, and CTAs that share a row's sum
    19: gemm.PackedGemmConfig(tokens=32, groups=2, splits=1, stages=2, steps=4),
    35: gemm.PackedGemmConfig(tokens=64, groups=1, splits=2, stages=2, steps=2),
}


def launch_of(weight):
    units = num_units(weight.shape[1])
    return matvec.make_config(
        weight.kernel_type, units, 16, *LAUNCHES[weight.qtype], 1, 1, is_split=False
    )


def source_of(weight):
    return matvec.cuda_source(
        weight.kernel_type, 0, torch.float32, launch_of(weight), in_file=False
    )


def both_layouts():
    """(in a step, as planes) in both types: units of several rows, slices of unequal width."""
    for name, matrix in (("tiny", "down"), ("slices", "k")):
        for weight, part in rest_in_step(SHAPES[name], (0, 0b111111), [matrix]):
            yield first_rows(weight), packed_repack(part.rows(0, ROWS), Layout.SOA)


def first_rows(weight):
    """A part of a matrix, which a table of fewer rows gives."""
    planes = weight.planes | {"table": weight.planes["table"][:, :ROWS].contiguous()}
    return replace(weight, shape=(ROWS, weight.shape[1]), planes=planes)


@pytest.fixture(scope="module")
def _built(built_products, chosen):
    weights = [weight for pair in both_layouts() for weight in pair]
    sources = [source_of(weight) for weight in weights]
    for name in dict.fromkeys(weight.kernel_type for weight in weights):
        sources.append(dequantizer.dequantize_source(name, torch.float32, in_file=False))
        for tokens in (tokens for tokens in MANY if {"tokens": tokens} in chosen):
            sources.append(gemm.image_source(gemm.column_order(name), MANY[tokens].tokens))
            sources.append(gemm.gemm_source(name, torch.float32, MANY[tokens]))
    built_products.build(sources)


@pytest.mark.usefixtures("_built")
def test_few_tokens_have_the_bits_that_planes_give(products):
    for weight, planes in both_layouts():
        x = make_tokens(TOKENS, weight.shape[1], CPU)
        results = [multiply_few(tensor, x, launch_of(tensor)) for tensor in (planes, weight)]
        assert results[0].isfinite().all()
        assert torch.equal(*results)


@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize("tokens", [35, pytest.param(19, marks=pytest.mark.slow)])
def test_more_tokens_have_the_bits_that_planes_give(tokens, products):
    for weight, planes in both_layouts():
        x = make_tokens(tokens, weight.shape[1], CPU)
        results = [multiply_many(x, tensor, MANY[tokens]) for tensor in (planes, weight)]
        assert results[0].isfinite().all()
        assert torch.equal(*results)


@pytest.mark.usefixtures("_built")
def test_decoded_weights_have_the_bits_of_the_file(products):
    for weight, planes in both_layouts():
        room = torch.full((weight.shape[0] + 2, weight.shape[1]), float("nan"))
        dequantizer.launch_packed_dequantize(
            weight.ordered_planes(), weight.kernel_type, room[1:-1]
        )
        assert room[0].isnan().all()
        assert room[-1].isnan().all()
        expected = dequantize(planes, torch.float32)
        assert torch.equal(room[1:-1].view(torch.int32), expected.view(torch.int32))
