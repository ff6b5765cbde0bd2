"""The linear layer: dense forms, 4-bit planes on a CPU, mixed parts, float32 results."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch

from tests.dsv4_cases import FORMATS, captured, poison
from tests.gguf_files import quantised
from tiercel import env, quant
from tiercel.cli.main import _NOTES
from tiercel.errors import ArgumentError
from tiercel.ops import linear as op
from tiercel.ops import linear_torch
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.linear import (
    FUSED_ROWS,
    MAX_ROWS,
    MOST_PACKED_ROWS,
    WIDE_ROWS,
    WIDE_WEIGHTS,
    LinearWeight,
    PathRows,
    linear,
    pick_rows,
    prepare_linear,
    select_rows,
)
from tiercel.ops.packed_matvec import MAX_TOKENS, PackedWeight, packed_matvec, prepare_packed
from tiercel.ops.packed_mmq import packed_mmq
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import linear as oracle
from tiercel.resting import (
    INT4_PLANES,
    ITEM_BYTES,
    STORED,
    head_dtype,
    resting_bytes,
    select_form,
    stored_bytes,
)

CPU = torch.device("cpu")
# Relative, of whole results (norms). float32: sums of up to 1000 products.
# 16-bit types: weights and result are rounded to 8 or 11 bits, each an error of unit / sqrt(3) / 2
# to unit / 2 in the mean; a GPU may add partial sums in that type, once more.
DENSE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# Planes round scale and zero of a group instead of each weight. Both errors are shared by 32
# weights and, in the types with a minimum, larger than the weight's own: see the test of packing.
PLANES = 6e-3
PACKED = sorted(linear_torch.PLANES)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# (rows, in, out): one decode step, odd counts, more rows than a tile; out of planes in 16s.
SHAPES = [(1, 256, 16), (3, 512, 48), (33, 768, 112), (5, 1024, 400)]


@pytest.fixture(autouse=True)
def _without_native(monkeypatch):
    """The forms of PyTorch; test_linear_native.py has those of the native library."""
    monkeypatch.setenv("TIERCEL_NATIVE", "0")


def make_weight(name, out_features, in_features, seed=0):
    """A random matrix in a storage type; rows of different size, and an offset off zero."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(out_features, in_features)) * 10.0 ** rng.uniform(
        -2, 1, (out_features, 1)
    )
    stored = quantised(values + 0.1, name)
    data = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8).view(out_features, -1)
    shape = (out_features, in_features)
    return QuantTensor(QuantType[name], Layout.FILE, shape, {"data": data})


def decoded(parts):
    """The values in the file, float64 (out, in)."""
    return torch.cat([dequantize(part, torch.float32) for part in parts]).double()


def relative_error(actual, expected):
    return ((actual.double().cpu() - expected.cpu()).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", DENSE, ids=str)
@pytest.mark.parametrize(("rows", "in_features", "out_features"), [*SHAPES, (2, 100, 7)])
def test_dense_matches_oracle(rows, in_features, out_features, dtype, device):
    part = make_weight("F32", out_features, in_features)
    weight = prepare_linear([part], dtype, device)
    x = torch.randn(rows, in_features).to(dtype)
    out = linear(x.to(device), weight)
    assert out.dtype == dtype
    assert out.shape == (rows, out_features)
    assert relative_error(out, oracle.linear(x, decoded([part]))) < DENSE[dtype]


@pytest.mark.parametrize("name", [q.name for q in QuantType if q.is_ggml])
def test_every_type_is_exact_in_float32(name, device):
    part = make_weight(name, 48, 512)
    x = torch.randn(5, 512)
    out = linear(x.to(device), prepare_linear([part], torch.float32, device))
    assert relative_error(out, oracle.linear(x, decoded([part]))) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", ["same", torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "in_features", "out_features"), [*SHAPES, (2, 100, 7)])
def test_gpu_kernel_matches_oracle(rows, in_features, out_features, dtype, out_dtype, device):
    out_dtype = dtype if out_dtype == "same" else out_dtype
    x = torch.randn(rows, in_features).to(dtype).to(device)
    weight = torch.randn(out_features, in_features).to(dtype).to(device)
    out = torch.full((rows, out_features), float("nan"), dtype=out_dtype, device=device)
    linear_torch.dense_matmul(x, weight, out)
    # Float32: tensor cores cut bits off as they align partial sums.
    tolerance = 1e-5 if out_dtype == torch.float32 else DENSE[out_dtype]
    assert relative_error(out, oracle.linear(x, weight).cpu()) < tolerance


def test_kernel_fills_a_poisoned_output(device):
    x, weight = torch.randn(3, 100, device=device), torch.randn(7, 100, device=device)
    out = torch.full((3, 7), float("nan"), device=device)
    linear_torch.dense_matmul(x, weight, out)
    assert relative_error(out, oracle.linear(x, weight).cpu()) < 2e-6


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(("rows", "in_features", "out_features"), SHAPES)
def test_planes_match_oracle(rows, in_features, out_features, name):
    part = make_weight(name, out_features, in_features)
    weight = prepare_linear([part], torch.bfloat16, CPU)
    planes = weight.segments[0]
    assert planes.count == linear_torch.PLANES[name]
    x = torch.randn(rows, in_features).bfloat16()
    out = linear(x, weight)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, oracle.linear(x, decoded([part]))) < PLANES
    assert torch.equal(out, linear_torch.int4_matmul(x, planes))


