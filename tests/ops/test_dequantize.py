"""Decoding of every block type: bit-exact with the oracle and with the `gguf` package."""

import gguf
import numpy as np
import pytest
import torch

from tests.gguf_files import quantised
from tests.packed_weights import HALVES
from tiercel.errors import ArgumentError
from tiercel.ops import dequantize_torch as kernel
from tiercel.ops.dequantize import dequantize
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant import QuantTensor
from tiercel.quant_types import PLANES, Layout, QuantType
from tiercel.reference import dequantize as oracle

TYPES = [qtype.name for qtype in QuantType if qtype.is_ggml]
BLOCK_TYPES = [name for name in TYPES if not QuantType[name].is_float]
MOST_E = 252  # the largest exponent byte of MXFP4 whose values are all finite
ROWS, BLOCKS = 7, 3
# NMSE of round-to-nearest encoders on N(0, 1) data: a property of the formats.
NMSE = {
    "Q2_K": 1.1e-1,
    "Q3_K": 2.4e-2,
    "Q4_K": 6.1e-3,
    "Q5_K": 1.5e-3,
    "Q6_K": 3.6e-4,
    "Q8_0": 2.9e-5,
}


def random_blocks(type_name, rows=ROWS, blocks=BLOCKS, seed=0):
    """(rows, blocks, block_bytes) random bytes whose numbers are all finite."""
    qtype = QuantType[type_name]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, qtype.block_bytes), dtype=np.uint8)
    for at in HALVES.get(type_name, ()):
        data[..., at + 1] &= 0xBF  # exponents below 2: finite, both signs, some subnormal
    if type_name in ("F32", "BF16"):
        data[..., -1] &= 0xBF
    if type_name == "MXFP4":
        data[..., 0] = np.minimum(data[..., 0], MOST_E)
    return data


def extreme_blocks(type_name):
    """(rows, 1, block_bytes): the corners of the format, one per row."""
    sets = [np.zeros_like, lambda d: np.full_like(d, 0xFF)]
    halves = (0x0001, 0x8001, 0x03FF, 0x8000, 0x0000, 0x7BFF, 0xFBFF, 0x0400, 0xBC00)
    rows = []
    for make in sets:
        for bits in halves:
            block = make(random_blocks(type_name, 1, 1)[0, 0])
            for at in HALVES.get(type_name, ()):
                block[at : at + 2] = bits & 255, bits >> 8
            rows.append(block)
    if type_name == "MXFP4":
        for row, e in zip(rows, (0, 1, 2, 3, 127, MOST_E) * 3, strict=True):
            row[0] = e
    if type_name in ("F32", "BF16"):  # all ones is a NaN, whose payload is undefined
        rows = [row for row in rows if not (row == 0xFF).all()]
    return np.stack(rows)[:, None]


