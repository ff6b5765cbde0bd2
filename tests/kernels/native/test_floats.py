"""Decoding of every GGUF type, and products of weights that are not rounded or stay in file layout.

Oracles: the `gguf` package and ops/dequantize_torch.py for decoding, bit for bit; float64 for
products, with the error that the number of float32 additions of a sum allows.
"""

import ctypes
import mmap

import gguf
import numpy as np
import pytest
import torch

from tests.packed_weights import HALVES
from tiercel.kernels.native import abi
from tiercel.kernels.native.library import load_variant, make_pool, variants
from tiercel.ops import dequantize_torch
from tiercel.quant_types import QuantType

TYPES = [qtype.name for qtype in QuantType if qtype.is_ggml]
BLOCK_TYPES = [name for name in TYPES if not QuantType[name].is_float]
FLOAT_TYPES = [name for name in TYPES if QuantType[name].is_float]
TILE_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]
ROUNDED_TYPES = ["Q2_K", "Q3_K", "IQ2_XXS", "MXFP4"]  # quantised types without tiles
EPS = 2.0**-24  # of one float32 rounding
PAGE = mmap.PAGESIZE


@pytest.fixture(params=variants())
def lib(request):
    return load_variant(request.param)


# ---- weights ----


def random_rows(type_name, rows, cols, seed=0):
    """(rows, row_bytes) random bytes of finite weights, d of both signs, some subnormal."""
    qtype = QuantType[type_name]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, cols // qtype.block_weights, qtype.block_bytes), np.uint8)
    for at in HALVES.get(type_name, ()):
        data[..., at + 1] &= 0xBF  # exponents below 2
    if type_name in ("F32", "BF16"):
        data[..., -1] &= 0xBF
    if type_name == "MXFP4":
        data[..., 0] = np.minimum(data[..., 0], 252)
    return data.reshape(rows, -1)


def usual_rows(type_name, rows, cols, seed=0):
    """(rows, row_bytes) of weights near 1, so that a float32 sum of them is meaningful."""
    rng = np.random.default_rng(seed)
    if type_name == "F32":
        return rng.normal(size=(rows, cols)).astype(np.float32).view(np.uint8)
    if type_name == "F16":
        return rng.normal(size=(rows, cols)).astype(np.float16).view(np.uint8)
    if type_name == "BF16":
        wide = rng.normal(size=(rows, cols)).astype(np.float32).view(np.uint32)
        return (wide >> 16).astype(np.uint16).view(np.uint8)
    qtype = QuantType[type_name]
    data = random_rows(type_name, rows, cols, seed).reshape(rows, -1, qtype.block_bytes)
    for at in HALVES[type_name]:
        d = rng.uniform(0.01, 0.1, data.shape[:2]) * rng.choice([-1, 1], data.shape[:2])
        data[..., at : at + 2] = d.astype(np.float16)[..., None].view(np.uint8)
    if type_name == "MXFP4":
        data[..., 0] = rng.integers(120, 129, data.shape[:2])
    return data.reshape(rows, -1)


def extreme_rows(type_name):
    """(rows, block_bytes): the corners of the format, one block per row."""
    block_bytes = QuantType[type_name].block_bytes
    rows = []
    for fill in (0x00, 0xFF):
        for bits in (0x0001, 0x8001, 0x03FF, 0x8000, 0x0000, 0x7BFF, 0xFBFF, 0x0400, 0xBC00):
            block = np.full(block_bytes, fill, np.uint8)
            for at in HALVES.get(type_name, ()):
                block[at : at + 2] = bits & 255, bits >> 8
            if type_name == "MXFP4":
                block[0] = (0, 1, 2, 3, 127, 252)[len(rows) % 6]
            if type_name in ("F32", "BF16"):
                block[-1] &= 0xBF
            rows.append(block)
    return np.stack(rows)


def decoded(type_name, rows):
    """The rows as float32: the package's floats, of which the operator's bits are checked too."""
    with np.errstate(all="ignore"):
        package = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type_name])
    package = np.ascontiguousarray(package, np.float32)
    out = torch.full(package.shape, float("nan"))
    dequantize_torch.launch_dequantize(torch.from_numpy(rows.copy()), type_name, out)
    np.testing.assert_array_equal(bits(package), bits(out.numpy()))
    return package


def bits(values):
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