@pytest.mark.parametrize("name", PACKED)
def test_packing_errs_like_rounding_to_bfloat16(name):
    """A weight in planes keeps about the 8 bits that a dense bfloat16 weight would.

    The rows of the identity read the weights back. 2.5 times the error of dense weights: scale,
    zero and this read-out are rounded once each, and the zero of a group with a minimum is larger
    than its weights.
    """
    part = make_weight(name, 64, 768)
    expected = decoded([part])
    planes = linear_torch.pack_planes([(name, part.planes["data"])])
    weights = linear_torch.int4_matmul(torch.eye(768).bfloat16(), planes).t()
    dense = relative_error(expected.bfloat16(), expected)
    assert relative_error(weights, expected) < 2.5 * dense
    largest = expected.view(64, -1, 32).abs().amax(dim=2, keepdim=True)
    error = (weights.double() - expected).view(64, -1, 32).abs()
    assert (error <= 2**-6 * largest).all()  # no weight is off by more than 4 units of its group


@pytest.mark.parametrize("name", PACKED)
def test_codes_are_those_of_the_file(name):
    """Before any rounding: scale * q + zero is the weight."""
    part = make_weight(name, 16, 512)
    block_bytes = linear_torch.BLOCK_BYTES[name]
    codes = linear_torch.READERS[name](name, part.planes["data"].unflatten(1, (-1, block_bytes)))
    groups = codes.q.view(16, -1, 32).double()
    weights = codes.scale.double().unsqueeze(-1) * groups + codes.zero.double().unsqueeze(-1)
    assert codes.bits == int(name[1])
    assert int(codes.q.max()) < 2**codes.bits
    assert relative_error(weights.flatten(1), decoded([part])) < 1e-6


def test_each_row_of_x_is_its_own(device):
    """A row's result depends on neither its index nor the rows beside it, up to rounding."""
    part = make_weight("Q8_0", 48, 256)
    weight = prepare_linear([part], torch.bfloat16, device)
    x = torch.randn(7, 256).bfloat16().to(device)
    alone = torch.cat([linear(row.unsqueeze(0), weight) for row in x])
    assert relative_error(linear(x, weight), alone.double().cpu()) < 3e-3
    order = torch.randperm(7).to(device)
    assert relative_error(linear(x[order], weight), linear(x, weight)[order].double().cpu()) < 3e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_parts_lie_end_to_end(dtype, device):
    names = ("Q4_0", "Q4_1", "Q8_0", "F32", "Q6_K", "Q5_K", "Q4_K")
    sizes = (32, 16, 48, 20, 17, 16, 7)
    parts = [
        make_weight(name, size, 512, seed)
        for seed, (name, size) in enumerate(zip(names, sizes, strict=True))
    ]
    weight = prepare_linear(parts, dtype, device)
    packs = dtype == torch.bfloat16 and device.type == "cpu"
    # Neighbours of one form merge: Q4_0 + Q4_1, Q8_0, F32 + Q6_K, Q5_K, Q4_K (7 rows).
    assert len(weight.segments) == (5 if packs else 1)
    assert weight.shape == (sum(sizes), 512)
    x = torch.randn(3, 512).to(dtype)
    out = linear(x.to(device), weight).cpu()
    for piece, part in zip(out.split(sizes, dim=1), parts, strict=True):
        tolerance = PLANES if packs else DENSE[dtype]
        assert relative_error(piece, oracle.linear(x, decoded([part]))) < tolerance
        alone = linear(x.to(device), prepare_linear([part], dtype, device)).cpu()
        assert relative_error(piece, alone.double()) < (3e-3 if dtype == torch.bfloat16 else 2e-6)