def check_bits(data, type_name, device):
    """Compare the kernel, the oracle and the package on (rows, blocks, bytes)."""
    flat = np.ascontiguousarray(data.reshape(len(data), -1))
    _, weights, block_bytes = kernel.DECODERS[type_name]
    out = torch.full((len(flat), flat.shape[1] // block_bytes * weights), float("nan"))
    out = out.to(device)
    kernel.launch_dequantize(torch.from_numpy(flat).to(device), type_name, out)
    with np.errstate(all="ignore"):
        package = gguf.quants.dequantize(flat, gguf.GGMLQuantizationType[type_name])
    expected = np.ascontiguousarray(package, np.float32).view(np.uint32)
    assert np.isfinite(package).all()
    np.testing.assert_array_equal(out.cpu().numpy().view(np.uint32), expected)
    np.testing.assert_array_equal(oracle.dequantize(flat, type_name).view(np.uint32), expected)


@pytest.mark.parametrize("type_name", TYPES)
def test_random_bytes_are_bit_exact(type_name, device):
    check_bits(random_blocks(type_name), type_name, device)


@pytest.mark.parametrize("type_name", TYPES)
def test_extremes_are_bit_exact(type_name, device):
    """All 0x00, all 0xFF, with d subnormal, negative, -0, the largest, the smallest normal."""
    check_bits(extreme_blocks(type_name), type_name, device)


@pytest.mark.parametrize("type_name", TYPES)
def test_every_byte_matters_at_its_place(type_name, device):
    """One random block, then one changed byte per row: catches a swap that random data may hide."""
    block = random_blocks(type_name, 1, 1, seed=3)[0, 0]
    data = np.tile(block, (len(block), 1, 1))
    halves = {at + 1 for at in HALVES.get(type_name, ())} | ({0} if type_name == "MXFP4" else set())
    for i in range(len(block)):
        if i not in halves and type_name not in ("F32", "BF16"):
            data[i, 0, i] ^= 0x55
    check_bits(data, type_name, device)


@pytest.mark.parametrize("type_name", NMSE)
def test_error_of_the_format_is_the_known_one(type_name):
    values = np.random.default_rng(0).normal(size=(32, 1024))
    stored = quantised(values, type_name)
    flat = np.frombuffer(stored.data, np.uint8).reshape(32, -1).copy()
    weight = as_tensor(flat, type_name, "cpu")
    error = dequantize(weight, torch.float32).double().numpy() - values
    assert (error**2).mean() / (values**2).mean() == pytest.approx(NMSE[type_name], rel=0.06)


@pytest.mark.parametrize("type_name", TYPES)
def test_what_the_test_encoders_write_decodes_to_about_the_values(type_name):
    values = np.random.default_rng(1).normal(size=(3, 512))
    stored = quantised(values, type_name)
    flat = np.frombuffer(stored.data, np.uint8).reshape(3, -1).copy()
    decoded = dequantize(as_tensor(flat, type_name, "cpu"), torch.float32).numpy()
    assert ((decoded - values) ** 2).mean() < 0.15


def as_tensor(flat, type_name, device):
    """(rows, row_bytes) as a QuantTensor."""
    qtype = QuantType[type_name]
    in_features = flat.shape[1] // qtype.block_bytes * qtype.block_weights
    data = torch.from_numpy(flat).to(device)
    return QuantTensor(qtype, Layout.FILE, (len(flat), in_features), {"data": data})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("type_name", TYPES)
def test_half_results_round_once(type_name, dtype, device):
    flat = random_blocks(type_name).reshape(ROWS, -1)
    exact = dequantize(as_tensor(flat, type_name, device), torch.float32)
    rounded = dequantize(as_tensor(flat, type_name, device), dtype)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, exact.to(dtype))


@pytest.mark.parametrize("chunk", [1, 256, 700, 1 << 21])
@pytest.mark.parametrize("type_name", ["F32", "Q5_0", "Q4_K", "IQ4_XS"])
def test_chunks_do_not_show(type_name, chunk, device, monkeypatch):
    """Rows and columns are cut into chunks; poisoned output shows a gap."""
    flat = random_blocks(type_name, rows=11, blocks=5).reshape(11, -1)
    expected = dequantize(as_tensor(flat, type_name, device), torch.float32)
    monkeypatch.setattr(kernel, "CHUNK_WEIGHTS", chunk)
    out = torch.full_like(expected, float("nan"))
    kernel.launch_dequantize(torch.from_numpy(flat).to(device), type_name, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("type_name", TYPES)
def test_strided_rows_and_columns(type_name, device):
    weight = as_tensor(random_blocks(type_name, 6, 4).reshape(6, -1), type_name, device)
    block = weight.qtype.block_weights
    whole = dequantize(weight, torch.float32)
    part = weight.rows(1, 5).cols(block, 3 * block)
    assert torch.equal(dequantize(part, torch.float32), whole[1:5, block : 3 * block])
    wide = torch.full((6, 4 * block + 5), float("nan"), device=device)
    kernel.launch_dequantize(weight.planes["data"], type_name, wide[:, : 4 * block])
    assert torch.equal(wide[:, : 4 * block], whole)
    assert wide[:, 4 * block :].isnan().all()


@pytest.mark.parametrize("type_name", [name for name in BLOCK_TYPES if HALVES[name]])
def test_nonfinite_scales_stay_nonfinite(type_name, device):
    """Infinity in d reaches the weights: nothing is silently repaired."""
    data = random_blocks(type_name, 1, 1, seed=5)[0]
    at = HALVES[type_name][0]
    data[0, at : at + 2] = 0x00, 0x7C
    out = dequantize(as_tensor(data, type_name, device), torch.float32)
    assert not out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("type_name", TYPES)
def test_rows_by_number(type_name, dtype, device):
    """In any order, more than once, of rows that are strided; up to 16 and more of them."""
    wide = as_tensor(random_blocks(type_name, 37, 5).reshape(37, -1), type_name, device)
    weight = wide.cols(wide.qtype.block_weights, 4 * wide.qtype.block_weights)
    whole = dequantize(weight, dtype)
    for count, index_dtype in ((1, torch.int32), (16, torch.int64), (41, torch.int32)):
        rows = torch.randint(0, 37, (count,), dtype=index_dtype).to(device)
        rows[0] = 36
        found = dequantize(weight, dtype, rows)
        assert found.is_contiguous()
        assert torch.equal(found, whole[rows.long()])
    assert dequantize(weight, dtype, rows[:0]).shape == (0, weight.shape[1])


@pytest.mark.parametrize("type_name", [qtype.name for qtype in PLANES])
def test_layouts_decode_alike(type_name, device):
    weight = as_tensor(random_blocks(type_name, 19, 5).reshape(19, -1), type_name, device)
    packed = packed_repack(weight, Layout.SOA)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(dequantize(packed, dtype), dequantize(weight, dtype))
    with pytest.raises(ArgumentError, match="layout SOA cannot be cut"):
        dequantize(packed, torch.float32, torch.tensor([0], device=device))


@pytest.mark.parametrize("type_name", TYPES)
def test_stacks_are_their_matrices(type_name, device):
    """A stack, some matrices of it in any order, and a stack with gaps between its rows."""
    matrix = as_tensor(random_blocks(type_name, 15, 4).reshape(15, -1), type_name, device)
    whole = dequantize(matrix, torch.float32).unflatten(0, (3, 5))
    data = matrix.planes["data"].unflatten(0, (3, 5))
    stack = QuantTensor(matrix.qtype, Layout.FILE, (3, 5, matrix.shape[1]), {"data": data})
    assert torch.equal(dequantize(stack, torch.float32), whole)
    index = torch.tensor([2, 0, 2, 1], device=device)
    assert torch.equal(dequantize(stack, torch.bfloat16, index), whole[index].bfloat16())
    assert torch.equal(dequantize(stack.take(index), torch.float32), whole[index])
    width = matrix.qtype.block_weights
    part = stack.rows(1, 4).cols(width, 3 * width)
    assert torch.equal(dequantize(part, torch.float32), whole[:, 1:4, width : 3 * width])
    short = QuantTensor(matrix.qtype, Layout.FILE, (4, *stack.shape[1:]), stack.planes)
    with pytest.raises(ArgumentError, match=r"^dequantize: plane 'data' is \(3, 5, "):
        dequantize(short, torch.float32)


def test_exponents_of_mxfp4_beyond_the_finite(device):
    """As in ggml, byte 255 is a power of two; values beyond float32 are infinite."""
    data = np.full((1, 17), 0x22, np.uint8)  # ones
    for e, expected in ((252, 2.0**125), (254, 2.0**127), (255, np.inf)):
        data[0, 0] = e
        out = dequantize(as_tensor(data, "MXFP4", device), torch.float32)
        assert (out == expected).all()


def test_no_rows(device):
    weight = as_tensor(np.zeros((0, 144), np.uint8), "Q4_K", device)
    assert dequantize(weight, torch.bfloat16).shape == (0, 256)


@pytest.mark.parametrize(
    ("shape", "plane", "dtype"),
    [
        ((2, 256), torch.zeros(2, 143, dtype=torch.uint8), torch.float32),
        ((3, 256), torch.zeros(2, 144, dtype=torch.uint8), torch.float32),
        ((2, 250), torch.zeros(2, 144, dtype=torch.uint8), torch.float32),
        ((2, 300), torch.zeros(2, 144, dtype=torch.uint8), torch.float32),
        ((2, 256), torch.zeros(2, 144, dtype=torch.int8), torch.float32),
        ((2, 256), torch.zeros(288, dtype=torch.uint8), torch.float32),
        ((2, 256), torch.zeros(2, 144, dtype=torch.uint8), torch.float64),
        ((2, 256), torch.zeros(2, 144, dtype=torch.uint8), torch.int32),
    ],
)
def test_wrong_arguments(shape, plane, dtype):
    weight = QuantTensor(QuantType.Q4_K, Layout.FILE, shape, {"data": plane})
    with pytest.raises(ArgumentError, match=r"^dequantize: "):
        dequantize(weight, dtype)