class Matrix:
    """Bytes of a matrix at an address that is aligned to nothing, and its `tc_weight`."""

    def __init__(self, type_name, data, cols, layout=abi.FILE, rows=None):
        self.rows, self.cols = len(data) if rows is None else rows, cols
        room = np.full(data.nbytes + 65, 0xEE, np.uint8)
        start = 1 + -room.ctypes.data % 64
        self.bytes = room[start : start + data.nbytes]
        self.bytes[:] = data.reshape(-1)
        self.weight = self.at(type_name, self.bytes.ctypes.data, layout, data.nbytes)
        self.weight.room = room  # lives as long as the weight

    def at(self, type_name, address, layout, num_bytes):
        row_bytes = num_bytes // self.rows if layout == abi.FILE else 0
        ggml_id = QuantType[type_name].ggml_id
        return abi.Weight(address, self.rows, self.cols, row_bytes, ggml_id, layout)


def pool(lib):
    return make_pool(2, lib).handle


def dequantize(lib, weight, ids=None, num_rows=None):
    ids = None if ids is None else np.asarray(ids, np.int32)
    num_rows = len(ids) if ids is not None else weight.rows if num_rows is None else num_rows
    out = np.full((num_rows + 1, weight.cols), np.nan, np.float32)
    at = None if ids is None else ids.ctypes.data
    assert lib.lib.tc_dequantize(pool(lib), weight, at, num_rows, out.ctypes.data) == 0
    assert np.isnan(out[-1]).all()
    return out[:-1]


def linear(lib, weights, x, rounds=False):
    """Multiply x (T, cols) by matrices end to end: (T, sum of rows)."""
    array = (abi.Weight * len(weights))(*weights)
    y = np.full((len(x) + 1, sum(weight.rows for weight in weights)), np.nan, np.float32)
    x = np.ascontiguousarray(x, np.float32)
    scratch = None
    if rounds:
        scratch = np.full(len(x) * lib.lib.tc_rounded_bytes(x.shape[1]) + 64, 0xEE, np.uint8)
        scratch = scratch[-scratch.ctypes.data % 64 :]
    at = None if scratch is None else scratch.ctypes.data
    lib.lib.tc_linear(
        pool(lib), array, len(array), x.ctypes.data, len(x), rounds, at, y.ctypes.data
    )
    assert np.isnan(y[-1]).all()
    return y[:-1]