def assert_fills(x, weight, result):
    """A result is written to `out`."""
    out = torch.full_like(result, torch.nan)
    assert linear(x, weight, out_dtype=result.dtype, out=out) is out
    assert torch.equal(out, result)


def test_the_switch_for_equal_bits_leaves_one_kernel(monkeypatch):
    """As `tiercel serve --help` promises: all products are those of 16 rows at a time."""
    assert "TIERCEL_EXACT=1 gives equal bits" in " ".join(_NOTES["serve"])
    monkeypatch.setenv("TIERCEL_EXACT", "1")
    assert not env.has_megakernel()
    assert not env.has_fused_layer_tail()
    for has_copy, has_fused, has_mmq in itertools.product((False, True), repeat=3):
        rows = select_rows(
            has_copy=has_copy,
            has_fused=has_fused,
            has_mmq=has_mmq,
            uses_gemm=env.has_prefill_gemm(),
        )
        assert rows == PathRows(MAX_ROWS, 0, 0)


@pytest.mark.parametrize("has_copy", [True, False])
@pytest.mark.parametrize("rows", [1, MAX_TOKENS, MAX_TOKENS + 1, MOST_PACKED_ROWS + 1])
def test_packed_k_quants_beside_dense_parts(rows, has_copy, device):
    """Few rows go through the packed weights, many through the copy or weights decoded on the way.

    Without a GPU the forms are put together by hand: a CPU would keep others.
    """
    parts = [make_weight("Q4_K", 40, 512, 1), make_weight("F16", 24, 512, 2)]
    parts.append(make_weight("Q6_K", 17, 512, 3))
    if device.type == "cuda":
        weight = prepare_linear(parts, torch.float16, device, dense_copies=has_copy)
    else:
        dense = decoded(parts).half()
        first, last = (prepare_packed(part, Layout.SOA) for part in (parts[0], parts[2]))
        segments = (first, dense[40:64], last)
        limits = select_rows(has_copy=has_copy, has_fused=False, has_mmq=False, uses_gemm=True)
        weight = LinearWeight(segments, (81, 512), dense if has_copy else None, *limits)
    x = (torch.randn(rows, 512) / 10).half()
    is_packed = rows <= weight.reader_rows
    out = linear(x.to(device), weight)
    results = {torch.float16: out}
    if device.type == "cuda":  # PyTorch has no such product of 16-bit inputs on a CPU
        results[torch.float32] = linear(x.to(device), weight, out_dtype=torch.float32)
    for dtype, result in results.items():
        assert result.dtype == dtype
        assert_fills(x.to(device), weight, result)
        for piece, part in zip(result.split((40, 24, 17), dim=1), parts, strict=True):
            assert relative_error(piece, oracle.linear(x, decoded([part]))) < 2e-3
    for at, segment in ((slice(0, 40), weight.segments[0]), (slice(64, 81), weight.segments[2])):
        alone = packed_matvec(x[:1].to(device), segment)
        assert torch.equal(out[:1, at], alone) or not is_packed


@pytest.mark.parametrize("has_copy", [True, False])
def test_paths_by_rows(has_copy):
    """Toggles decide, then the fused product, then dense weights."""
    for has_fused, has_mmq in itertools.product((True, False), (True, False)):
        select = partial(select_rows, has_copy=has_copy, has_fused=has_fused, has_mmq=has_mmq)
        assert select(uses_gemm=False) == (MAX_ROWS, 0, 0)
        if has_mmq:
            expected = (MAX_TOKENS, 0, MAX_ROWS)
        elif has_fused:
            expected = (MAX_TOKENS, FUSED_ROWS[has_copy], 0)
        else:
            expected = (MAX_TOKENS if has_copy else MOST_PACKED_ROWS, 0, 0)
        assert select(uses_gemm=True) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("has_copy", [True, False])
