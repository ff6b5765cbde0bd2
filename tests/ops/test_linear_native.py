"""x @ W^T by the native library: every type, both classes, forms at rest."""

import itertools

import pytest
import torch

from tests.ops.test_dequantize import HALVES, random_blocks
from tiercel import resting
from tiercel.kernels.native.forms import has_native
from tiercel.ops.dequantize import dequantize
from tiercel.ops.linear import NativeMatrix, linear, pick_rows, prepare_linear
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import linear as oracle
from tiercel.reference.fused_decode_step import rounded

pytestmark = pytest.mark.skipif(not has_native(), reason="needs the native library")
CPU = torch.device("cpu")
TYPES = [q for q in QuantType if q.is_ggml and q is not QuantType.MXFP4]
BLOCKS = [q for q in TYPES if not q.is_float]
# Rounding points: sums of float32; x of 8 bits compared with the oracle of rounded x.
FLOAT_ERROR, ROUNDED_ERROR = 2e-6, 2e-6


def make_weight(qtype, rows, cols, seed=0):
    """Random blocks with weights of about 0.1, or floats."""
    if qtype.is_float:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[qtype.name]
        generator = torch.Generator().manual_seed(seed)
        data = torch.randn(rows, cols, generator=generator).to(dtype).view(torch.uint8)
        return QuantTensor(qtype, Layout.FILE, (rows, cols), {"data": data})
    data = random_blocks(qtype.name, rows, cols // qtype.block_weights, seed)
    for byte in HALVES[qtype.name]:
        data[..., byte + 1] = data[..., byte + 1] & 0x83 | 0x18
    plane = torch.as_tensor(data).flatten(1)
    return QuantTensor(qtype, Layout.FILE, (rows, cols), {"data": plane})


def relative_error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


def expect(x, parts, *, rounds):
    """The oracle; x rounded to 8 bits for weights of blocks."""
    few = torch.stack([rounded(row) for row in x.float()]) if rounds else x
    return torch.cat(
        [
            oracle.linear(x if part.qtype.is_float else few, dequantize(part, torch.float32))
            for part in parts
        ],
        1,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_matches_the_oracle(qtype, dtype):
    part = make_weight(qtype, 45, 512)
    weight = prepare_linear([part], dtype, CPU)
    assert all(isinstance(segment, NativeMatrix) for segment in weight.segments)
    for rows in (1, 2, 5, 17, 70):
        x = torch.randn(rows, 512).to(dtype)
        room = torch.full((rows, 45), float("nan"))
        out = linear(x, weight, out_dtype=torch.float32, out=room)
        assert out is room
        rounds = dtype != torch.float32
        expected = expect(x.float(), [part], rounds=rounds)
        assert relative_error(out, expected) < (ROUNDED_ERROR if rounds else FLOAT_ERROR)
        assert torch.equal(linear(x, weight), out.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_do_not_depend_on_their_number(dtype):
    parts = [make_weight(q, 24, 256, seed) for seed, q in enumerate(TYPES)]
    weight = prepare_linear(parts, dtype, CPU)
    x = torch.randn(130, 256).to(dtype)
    whole = linear(x, weight, out_dtype=torch.float32)
    for first, last in itertools.pairwise((0, 1, 3, 6, 14, 30, 64, 130)):
        assert torch.equal(
            linear(x[first:last], weight, out_dtype=torch.float32), whole[first:last]
        )


def test_parts_lie_end_to_end_with_a_bias():
    parts = [make_weight(QuantType[name], rows, 256) for name, rows in
             (("Q4_K", 20), ("F16", 3), ("Q6_K", 9), ("Q2_K", 8), ("BF16", 16))]  # fmt: skip
    weight = prepare_linear(parts, torch.float16, CPU)
    x, bias = torch.randn(4, 256).half(), torch.randn(56)
    out = linear(x, weight, bias, torch.float32)
    expected = expect(x.float(), parts, rounds=True) + bias
    assert relative_error(out, expected) < ROUNDED_ERROR


@pytest.mark.parametrize("variable", ["TIERCEL_EXACT", "TIERCEL_INT8_ACTIVATIONS"])
def test_toggles_multiply_floats(variable, monkeypatch):
    monkeypatch.setenv(variable, "1" if variable == "TIERCEL_EXACT" else "0")
    part = make_weight(QuantType.Q4_K, 16, 256)
    x = torch.randn(3, 256).half()
    out = linear(x, prepare_linear([part], torch.float16, CPU), out_dtype=torch.float32)
    assert relative_error(out, expect(x.float(), [part], rounds=False)) < FLOAT_ERROR


def test_columns_that_are_no_groups():
    part = make_weight(QuantType.F16, 10, 50)
    x = torch.randn(3, 50).half()
    out = linear(x, prepare_linear([part], torch.float16, CPU), out_dtype=torch.float32)
    assert relative_error(out, expect(x.float(), [part], rounds=False)) < FLOAT_ERROR


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_bytes_at_rest(qtype):
    part = make_weight(qtype, 45, 256)
    (segment,) = prepare_linear([part], torch.float16, CPU).segments
    form = resting.select_form(qtype, part.shape, "float16", "cpu")
    found = resting.resting_bytes(qtype, part.shape, "float16", "cpu", dense_copies=False)
    assert found == segment.nbytes
    is_mapped = segment.data.data_ptr() == part.planes["data"].data_ptr()
    assert form == ("mapped" if is_mapped else "tiles")
    assert is_mapped or not qtype.is_float


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_picked_rows_have_the_same_bits(qtype):
    weight = prepare_linear([make_weight(qtype, 45, 256)], torch.float16, CPU, wide=True)
    x, rows = torch.randn(3, 256).half(), torch.tensor([44, 0, 17])
    whole = linear(x, weight, out_dtype=torch.float32)
    picked = pick_rows(weight, rows)
    assert torch.equal(linear(x, picked, out_dtype=torch.float32), whole[:, rows])


def test_no_rows_are_picked_of_other_matrices():
    weight = prepare_linear([make_weight(QuantType.Q4_0, 16, 64)], torch.float16, CPU)
    assert pick_rows(weight, torch.tensor([3])) is None


@pytest.mark.parametrize("qtype", BLOCKS, ids=lambda q: q.name)
def test_a_wide_result_has_x_of_15_bits(qtype):
    part = make_weight(qtype, 45, 256)
    weight = prepare_linear([part], torch.float16, CPU, wide=True)
    x = torch.randn(9, 256) * 10 ** torch.linspace(-4, 4, 9)[:, None]
    out = linear(x, weight, out_dtype=torch.float32)
    expected = expect(x, [part], rounds=False)
    error = (out - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 3e-4  # 1 / 127**2 of the largest of a group
    for row in range(9):
        assert torch.equal(linear(x[row : row + 1], weight, out_dtype=torch.float32)[0], out[row])


@pytest.mark.parametrize("row", [-1, 16])
def test_rows_that_do_not_exist_are_refused(row):
    part = make_weight(QuantType.Q4_0, 16, 64)
    with pytest.raises(IndexError, match="beyond 16 rows"):
        dequantize(part, torch.float32, torch.tensor([3, row]))


def test_no_rows():
    weight = prepare_linear([make_weight(QuantType.Q4_0, 16, 64)], torch.float16, CPU)
    assert linear(torch.zeros(0, 64).half(), weight).shape == (0, 16)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("qtype", BLOCKS, ids=lambda q: q.name)
def test_a_row_that_is_not_finite_stays_alone(qtype, value):
    weight = prepare_linear([make_weight(qtype, 16, 256)], torch.float16, CPU)
    x = torch.randn(4, 256)
    good = linear(x, weight, out_dtype=torch.float32)
    x[1, 100] = value
    found = linear(x, weight, out_dtype=torch.float32)
    assert torch.equal(found[[0, 2, 3]], good[[0, 2, 3]])
    assert not found[1].isfinite().any()


@pytest.mark.slow
def test_ten_thousand_random_shapes():
    """Both classes and any number of rows against the oracle, and each row's bits alone."""
    generator = torch.Generator().manual_seed(0)

    def below(count):
        return int(torch.randint(count, (1,), generator=generator))

    for case in range(10_000):
        qtype = TYPES[below(len(TYPES))]
        cols = qtype.block_weights * (1 + below(3 if qtype.block_weights > 1 else 600))
        part = make_weight(qtype, 1 + below(40), cols, case)
        dtype = (torch.float32, torch.float16)[below(2)]
        weight = prepare_linear([part], dtype, CPU)
        x = torch.randn(1 + below(24), cols, generator=generator).to(dtype)
        out = linear(x, weight, out_dtype=torch.float32)
        expected = expect(x.float(), [part], rounds=weight.parts > 0)
        bound = 1e-5 * x.float().abs().double() @ dequantize(part, torch.float32).double().abs().T
        assert ((out - expected).abs() <= bound).all(), (case, qtype.name, cols)
        row = below(len(x))
        assert torch.equal(linear(x[row : row + 1], weight, out_dtype=torch.float32)[0], out[row])