def tokens(num_tokens, cols, seed=0):
    """Tokens of different sizes, with outliers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_tokens, cols)) * 10.0 ** rng.uniform(-2, 1, (num_tokens, 1))
    x[:, ::37] *= 20
    return x.astype(np.float32)


# ---- decoding ----


@pytest.mark.parametrize("type_name", TYPES)
def test_decoded_bits_are_those_of_the_package_and_the_operator(lib, type_name):
    cols = 521 if type_name in FLOAT_TYPES else 768
    for rows in (random_rows(type_name, 7, cols), extreme_rows(type_name)):
        num_cols = rows.shape[1] // QuantType[type_name].block_bytes
        num_cols *= QuantType[type_name].block_weights
        out = dequantize(lib, Matrix(type_name, rows, num_cols).weight)
        np.testing.assert_array_equal(bits(out), bits(decoded(type_name, rows)))


@pytest.mark.parametrize("type_name", TYPES)
def test_every_byte_of_a_block_matters_at_its_place(lib, type_name):
    block = random_rows(type_name, 1, QuantType[type_name].block_weights, seed=3)[0]
    rows = np.tile(block, (len(block), 1))
    fixed = {at + 1 for at in HALVES.get(type_name, ())} | ({0} if type_name == "MXFP4" else set())
    for i in set(range(len(block))) - fixed:
        rows[i, i] ^= 0x15
    out = dequantize(lib, Matrix(type_name, rows, QuantType[type_name].block_weights).weight)
    np.testing.assert_array_equal(bits(out), bits(decoded(type_name, rows)))


@pytest.mark.parametrize("type_name", ["F16", "Q4_K", "Q8_0"])
@pytest.mark.parametrize("cols", [256, 4608])
def test_rows_are_chosen_by_ids_or_are_the_first(lib, type_name, cols):
    rows = random_rows(type_name, 41, cols)
    matrix = Matrix(type_name, rows, cols)
    expected = decoded(type_name, rows)
    ids = [40, 3, 3, 0, 17, *range(30)]
    np.testing.assert_array_equal(bits(dequantize(lib, matrix.weight, ids)), bits(expected[ids]))
    first = dequantize(lib, matrix.weight, num_rows=38)
    np.testing.assert_array_equal(bits(first), bits(expected[:38]))
    assert dequantize(lib, matrix.weight, ids=[]).shape == (0, cols)


def test_types_of_files_are_known_and_no_others(lib):
    known = {QuantType[name].ggml_id for name in TYPES}
    assert {i for i in range(-4, 64) if lib.lib.tc_is_supported(i)} == known
    out = np.full(32, np.nan, np.float32)
    weight = abi.Weight(out.ctypes.data, 1, 32, 128, 24, abi.FILE)  # I8
    assert lib.lib.tc_dequantize(pool(lib), weight, None, 1, out.ctypes.data) == -1
    assert np.isnan(out).all()


# ---- products with floats ----


def check_product(actual, weights, x, num_additions):
    """|error| <= additions * eps * sum of |w| |x|, for each result."""
    weights, x = weights.astype(np.float64), x.astype(np.float64)
    allowed = num_additions * EPS * np.einsum("tc,rc->tr", np.abs(x), np.abs(weights))
    error = np.abs(actual - np.einsum("tc,rc->tr", x, weights))
    assert (error <= allowed).all(), (error / allowed).max()
    assert error.max() > 0  # else the oracle saw the same roundings


FILE_ADDITIONS = 1024 // 8 + 1 + 3 + 3 + 1  # of a lane, the lanes, the blocks; plain C: a product


@pytest.mark.parametrize(
    ("type_name", "rows", "cols"),
    [
        *((name, 37, 2077) for name in FLOAT_TYPES),
        *((name, 5, 3) for name in FLOAT_TYPES),
        *((name, 26, 1280) for name in BLOCK_TYPES),
        ("MXFP4", 9, 1120),
    ],
)
def test_file_rows_times_floats(lib, type_name, rows, cols):
    data = usual_rows(type_name, rows, cols)
    matrix, weights = Matrix(type_name, data, cols), decoded(type_name, data)
    for num_tokens in (1, 2, 3, 5, 16):
        x = tokens(num_tokens, cols)
        check_product(linear(lib, [matrix.weight], x), weights, x, FILE_ADDITIONS)


@pytest.mark.parametrize("type_name", [*FLOAT_TYPES, "Q3_K"])
def test_bits_of_file_products_do_not_depend_on_the_tokens_beside(lib, type_name):
    cols = 1280 if type_name == "Q3_K" else 2077
    matrix = Matrix(type_name, usual_rows(type_name, 13, cols), cols)
    x = tokens(512, cols)
    check_alone(lib, [matrix.weight], x, rounds=False)


def check_alone(lib, weights, x, rounds):
    together = linear(lib, weights, x, rounds)
    for first, count in ((0, 1), (511, 1), (95, 3), (96, 2), (7, 16), (90, 104), (4, 5), (200, 4)):
        alone = linear(lib, weights, x[first : first + count], rounds)
        np.testing.assert_array_equal(bits(alone), bits(together[first : first + count]))


@pytest.mark.parametrize("type_name", [*FLOAT_TYPES, "Q2_K"])
@pytest.mark.parametrize("num_tokens", [3, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(lib, type_name, num_tokens, value):
    cols = 1280 if type_name == "Q2_K" else 1037
    matrix = Matrix(type_name, usual_rows(type_name, 11, cols), cols)
    x = tokens(num_tokens, cols)
    finite = linear(lib, [matrix.weight], x)
    for col in (0, 517, cols - 1):
        changed = x.copy()
        changed[1, col] = value
        y = linear(lib, [matrix.weight], changed)
        assert not np.isfinite(y[1]).any()
        others = np.arange(num_tokens) != 1
        np.testing.assert_array_equal(bits(y[others]), bits(finite[others]))


# ---- tiles ----


def random_tiles(type_name, rows, cols, seed=0):
    """Random tiles: their bytes, and the (rows, cols) floats that native.h says they are."""
    num_tiles, (groups, shapes, decode) = -(-rows // 8), RECORDS[type_name]
    rng = np.random.default_rng(seed)
    header, inner = shapes
    num_records = cols // 32 // groups
    header_fields = {
        name: rng.uniform(0.01, 0.1, (num_tiles, num_records, 8)).astype(np.float16)
        * rng.choice([-1, 1], 8).astype(np.float16)
        for name in header
    }
    fields = {
        name: rng.integers(0, most, (num_tiles, num_records, groups, size), np.uint8)
        for name, size, most in inner
    }
    body = np.concatenate([fields[name] for name, _, _ in inner], -1)
    parts = [header_fields[name].view(np.uint8) for name in header]
    data = np.concatenate([*parts, body.reshape(num_tiles, num_records, -1)], -1)
    wide = {k: v.astype(np.float32)[:, :, None] for k, v in header_fields.items()}
    w = decode({**wide, **fields})  # (tiles, records, groups, 32, 8)
    w = w.transpose(0, 4, 1, 2, 3).reshape(num_tiles * 8, cols)
    return data, w[:rows]


def codes4(f, high=None):
    """(..., 32, 8) integers of columns and rows."""
    packed = f["codes4"].reshape(*f["codes4"].shape[:-1], 4, 8, 4)  # vector, row, byte
    q = np.stack((packed & 15, packed >> 4), -4)  # half, vector, row, byte
    return q.swapaxes(-1, -2).reshape(*q.shape[:-4], 32, 8).astype(np.int32)


def codes8(f):
    packed = f["codes8"].reshape(*f["codes8"].shape[:-1], 8, 8, 4)
    q = packed.swapaxes(-1, -2).reshape(*packed.shape[:-3], 32, 8)
    return q.view(np.int8).astype(np.float32)


def codes5(f):
    packed = f["bit5"].reshape(*f["bit5"].shape[:-1], 1, 8, 4)
    bit = packed >> np.arange(8, dtype=np.uint8)[:, None, None] & 1  # s, row, byte
    bit = bit.swapaxes(-1, -2).reshape(*bit.shape[:-3], 32, 8)
    return codes4(f) + 16 * bit.astype(np.int32)


def codes6(f):
    packed = f["bits56"].reshape(*f["bits56"].shape[:-1], 2, 1, 8, 4)
    two = packed >> (2 * np.arange(4, dtype=np.uint8))[:, None, None] & 3  # half, i, row, byte
    two = two.swapaxes(-1, -2).reshape(*two.shape[:-4], 32, 8)
    return codes4(f) + 16 * two.astype(np.int32)


def row8(f, name, dtype):
    """A field of one byte per row, (..., 1, 8) float32."""
    return f[name].view(dtype).astype(np.float32)[..., None, :]


def iq4(q):
    return np.array(dequantize_torch.IQ4_VALUES, np.float32)[q]


def both(f, name):
    """A header field beside columns."""
    return f[name][..., None, :]


def scaled(f, q, dtype=np.int8):
    return (both(f, "d") * row8(f, "sc", dtype)) * q


def with_min(f, q):
    return scaled(f, q, np.uint8) - both(f, "dmin") * row8(f, "mn", np.uint8)


def decode_q6(f):
    sc = f["sc"].view(np.int8).astype(np.float32)
    sc = np.repeat(sc.reshape(*sc.shape[:-1], 2, 8), 16, axis=-2)
    return (both(f, "d") * sc) * (codes6(f) - 32).astype(np.float32)


def f32(q):
    return q.astype(np.float32)


D, DM, DMIN = ("d",), ("d", "m"), ("d", "dmin")
CODES4, BIT5 = ("codes4", 128, 256), ("bit5", 32, 256)
SCALES = (("sc", 8, 64), ("mn", 8, 64))
# Groups of a record; its header and the (name, bytes, values) of a group; its floats.
RECORDS = {
    "Q4_0": (1, (D, (CODES4,)), lambda f: both(f, "d") * f32(codes4(f) - 8)),
    "Q4_1": (1, (DM, (CODES4,)), lambda f: both(f, "d") * f32(codes4(f)) + both(f, "m")),
    "Q5_0": (1, (D, (BIT5, CODES4)), lambda f: both(f, "d") * f32(codes5(f) - 16)),
    "Q5_1": (1, (DM, (BIT5, CODES4)), lambda f: both(f, "d") * f32(codes5(f)) + both(f, "m")),
    "Q8_0": (1, (D, (("codes8", 256, 256),)), lambda f: both(f, "d") * codes8(f)),
    "IQ4_NL": (1, (D, (CODES4,)), lambda f: both(f, "d") * iq4(codes4(f))),
    "Q4_K": (8, (DMIN, (*SCALES, CODES4)), lambda f: with_min(f, f32(codes4(f)))),
    "Q5_K": (8, (DMIN, (*SCALES, BIT5, CODES4)), lambda f: with_min(f, f32(codes5(f)))),
    "Q6_K": (8, (D, (("sc", 16, 256), ("bits56", 64, 256), CODES4)), decode_q6),
    "IQ4_XS": (8, (D, (("sc", 8, 256), CODES4)), lambda f: scaled(f, iq4(codes4(f)))),
}
TILE_ADDITIONS = 256 + 5 + 1  # columns of a block, blocks; plain C: a product


def tile_matrix(type_name, rows, cols):
    data, expected = random_tiles(type_name, rows, cols)
    return Matrix(type_name, data, cols, abi.TILES, rows), expected


@pytest.mark.parametrize("type_name", TILE_TYPES)
def test_columns_of_tiles_are_the_floats_of_the_layout(lib, type_name):
    matrix, expected = tile_matrix(type_name, 27, 512)
    y = linear(lib, [matrix.weight], np.eye(512, dtype=np.float32))
    np.testing.assert_array_equal(y.T, expected)


@pytest.mark.parametrize("type_name", TILE_TYPES)
def test_columns_of_packed_rows_are_the_floats_of_the_file(lib, type_name):
    data = random_rows(type_name, 29, 512)
    file = Matrix(type_name, data, 512)
    num_bytes = lib.lib.tc_tiles_bytes(QuantType[type_name].ggml_id, 29, 512)
    tiles = Matrix(type_name, np.full(num_bytes, 0xEE, np.uint8), 512, abi.TILES, 29)
    lib.lib.tc_pack_tiles(pool(lib), file.weight, tiles.bytes.ctypes.data)
    y = linear(lib, [tiles.weight], np.eye(512, dtype=np.float32))
    np.testing.assert_array_equal(y.T, decoded(type_name, data))


@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (8, 256), (43, 1056), (50, 1280)])
@pytest.mark.parametrize("type_name", TILE_TYPES)
def test_tiles_times_floats(lib, type_name, rows, cols):
    if cols % 256 and RECORDS[type_name][0] == 8:
        cols = 256 * (cols // 256 + 1)
    matrix, expected = tile_matrix(type_name, rows, cols)
    for num_tokens in (1, 2, 3, 4, 5, 6, 13):
        x = tokens(num_tokens, cols)
        check_product(linear(lib, [matrix.weight], x), expected, x, TILE_ADDITIONS)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q6_K"])
def test_bits_of_tile_products_do_not_depend_on_the_tokens_beside(lib, type_name):
    matrix, _ = tile_matrix(type_name, 19, 1280)
    check_alone(lib, [matrix.weight], tokens(512, 1280), rounds=False)


def test_tiles_keep_what_is_not_finite_in_its_row(lib):
    matrix, _ = tile_matrix("Q4_K", 21, 512)
    x = tokens(8, 512)
    finite = linear(lib, [matrix.weight], x)
    x[2, 300] = np.nan
    y = linear(lib, [matrix.weight], x)
    assert np.isnan(y[2]).all()
    others = np.arange(8) != 2
    np.testing.assert_array_equal(bits(y[others]), bits(finite[others]))


# ---- products with rounded activations ----


def rounded(x):
    """Activations as 8-bit integers and factors of their groups, as native.h says."""
    groups = x.reshape(len(x), -1, 32)
    d = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    q = np.rint(np.divide(groups, d, out=np.zeros_like(groups), where=d > 0))
    return q.astype(np.float64), d.astype(np.float64)


@pytest.mark.parametrize(("rows", "cols"), [(3, 256), (26, 1280), (40, 2304)])
@pytest.mark.parametrize("type_name", ROUNDED_TYPES)
def test_file_rows_times_rounded_activations(lib, type_name, rows, cols):
    data = usual_rows(type_name, rows, cols)
    x = tokens(9, cols)
    x[:, 64:96] = 0
    y = linear(lib, [Matrix(type_name, data, cols).weight], x, rounds=True)
    q, d = rounded(x)
    steps = cols // 16 * 2 + 4  # two fused additions of a half group; factors round
    check_product(y, decoded(type_name, data), (q * d).reshape(len(x), -1), 2 * steps)


@pytest.mark.parametrize("type_name", ROUNDED_TYPES)
def test_bits_of_rounded_products_do_not_depend_on_the_tokens_beside(lib, type_name):
    matrix = Matrix(type_name, usual_rows(type_name, 11, 768), 768)
    check_alone(lib, [matrix.weight], tokens(512, 768), rounds=True)


def test_integer_products_at_the_ends_of_their_range(lib):
    """Every code of IQ2_XXS and every product of it with +-127 is exact."""
    data = usual_rows("IQ2_XXS", 16, 256)
    weights = decoded("IQ2_XXS", data).astype(np.float64)
    x = np.where(weights > 0, 127, -127).astype(np.float32)  # d = 1
    y = linear(lib, [Matrix("IQ2_XXS", data, 256).weight], x, rounds=True)
    np.testing.assert_allclose(y, x @ weights.T, rtol=1e-5, atol=1e-3 * np.abs(y).max())
    np.testing.assert_allclose(np.diag(y), 127 * np.abs(weights).sum(1), rtol=16 * EPS)


# ---- several matrices; ends of memory ----


def test_matrices_end_to_end(lib):
    x = tokens(5, 512)
    names = ["F16", "Q4_K", "F32", "Q2_K"]
    matrices = [Matrix(n, usual_rows(n, 9 + 8 * i, 512), 512) for i, n in enumerate(names)]
    together = linear(lib, [m.weight for m in matrices], x)
    each = [linear(lib, [m.weight], x) for m in matrices]
    np.testing.assert_array_equal(bits(together), bits(np.concatenate(each, 1)))


class Guarded:
    """Bytes that end where no memory may be read."""

    def __init__(self, data):
        pages = -(-data.nbytes // PAGE)
        self.map = mmap.mmap(-1, (pages + 1) * PAGE)
        self.view = (ctypes.c_char * len(self.map)).from_buffer(self.map)
        self.end = ctypes.addressof(self.view) + pages * PAGE
        ctypes.memmove(self.end - data.nbytes, data.ctypes.data, data.nbytes)
        self.address = self.end - data.nbytes
        self._protect(0)

    def _protect(self, how):
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(self.end), ctypes.c_size_t(PAGE), how) == 0

    def close(self):
        self._protect(3)
        del self.view
        self.map.close()


@pytest.mark.parametrize("type_name", TYPES)
def test_nothing_is_read_beyond_the_weights(lib, type_name):
    rows, cols = 11, 261 if type_name in FLOAT_TYPES else 256
    data = usual_rows(type_name, rows, cols)
    x = tokens(5, cols)
    matrix = Matrix(type_name, data, cols)
    guarded = Guarded(data)
    weight = matrix.at(type_name, guarded.address, abi.FILE, data.nbytes)
    np.testing.assert_array_equal(dequantize(lib, weight), decoded(type_name, data))
    for count in (1, 5):
        expected = linear(lib, [matrix.weight], x[:count])
        np.testing.assert_array_equal(linear(lib, [weight], x[:count]), expected)
    if type_name in ROUNDED_TYPES:
        expected = linear(lib, [matrix.weight], x, rounds=True)
        np.testing.assert_array_equal(linear(lib, [weight], x, rounds=True), expected)
    guarded.close()


@pytest.mark.parametrize("type_name", TILE_TYPES)
def test_nothing_is_read_beyond_the_tiles(lib, type_name):
    data, _ = random_tiles(type_name, 24, 256)
    matrix = Matrix(type_name, data, 256, abi.TILES, 24)
    x = tokens(2, 256)
    guarded = Guarded(data)
    weight = matrix.at(type_name, guarded.address, abi.TILES, data.nbytes)
    expected = linear(lib, [matrix.weight], x)
    np.testing.assert_array_equal(linear(lib, [weight], x), expected)
    guarded.close()


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_nothing_is_read_beyond_the_activations(lib, num_tokens):
    x = tokens(num_tokens, 261)
    guarded = Guarded(x)
    matrix = Matrix("F16", usual_rows("F16", 11, 261), 261)
    y = np.full((num_tokens, 11), np.nan, np.float32)
    lib.lib.tc_linear(
        pool(lib), matrix.weight, 1, guarded.address, num_tokens, False, None, y.ctypes.data
    )
    np.testing.assert_array_equal(y, linear(lib, [matrix.weight], x))
    guarded.close()