def test_paths_agree(has_copy, device, monkeypatch):
    """TIERCEL_PREFILL_GEMM=0 reads 16 rows at a time; every path is near it at any size."""
    parts = [make_weight("Q4_K", 200, 1024, 1), make_weight("Q6_K", 60, 1024, 2)]
    monkeypatch.setenv("TIERCEL_FUSED_GEMM", "1")
    usual = prepare_linear(parts, torch.float16, device, dense_copies=has_copy)
    monkeypatch.setenv("TIERCEL_PREFILL_GEMM", "0")
    exact = prepare_linear(parts, torch.float16, device, dense_copies=has_copy)
    x = torch.randn(700, 1024).half().to(device)
    whole = linear(x, exact)
    assert torch.equal(whole[16:32], linear(x[16:32], usual))
    for rows in (17, 64, 100, 128, 129, 300, 700):
        assert torch.equal(linear(x[:rows], exact), whole[:rows])
        assert relative_error(linear(x[:rows], usual), whole[:rows].double().cpu()) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("soa", ["0", "1"])
@pytest.mark.parametrize("has_copy", [True, False])
def test_tokens_of_8_bits_on_request(has_copy, soa, device, monkeypatch):
    """TIERCEL_PREFILL_MMQ=1: products of more than 16 rows, unless none may leave the reader."""
    parts = [make_weight("Q4_K", 200, 1024, 1), make_weight("Q6_K", 60, 1024, 2)]
    monkeypatch.setenv("TIERCEL_Q4K_SOA", soa)
    monkeypatch.setenv("TIERCEL_PREFILL_MMQ", "1")
    weight = prepare_linear(parts, torch.float16, device, dense_copies=has_copy)
    x = torch.randn(300, 1024).half().to(device)
    for rows in (17, 65, 300):
        whole = torch.cat([packed_mmq(x[:rows], segment) for segment in weight.segments], dim=1)
        assert torch.equal(linear(x[:rows], weight), whole)
        expected = oracle.linear(x[:rows].cpu(), decoded(parts))
        assert 1e-3 < relative_error(whole, expected) < 2e-2
    assert torch.equal(linear(x[:16], weight)[:, :200], packed_matvec(x[:16], weight.segments[0]))
    monkeypatch.setenv("TIERCEL_PREFILL_GEMM", "0")
    reader = prepare_linear(parts, torch.float16, device, dense_copies=has_copy)
    assert torch.equal(linear(x, reader)[:16], linear(x[:16], weight))


def test_bytes_at_rest():
    """A K-quant of 100 x 512 on a GPU: its blocks, and 16-bit copies where they are kept."""
    shape, file_bytes = (100, 512), 100 * 2 * 144
    for copies, expected in ((True, file_bytes + 100 * 512 * 2), (False, file_bytes)):
        found = resting_bytes(QuantType.Q4_K, shape, "float16", "cuda", dense_copies=copies)
        assert found == expected
        dense = resting_bytes(QuantType.Q4_K, shape, "bfloat16", "cuda", dense_copies=copies)
        assert dense == 100 * 512 * 2


def resting_tensors(weight):
    """Everything that a prepared weight holds."""
    for segment in weight.segments:
        if isinstance(segment, torch.Tensor):
            yield segment
        elif isinstance(segment, QuantTensor):
            yield from segment.planes.values()
        else:
            yield from (segment.packed, segment.scale_zero)


