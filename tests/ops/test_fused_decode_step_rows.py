"""Rows of matrices among the weights of a whole decode step, as other kernels find them."""

from dataclasses import replace

import pytest
import torch

from tests import fused_layer_tail_on_cpu
from tests.fused_decode_step_model import (
    V_AND_DOWN,
    columns_of,
    make_shape,
    random_matrix,
    rows_of,
)
from tests.ops.test_packed_gemm_on_cpu import multiply as multiply_many
from tests.ops.test_packed_matvec_on_cpu import multiply as multiply_few
from tests.packed_weights import make_tokens, make_weight, relative_error
from tiercel.errors import ArgumentError
from tiercel.kernels.fused.fused_decode_step_geometry import MATRICES, make_geometry
from tiercel.kernels.packed import packed_dequantize as dequantizer
from tiercel.kernels.packed import packed_gemm as gemm
from tiercel.kernels.packed import packed_matvec as matvec
from tiercel.kernels.packed.packed_types import num_units
from tiercel.ops import linear as linear_op
from tiercel.ops.dequantize import dequantize
from tiercel.ops.fused_decode_step import (
    FusedDecodeStepBuilder,
    Refusal,
    StepStream,
    make_one_copy,
)
from tiercel.ops.fused_layer_tail import (
    fused_layer_tail,
    make_exchange,
    prepare_fused_layer_tail,
)
from tiercel.ops.packed_gemm import packed_gemm
from tiercel.ops.packed_matvec import packed_matvec, prepare_packed
from tiercel.ops.packed_mlp import packed_mlp
from tiercel.ops.packed_repack import join_step, packed_repack
from tiercel.quant import QuantTensor
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


LAYER = make_shape(hidden=512, inner=1024, heads=8, kv_heads=2, head_dim=64)


def make_layer(shape, mask, device):
    """Matrices of a layer by name, in layouts STEP and FILE."""
    builder = FusedDecodeStepBuilder(make_geometry(shape, (mask,)), device)
    rows, columns = rows_of(shape), columns_of(shape)
    generator = torch.Generator(device).manual_seed(0)
    kinds = {"q": "q", "k": "k", "v": "v", "o": "o", "gate": "gate_up", "up": "gate_up"}
    parts = {
        name: random_matrix(
            rows[kind], columns[kind], QuantType[builder.geometry.qtype(0, kind)], generator
        )
        for name, kind in (kinds | {"down": "down"}).items()
    }
    resting = {}
    for group in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)):
        found = builder.rest(0, {name: parts[name] for name in group})
        resting |= dict(zip(group, found, strict=True))
    return resting, parts


def pack(parts, layout):
    """O, gate and up, down, q and k, and v, ready to multiply."""
    groups = (("o",), ("gate", "up"), ("down",), ("q", "k"), ("v",))
    joined = [join([parts[name] for name in group]) for group in groups]
    return [prepare_packed(part, layout) for part in joined]


def make_tails(shape=LAYER, device=CPU, num_sms=16):
    """Weights from one attention to the next layer's, in a step and in planes."""
    torch.manual_seed(0)
    norms = [torch.rand(shape.hidden_size, device=device) + 0.5 for _ in range(2)]
    layers = make_layer(shape, V_AND_DOWN, device)
    for parts, layout in zip(layers, (Layout.STEP, Layout.SOA), strict=True):
        o, gate_up, down, qk, v = pack(parts, layout)
        weights = prepare_fused_layer_tail([o], [gate_up], [down], [qk, v], *norms, 0.2, num_sms)
        assert not isinstance(weights, Refusal), weights.reason
        yield weights


def join(parts):
    """Matrices of either layout end to end."""
    if parts[0].layout is Layout.STEP:
        return join_step(parts)
    data = torch.cat([part.planes["data"] for part in parts])
    return QuantTensor(parts[0].qtype, Layout.FILE, (len(data), parts[0].shape[1]), {"data": data})


def run_tail(weights, tokens, folder):
    """The residual and q, k, v of the next layer, in one tensor."""
    torch.manual_seed(0)
    attended = torch.randn(tokens, LAYER.q_size).half()
    x = torch.randn(tokens, LAYER.hidden_size)
    expected = x.clone()
    expected_heads = fused_layer_tail(
        attended, expected, weights, make_exchange(weights.geometry, CPU)
    )
    library = fused_layer_tail_on_cpu.build(tokens, weights, folder)
    exchange = make_exchange(weights.geometry, CPU)
    heads = fused_layer_tail_on_cpu.run(library, attended, x, weights, exchange)
    found, wanted = torch.cat((x, heads), dim=1), torch.cat((expected, expected_heads), dim=1)
    assert relative_error(found, wanted.double()) < 1e-3  # of inputs rounded to float16
    return found