@pytest.mark.parametrize("qtype", [q for q in QuantType if q.is_ggml], ids=lambda q: q.name)
def test_bytes_at_rest_are_those_of_the_planes(qtype):
    """On a GPU: of layout SOA, in whole groups, and of the copy; on a CPU: of what is prepared."""
    for columns in (qtype.block_weights * 3, qtype.block_weights * 8):
        part = make_weight(qtype.name, 32, columns)
        for dtype, name in NAMES.items():
            find = partial(resting_bytes, qtype, part.shape, name)
            copy = 32 * columns * dtype.itemsize
            is_packed = dtype == torch.float16 and qtype in quant.PLANES
            packed = packed_repack(part, Layout.SOA).nbytes if is_packed else 0
            copy, packed = (0, part.nbytes) if qtype in STORED else (copy, packed)
            assert find("cuda", dense_copies=True) == packed + copy
            assert find("cuda", dense_copies=False) == (packed or copy)
            resting = resting_tensors(prepare_linear([part], dtype, CPU))
            on_cpu = sum(tensor.numel() * tensor.element_size() for tensor in resting)
            for dense_copies in (True, False):
                assert find("cpu", dense_copies=dense_copies) == on_cpu
    assert {name: dtype.itemsize for dtype, name in NAMES.items()} == ITEM_BYTES


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize("rows", [1, WIDE_ROWS - 1, WIDE_ROWS, 9])
def test_dense_bfloat16_is_widened_where_it_is_not_native(rows, capability, monkeypatch):
    """Q6_K does not pack: with AVX2 its products of many rows are formed in float32."""
    monkeypatch.setattr(op, "has_native_bfloat16", lambda: capability == "AVX512")
    monkeypatch.setattr(op, "WIDE_WEIGHTS", 512 * 20)  # three slices
    seen = []
    real = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w: seen.append((x.dtype, len(w))) or real(x, w)
    )
    part = make_weight("Q6_K", 48, 512)
    weight = prepare_linear([part], torch.bfloat16, CPU)
    assert weight.segments[0].dtype == torch.bfloat16
    x = torch.randn(rows, 512).bfloat16()
    out = linear(x, weight)
    assert out.dtype == torch.bfloat16
    assert out.shape == (rows, 48)
    assert relative_error(out, oracle.linear(x, decoded([part]))) < DENSE[torch.bfloat16]
    is_wide = capability == "AVX2" and rows >= WIDE_ROWS
    assert seen == (
        [(torch.float32, 20)] * 2 + [(torch.float32, 8)] if is_wide else [(x.dtype, 48)]
    )


def test_native_bfloat16_is_what_pytorch_says(monkeypatch):
    for capability, is_supported, expected in (
        ("AVX512", True, True), ("AVX512", False, False), ("AVX2", True, False),
        ("DEFAULT", False, False),
    ):  # fmt: skip
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda s=is_supported: s, raising=False
        )
        assert op.has_native_bfloat16() == expected


def product_in_fours(x, weight, real=torch.nn.functional.linear):
    """A product as in some builds of MKL: remaining rows are summed in another order."""
    whole = len(x) // 4 * 4
    return torch.cat((real(x[:whole], weight), real(x[whole:].flip(1), weight.flip(1))))


@pytest.mark.parametrize("is_uneven", [False, True], ids=["own product", "in fours"])
@pytest.mark.parametrize(("in_features", "out_features"), [(100, 7), (576, 1000), (1030, 48)])
def test_rows_on_a_cpu_do_not_depend_on_their_number(
    in_features, out_features, is_uneven, monkeypatch
):
    """From 4 rows on, bit for bit: a prompt in other chunks has the same result."""
    if is_uneven:
        monkeypatch.setattr(torch.nn.functional, "linear", product_in_fours)
    weight = prepare_linear([make_weight("F32", out_features, in_features)], torch.float32, CPU)
    x = torch.randn(23, in_features)
    whole = linear(x, weight)
    for rows in (4, 5, 6, 7, 8, 9, 15, 17, 22):
        for first in (0, 23 - rows):
            out = linear(x[first : first + rows], weight)
            assert torch.equal(out, whole[first : first + rows])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_layouts_multiply_alike(rows, device, monkeypatch):
    """TIERCEL_Q4K_SOA and TIERCEL_PDL change no bit of a result."""
    parts = [make_weight("Q4_K", 100, 768, 1), make_weight("Q6_K", 50, 768, 2)]
    x = torch.randn(rows, 768).half().to(device)
    results = []
    for soa, pdl in (("1", "1"), ("0", "1"), ("1", "0")):
        monkeypatch.setenv("TIERCEL_Q4K_SOA", soa)
        monkeypatch.setenv("TIERCEL_PDL", pdl)
        weight = prepare_linear(parts, torch.float16, device, dense_copies=False)
        assert weight.segments[0].tensor.layout is (Layout.SOA if soa == "1" else Layout.FILE)
        results.append(linear(x, weight))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("names", [("Q4_1", "Q4_0", "Q4_K"), ("Q8_0", "Q5_1", "Q5_K")])
@pytest.mark.parametrize("sizes", [(16, 80, 48), (192, 16, 64), (4096, 48, 16)])
def test_packed_parts_join_at_any_row(names, sizes):
    """The operator interleaves up to 64 rows: parts may end inside such a tile."""
    parts = [
        make_weight(name, size, 256, seed)
        for seed, (name, size) in enumerate(zip(names, sizes, strict=True))
    ]
    weight = prepare_linear(parts, torch.bfloat16, CPU)
    assert len(weight.segments) == 1
    x = torch.randn(3, 256).bfloat16()
    out = linear(x, weight)
    for piece, part in zip(out.split(sizes, dim=1), parts, strict=True):
        assert torch.equal(piece, linear(x, prepare_linear([part], torch.bfloat16, CPU)))


@pytest.mark.parametrize("name", ["F32", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_is_added(dtype, name, device):
    part = make_weight(name, 48, 256)
    x, bias = torch.randn(3, 256).to(dtype), (100 * torch.randn(48)).to(dtype)
    out = linear(x.to(device), prepare_linear([part], dtype, device), bias.to(device))
    expected = oracle.linear(x, decoded([part]), bias)
    assert relative_error(out, expected) < max(DENSE[dtype], PLANES * (dtype != torch.float32))
    assert relative_error(out, expected - bias.double()) > 0.5  # the bias decides


@pytest.mark.parametrize("rows", [1, WIDE_ROWS - 1, WIDE_ROWS, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_wide_results(rows, dtype, device):
    """Float32 results: rounded no more than the resident weights are."""
    if dtype == torch.float16 and device.type == "cpu":
        pytest.skip("float16 activations are not offered on a CPU")
    part = make_weight("Q8_0", 1000, 576)
    weight = prepare_linear([part], dtype, device, wide=True)
    (dense,) = weight.segments
    narrow = torch.float16 if device.type == "cpu" else dtype
    assert dense.dtype == (torch.float32 if dtype == torch.float32 else narrow)
    x = torch.randn(rows, 576).to(dtype)
    out = linear(x.to(device), weight, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert_fills(x.to(device), weight, out)
    expected = oracle.linear(x, dense.cpu())
    # PyTorch has no product of 16-bit inputs with a float32 result on a CPU. So few rows are not
    # worth widening the weights: the result is rounded to float16 on its way (half of 2**-11). On
    # a GPU, tensor cores cut bits off as they align partial sums.
    is_rounded = device.type == "cpu" and dtype != torch.float32 and rows < WIDE_ROWS
    exact = 1e-5 if device.type == "cuda" and dtype != torch.float32 else 2e-6
    assert relative_error(out, expected) < (2**-12 if is_rounded else exact)


@pytest.mark.parametrize("rows", [1, WIDE_ROWS])
def test_wide_weights_larger_than_a_slice(rows, device):
    num_rows = WIDE_WEIGHTS // 512  # of a slice
    part = make_weight("Q4_0", num_rows + 33, 512)
    weight = prepare_linear([part], torch.bfloat16, device, wide=True)
    x = torch.randn(rows, 512).bfloat16()
    out = linear(x.to(device), weight, out_dtype=torch.float32)
    expected = oracle.linear(x, weight.segments[0].cpu())
    is_rounded = device.type == "cpu" and rows < WIDE_ROWS
    assert relative_error(out, expected) < (2**-12 if is_rounded else 1e-5)
    assert relative_error(out[:, num_rows:], expected[:, num_rows:]) < 2**-11


@pytest.mark.parametrize("name", ["F32", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_rows(dtype, name, device):
    weight = prepare_linear([make_weight(name, 48, 256)], dtype, device)
    x = torch.empty(0, 256, dtype=dtype, device=device)
    assert linear(x, weight).shape == (0, 48)


@pytest.mark.gpu
@pytest.mark.parametrize("has_copy", [True, False])
@pytest.mark.parametrize("name", [q.name for q in quant.PLANES])
def test_any_number_of_rows(name, has_copy, device):
    """Packed weights of every type: each row up to 16 has its own bits, more are near them."""
    columns = 576 if QuantType[name].block_weights == 32 else 768
    part = make_weight(name, 100, columns)
    weight = prepare_linear([part], torch.float16, device, dense_copies=has_copy)
    assert isinstance(weight.segments[0], PackedWeight)
    x = (torch.randn(MOST_PACKED_ROWS + 1, columns) / 10).half()
    expected = oracle.linear(x, decoded([part]))
    alone = torch.cat([linear(row[None].to(device), weight) for row in x])
    for rows in (2, 9, MAX_TOKENS, MAX_TOKENS + 1, MOST_PACKED_ROWS + 1):
        out = linear(x[:rows].to(device), weight)
        assert_fills(x[:rows].to(device), weight, out)
        assert relative_error(out, expected[:rows]) < 2e-3
        assert torch.equal(out, alone[:rows]) or rows > MAX_TOKENS


def test_form_of_every_type():
    for qtype in QuantType:
        for out_features, dtype in itertools.product((1, 16, 24, 576), ITEM_BYTES):
            if qtype in STORED:
                forms = {select_form(qtype, (out_features, 256), dtype, d) for d in ("cpu", "cuda")}
                assert forms == {"stored"}
            else:
                packs = dtype == "float16" and qtype in quant.PLANES
                form = select_form(qtype, (out_features, 256), dtype, "cuda")
                assert form == ("packed" if packs else "dense")
                form = select_form(qtype, (out_features, 256), dtype, "cpu")
                if dtype == "bfloat16" and out_features % 16 == 0 and qtype.name in PACKED:
                    assert form == f"planes{linear_torch.PLANES[qtype.name]}"
                else:
                    assert form == "dense"
    # One plane holds 16 levels, so exactly the 4-bit types have one.
    assert {name for name in PACKED if linear_torch.PLANES[name] == 1} == {"Q4_0", "Q4_1", "Q4_K"}
    assert {qtype.name: count for qtype, count in INT4_PLANES.items()} == linear_torch.PLANES


def test_the_head_keeps_11_bits_on_a_cpu():
    assert head_dtype("bfloat16", "cpu") == "float16"
    for dtype, device in (("float32", "cpu"), ("bfloat16", "cuda"), ("float16", "cuda")):
        assert head_dtype(dtype, device) == dtype


def test_block_sizes_are_those_of_the_types():
    sizes = {name: QuantType[name].block_bytes for name in PACKED}
    assert sizes == linear_torch.BLOCK_BYTES
    assert set(linear_torch.READERS) == set(PACKED)


def test_op_names_the_bad_argument(device):
    first, second = make_weight("F32", 4, 64), make_weight("F32", 4, 96)
    with pytest.raises(ArgumentError, match=r"parts have \[64, 96\] columns"):
        prepare_linear([first, second], torch.float32, device)
    weight = prepare_linear([first], torch.float32, device)
    with pytest.raises(ArgumentError, match=r"x is \(2, 65\) but the weight has 64 columns"):
        linear(torch.randn(2, 65, device=device), weight)
    with pytest.raises(ArgumentError, match=r"x is \(64,\)"):
        linear(torch.randn(64, device=device), weight)


def make_blocks(qtype, out_features, in_features, seed=0):
    """A random matrix in a block format."""
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed))
    return block_quantize(weight / in_features**0.5, qtype, block=(32, 48))


# What rounding the weights of a format to the dtype of x costs: a weight of NVFP4 has more bits.
STORED_ERRORS = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}


@pytest.mark.parametrize("dtype", DENSE, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, WIDE_ROWS, 33])
@pytest.mark.parametrize("qtype", FORMATS, ids=lambda q: q.name)
def test_block_formats_rest_as_stored(qtype, rows, dtype, device):
    part = make_blocks(qtype, 133, 160)
    weight = prepare_linear([part], dtype, device)
    assert weight.shape == (133, 160)
    (segment,) = weight.segments
    assert isinstance(segment, QuantTensor)
    assert segment.nbytes == part.nbytes
    x = torch.randn(rows, 160).to(dtype)
    bias = torch.randn(133).to(dtype).to(device)
    poison(device)
    out = linear(x.to(device), weight, bias)
    assert out.dtype == dtype
    assert out.shape == (rows, 133)
    expected = oracle.linear(x, decoded([part]))
    if rows:
        assert relative_error(out - bias, expected) < 4 * STORED_ERRORS[dtype]
        room = torch.full((rows, 133), float("nan"), dtype=dtype, device=device)
        assert linear(x.to(device), weight, out=room) is room
        assert relative_error(room, expected) < STORED_ERRORS[dtype]
        assert_fills(x.to(device), weight, linear(x.to(device), weight))


@pytest.mark.parametrize("dtype", DENSE, ids=str)
@pytest.mark.parametrize("rows", [1, 9])
def test_block_formats_share_an_input_with_other_types(rows, dtype, device):
    parts = [
        make_blocks(QuantType.FP8_BLOCK, 70, 256), make_weight("BF16", 5, 256),
        make_weight("Q4_K", 48, 256), make_blocks(QuantType.MXFP4, 33, 256, 1),
        make_weight("MXFP4", 16, 256, 2), make_blocks(QuantType.NVFP4, 7, 256, 2),
    ]  # fmt: skip
    weight = prepare_linear(parts, dtype, device)
    assert weight.shape == (179, 256)
    assert weight.dense is None
    x = torch.randn(rows, 256).to(dtype)
    poison(device)
    out = linear(x.to(device), weight)
    start = 0
    for part in parts:
        expected = oracle.linear(x, decoded([part]))
        own = out[:, start : start + part.shape[0]]
        start += part.shape[0]
        assert relative_error(own, expected) < max(PLANES, STORED_ERRORS[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("qtype", FORMATS, ids=lambda q: q.name)
def test_wide_results_of_block_formats(qtype, rows, dtype, device):
    """On a CPU nothing is rounded to 16 bits."""
    part = make_blocks(qtype, 133, 160)
    weight = prepare_linear([part], dtype, device, wide=True)
    x = torch.randn(rows, 160).to(dtype)
    out = linear(x.to(device), weight, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    expected = oracle.linear(x, decoded([part]))
    tolerance = 2e-6 if device.type == "cpu" else STORED_ERRORS[dtype]
    assert relative_error(out, expected) < tolerance
    picked = pick_rows(weight, torch.tensor([130, 2, 2, 64], device=device))
    found = linear(x.to(device), picked, out_dtype=torch.float32)
    assert relative_error(found, expected[:, [130, 2, 2, 64]]) < tolerance


@pytest.mark.parametrize("qtype", FORMATS, ids=lambda q: q.name)
def test_bytes_of_block_formats(qtype):
    for stack in ((), (3,)):
        weight = torch.randn(*stack, 133, 160)
        for has_e8m0 in (True, False):
            blocks = block_quantize(weight, qtype, block=(32, 48), has_e8m0=has_e8m0)
            scale_bytes = 1 if has_e8m0 else 4
            assert stored_bytes(qtype, blocks.shape, (32, 48), scale_bytes) == blocks.nbytes
    blocks = block_quantize(weight[0], qtype)
    for device_type in ("cpu", "cuda"):
        found = resting_bytes(qtype, blocks.shape, "bfloat16", device_type, dense_copies=True)
        assert found == blocks.nbytes
    assert stored_bytes(QuantType.IQ2_XXS, (3, 5, 512)) == 3 * 5 * 2 * 66


def test_stacks_are_refused():
    stack = block_quantize(torch.randn(3, 32, 64), QuantType.MXFP4)
    with pytest.raises(ArgumentError, match=r"parts have the shapes \[\(3, 32, 64\)\]"):
        prepare_linear([stack], torch.float32, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", FORMATS, ids=lambda q: q.name)
def test_replay_of_block_formats_equals_eager(qtype, device):
    parts = [make_blocks(qtype, 133, 160), make_weight("BF16", 5, 160)]
    weight = prepare_linear(parts, torch.bfloat16, device)
    x = torch.randn(5, 160, device=device).bfloat16()
    assert torch.equal(captured(lambda: linear(x, weight)), linear(x, weight))