def test_a_layers_tail_finds_its_rows(tmp_path):
    run_tail(next(make_tails()), 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [3, 11])
def test_a_layers_tail_has_the_bits_that_planes_give(tokens, tmp_path):
    results = []
    for i, weights in enumerate(make_tails()):
        folder = tmp_path / str(i)
        folder.mkdir()
        results.append(run_tail(weights, tokens, folder))
    assert torch.equal(*results)


@pytest.mark.parametrize("has_copy", [True, False])
def test_linear_layers_rest_there(has_copy, monkeypatch):
    """In two segments, q and k of one type, v of another, with the bits of planes."""
    for name in ("has_packed_gemm", "has_packed_mmq", "has_dependent_launch"):
        monkeypatch.setattr(linear_op, name, lambda *_: False)
    monkeypatch.setattr(linear_op, "select_form", lambda *_: "packed")
    builder = FusedDecodeStepBuilder(make_geometry(LAYER, (V_AND_DOWN,)), CPU)
    rows = rows_of(LAYER)
    parts = {
        name: make_weight(QuantType[builder.geometry.qtype(0, name)], rows[name], 512, CPU, seed)
        for seed, name in enumerate("qkv")
    }
    resting = builder.rest(0, parts)
    x = make_tokens(3, 512, CPU)
    results = []
    for where in (resting, None):
        weight = linear_op.prepare_linear(
            list(parts.values()), torch.float16, CPU, dense_copies=has_copy, resting=where
        )
        layouts = [segment.tensor.layout for segment in weight.segments]
        assert layouts == [Layout.SOA if where is None else Layout.STEP] * 2
        assert (weight.dense is not None) == has_copy
        results.append(linear_op.linear(x, weight))
    assert torch.equal(*results)
    assert resting[0].nbytes == parts["q"].nbytes + 16 * rows["q"]


def test_only_what_every_kernel_reads_is_one_copy():
    assert isinstance(make_one_copy(make_geometry(LAYER, (0,)), CPU), FusedDecodeStepBuilder)
    refused = Refusal("of the shape")
    assert make_one_copy(refused, CPU) is refused
    made = make_one_copy(make_geometry(LAYER, (1 << 6,)), CPU)
    assert isinstance(made, Refusal)
    assert "Q5_K" in made.reason


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [0, V_AND_DOWN, 0b111111])
@pytest.mark.parametrize("size", ["8b", "14b"])
def test_every_reader_gives_the_bits_of_planes(size, mask, device):
    """Products with any number of tokens, alone and of an MLP, and decoded weights."""
    shape = {
        "8b": make_shape(inner=12288),
        "14b": make_shape(hidden=5120, inner=17408, heads=40),
    }[size]
    layers = make_layer(shape, mask, device)
    steps, planes = (
        pack(parts, layout) for parts, layout in zip(layers, (Layout.STEP, Layout.SOA), strict=True)
    )
    for own, other in zip(steps, planes, strict=True):
        assert torch.equal(
            dequantize(own.tensor, torch.float16), dequantize(other.tensor, torch.float16)
        )
        for tokens in (1, 2, 4, 7, 8, 9, 16, 17, 33, 64, 96, 200):
            x = make_tokens(tokens, own.tensor.shape[1], device)
            op = packed_matvec if tokens <= 16 else packed_gemm
            results = [op(x, weight, torch.float32) for weight in (own, other)]
            assert results[0].isfinite().all()
            assert torch.equal(*results), tokens
    for tokens in (17, 64, 96):
        x = make_tokens(tokens, shape.hidden_size, device) / 100
        results = [packed_mlp(x, *weights[1:3], "silu") for weights in (steps, planes)]
        assert torch.equal(*results), tokens


@pytest.mark.gpu
def test_layer_tails_give_the_bits_of_planes(device):
    shape = make_shape(inner=12288)
    tails = list(make_tails(shape, device, 132))
    for tokens in (1, 3, 8, 9, 16):
        attended = torch.randn(tokens, shape.q_size, device=device).half()
        start = torch.randn(tokens, shape.hidden_size, device=device)
        results = []
        for weights in tails:
            x = start.clone()
            exchange = make_exchange(weights.geometry, device)
            heads = fused_layer_tail(attended, x, weights, exchange)
            results.append(torch.cat((x, heads.float()), dim=1))
        assert results[0].isfinite().all()
        assert torch.equal(*results), tokens
