"""Products of tiles with 8-bit activations: layout, rounding, accuracy, and equal bits."""

import ctypes
import mmap

import numpy as np
import pytest
import torch

from tests.packed_weights import HALVES, make_weight
from tiercel.kernels.native import abi
from tiercel.kernels.native.library import load_variant, make_pool, variants
from tiercel.ops.dequantize_torch import IQ4_VALUES, launch_dequantize
from tiercel.quant_types import QuantType

IDS = {
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8,
    "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23,
}  # fmt: skip
TYPES = tuple(IDS)
WITHOUT_TILES = {"F32": 0, "F16": 1, "BF16": 30, "Q2_K": 10, "Q3_K": 11, "IQ2_XXS": 16, "MXFP4": 39}
TOLERANCE = 1e-6  # of the sum of magnitudes: a rounding of 2^-24 in each step of a short chain
SHAPES = [(7, 256), (37, 1536)]  # odd and partial tiles, more than one block of columns
MOST_TOKENS = 135  # more than a block of tokens


@pytest.fixture(params=variants(), scope="module")
def native(request):
    """Each variant that this machine runs."""
    return load_variant(request.param)


def blocks_of(type_name, rows, cols, seed=0):
    """(rows, row_bytes) uint8 of a file."""
    weight = make_weight(QuantType[type_name], rows, cols, "cpu", seed)
    return np.ascontiguousarray(weight.planes["data"].numpy())


def dequantized(flat, type_name):
    """(rows, cols) float32."""
    qtype = QuantType[type_name]
    cols = flat.shape[1] // qtype.block_bytes * qtype.block_weights
    out = torch.full((len(flat), cols), float("nan"))
    launch_dequantize(torch.from_numpy(flat), type_name, out)
    return out.numpy()


def pack(native, flat, type_name, num_threads=1, out=None):
    """The weight of a file's rows as tiles, over bytes of 0xFF; `tiles` is its memory."""
    qtype = QuantType[type_name]
    rows, cols = len(flat), flat.shape[1] // qtype.block_bytes * qtype.block_weights
    num_bytes = native.lib.tc_tiles_bytes(IDS[type_name], rows, cols)
    tiles = np.full(num_bytes, 0xFF, np.uint8) if out is None else out(num_bytes)
    file = abi.Weight(flat.ctypes.data, rows, cols, flat.shape[1], IDS[type_name], abi.FILE)
    pool = make_pool(num_threads, native)
    native.lib.tc_pack_tiles(pool.handle, ctypes.byref(file), tiles.ctypes.data)
    weight = abi.Weight(tiles.ctypes.data, rows, cols, 0, IDS[type_name], abi.TILES)
    weight.tiles = tiles  # lives as long as the weight
    return weight


def linear(native, weights, x, num_threads=1):
    """The product (T, rows), over NaN, and the rounded rows (T, bytes)."""
    tokens, cols = x.shape
    x = np.ascontiguousarray(x, np.float32)
    scratch = np.full((tokens, native.lib.tc_rounded_bytes(cols)), 0xFF, np.uint8)
    y = np.full((tokens, sum(weight.rows for weight in weights)), np.nan, np.float32)
    array = (abi.Weight * len(weights))(*weights)
    arguments = (x.ctypes.data, tokens, 1, scratch.ctypes.data, y.ctypes.data)
    native.lib.tc_linear(make_pool(num_threads, native).handle, array, len(weights), *arguments)
    return y, scratch


def rounded(x):
    """The q (T, groups, 32) int8 and d (T, groups) float32 of native.h."""
    groups = np.asarray(x, np.float32).reshape(len(x), -1, 32)
    d = np.abs(groups).max(axis=-1) / np.float32(127)
    with np.errstate(invalid="ignore"):
        q = np.where(d[..., None] == 0, 0, np.rint(groups / d[..., None]))
    return q.astype(np.int8), d


def tokens_of(count, cols, seed=1):
    """Rows of different size, with outliers and a group of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, cols)) * 10.0 ** rng.uniform(-3, 2, (count, 1))
    x[:, ::97] *= 50
    x[:, 32:64] = 0
    return x.astype(np.float32)


def check_product(y, x, weight):
    """Compare with float64 products of the dequantised weights and activations."""
    q, d = rounded(x)
    values = (q * d[..., None].astype(np.float64)).reshape(x.shape)
    weight = weight.astype(np.float64)
    error = np.abs(y - values @ weight.T)
    assert np.all(error <= TOLERANCE * (np.abs(values) @ np.abs(weight.T)) + 1e-40)


# ---- tiles ----


def unpacked_tiles(tiles, type_name, rows, cols):
    """(rows, cols) float32 of tiles, read as native.h describes them."""
    records = 256 if type_name.endswith(("_K", "_XS")) else 32
    record = tiles.reshape(-(-rows // 8), cols // records, -1)
    at = 0

    def take(num_bytes, dtype=np.uint8):
        nonlocal at
        part = np.ascontiguousarray(record[..., at : at + num_bytes]).view(dtype)
        at += num_bytes
        return part

    has_min = type_name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    d = take(16, np.float16).astype(np.float32)
    m = take(16, np.float16).astype(np.float32) if has_min else None
    groups = []
    for _ in range(records // 32):
        scale, minimum = d[..., None], m[..., None] if has_min else None  # (tiles, records, 8, 1)
        if type_name in ("Q4_K", "Q5_K"):
            scale = scale * take(8)[..., None].astype(np.float32)
            minimum = -(minimum * take(8)[..., None].astype(np.float32))
        if type_name == "Q6_K":
            halves = take(16, np.int8).reshape(*d.shape[:2], 2, 8).swapaxes(2, 3)
            scale = scale * np.repeat(halves.astype(np.float32), 16, axis=-1)
        if type_name == "IQ4_XS":
            scale = scale * take(8, np.int8)[..., None].astype(np.float32)
        value = group_codes(take, type_name, d.shape[:2]) * scale
        groups.append(value + minimum if has_min else value)
    whole = np.concatenate(groups, axis=-1)  # (tiles, records, 8, columns of a record)
    return whole.transpose(0, 2, 1, 3).reshape(-1, cols)[:rows]


def group_codes(take, type_name, shape):
    """The codes of one group as floats without offset: (tiles, records, 8, 32)."""
    codes = np.zeros((*shape, 8, 32), np.int32)
    if type_name == "Q8_0":
        vectors = take(256, np.int8).reshape(*shape, 8, 8, 4)  # step, row, j
        return vectors.swapaxes(2, 3).reshape(*shape, 8, 32).astype(np.float32)
    if type_name in ("Q5_0", "Q5_1", "Q5_K"):
        bits = take(32).reshape(*shape, 8, 4)
        for c in range(32):
            codes[..., c] |= (bits[..., c % 4].astype(np.int32) >> c // 4 & 1) << 4
    if type_name == "Q6_K":
        bits = take(64).reshape(*shape, 2, 8, 4)
        for c in range(32):
            part = bits[:, :, c // 16, :, c % 4].astype(np.int32)
            codes[..., c] |= (part >> 2 * (c % 16 // 4) & 3) << 4
    nibbles = take(128).reshape(*shape, 4, 8, 4).astype(np.int32)
    for c in range(32):
        codes[..., c] |= nibbles[:, :, c % 16 // 4, :, c % 4] >> 4 * (c // 16) & 15
    if type_name.startswith("IQ4"):
        return np.array(IQ4_VALUES, np.float32)[codes]
    offset = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32}.get(type_name, 0)
    return (codes - offset).astype(np.float32)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_tiles_have_the_weights_of_the_file(native, type_name, num_threads):
    rows, cols = 77, 768
    flat = blocks_of(type_name, rows, cols)
    tiles = pack(native, flat, type_name, num_threads).tiles
    expected = dequantized(flat, type_name)
    found = unpacked_tiles(tiles, type_name, rows, cols)
    np.testing.assert_array_equal(found, expected)
    partial = unpacked_tiles(tiles, type_name, 80, cols)[rows:]
    np.testing.assert_array_equal(partial, 0)


@pytest.mark.parametrize("type_name", TYPES)
def test_shapes_without_tiles(native, type_name):
    block = QuantType[type_name].block_weights
    tiles_bytes = native.lib.tc_tiles_bytes
    assert tiles_bytes(IDS[type_name], 9, block) == 2 * tiles_bytes(IDS[type_name], 8, block) > 0
    assert tiles_bytes(IDS[type_name], 8, block + 16) == 0
    assert tiles_bytes(IDS[type_name], 0, block) == 0


@pytest.mark.parametrize("type_name", WITHOUT_TILES)
def test_types_without_tiles(native, type_name):
    assert native.lib.tc_tiles_bytes(WITHOUT_TILES[type_name], 8, 256) == 0


# ---- rounding ----


def test_rounding(native):
    rng = np.random.default_rng(5)
    x = tokens_of(9, 4448)  # more than one piece, the last not whole
    x[3] = rng.integers(-254, 255, x.shape[1]) / 2  # halves
    x[3, ::32] = 127
    x[4, 64:96] = rng.integers(-9, 10, 32) * np.float32(1e-45) * 20  # d is subnormal
    x[4, 64] = 190e-45
    weight = pack(native, blocks_of("Q8_0", 8, 4448), "Q8_0")
    _, scratch = linear(native, [weight], x)
    q, d = rounded(x)
    q[4, 2] = np.clip(np.rint(x[4, 64:96] / d[4, 2]), -127, 127)
    cols, groups = 4448, 4448 // 32
    found = scratch[:, : cols + 12 * groups]
    halves = q.reshape(9, -1, 16).sum(axis=-1, dtype=np.int16)
    sums = halves.reshape(9, -1, 2).sum(axis=-1).astype(np.float32)
    np.testing.assert_array_equal(found[:, :cols].view(np.int8), q.reshape(9, -1))
    scales = np.ascontiguousarray(found[:, cols : cols + 8 * groups]).view(np.float32)
    np.testing.assert_array_equal(scales[:, :groups], d)
    np.testing.assert_array_equal(scales[:, groups:], d * sums)
    np.testing.assert_array_equal(
        np.ascontiguousarray(found[:, cols + 8 * groups :]).view(np.int16), halves
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(native, value):
    weight = pack(native, blocks_of("Q4_K", 40, 512), "Q4_K")
    x = tokens_of(3, 512)
    x[1, 300] = value
    y, _ = linear(native, [weight], x)
    assert not np.isfinite(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()


# ---- products ----


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_product_is_accurate_with_the_same_bits_in_any_batch(native, type_name, rows, cols):
    flat = blocks_of(type_name, rows, cols)
    weight = pack(native, flat, type_name)
    x = tokens_of(MOST_TOKENS, cols)
    y, _ = linear(native, [weight], x)
    check_product(y, x, dequantized(flat, type_name))
    for tokens in range(1, 21):
        part, _ = linear(native, [weight], x[:tokens])
        np.testing.assert_array_equal(part.view(np.uint32), y[:tokens].view(np.uint32))


@pytest.mark.parametrize("tokens", [1, 6, 131])
def test_matrices_end_to_end_and_threads(native, tokens):
    cols, sizes = 1024, (300, 8, 45, 1100)
    types = ("Q4_K", "Q6_K", "Q8_0", "Q4_0")
    parts = zip(types, sizes, strict=True)
    weights = [pack(native, blocks_of(name, rows, cols, rows), name) for name, rows in parts]
    x = tokens_of(tokens, cols)
    y, _ = linear(native, weights, x, num_threads=2)
    single = np.concatenate([linear(native, [weight], x)[0] for weight in weights], axis=1)
    np.testing.assert_array_equal(y.view(np.uint32), single.view(np.uint32))


def extreme_rows(type_name, cols):
    """(9, row_bytes): rows with all bytes equal, the float16 numbers finite."""
    qtype = QuantType[type_name]
    flat = blocks_of(type_name, 9, cols).reshape(9, -1, qtype.block_bytes)
    for row, byte in enumerate((0xFF, 0x00, 0x80, 0x7F, 0x0F, 0xF0, 0x81, 0x55, 0xAA)):
        flat[row] = byte
        for at in HALVES[type_name]:
            flat[row, :, at : at + 2] = 0x00, 0x3C if at == HALVES[type_name][0] else 0xBC
    return np.ascontiguousarray(flat.reshape(9, -1))


@pytest.mark.parametrize("type_name", TYPES)
def test_extreme_codes_do_not_overflow(native, type_name):
    cols = 1024
    flat = extreme_rows(type_name, cols)
    packed = pack(native, flat, type_name)
    weight = dequantized(flat, type_name)
    signs = np.where(np.arange(cols) % 2, 1.0, -1.0)
    x = np.stack([np.ones(cols), -np.ones(cols), signs, -signs] * 3).astype(np.float32)
    for tokens in (1, 2, 4, 12):
        y, _ = linear(native, [packed], x[:tokens])
        check_product(y, x[:tokens], weight)


def test_rows_of_zeros_are_zero(native):
    weight = pack(native, blocks_of("Q5_0", 21, 320), "Q5_0")
    y, _ = linear(native, [weight], np.zeros((5, 320), np.float32))
    np.testing.assert_array_equal(y, 0)


# ---- memory ----


class Guarded:
    """Arrays that end where a page follows that nobody may touch."""

    def __init__(self):
        self.maps = []
        self.libc = ctypes.CDLL(None, use_errno=True)

    def __call__(self, num_bytes):
        """(num_bytes) uint8, of 0xFF."""
        page = mmap.PAGESIZE
        size = -(-num_bytes // page) * page
        memory = mmap.mmap(-1, size + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert self.libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) == 0
        self.maps.append(memory)
        out = np.frombuffer(memory, np.uint8, num_bytes, size - num_bytes)
        out[:] = 0xFF
        return out

    def copy(self, array):
        """A guarded copy."""
        out = self(array.nbytes).view(array.dtype).reshape(array.shape)
        out[:] = array
        return out


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="mprotect is POSIX's.")
@pytest.mark.parametrize("type_name", TYPES)
def test_nothing_is_read_or_written_beyond_its_end(native, type_name):
    rows, cols = 21, 1280
    guarded = Guarded()
    flat = guarded.copy(blocks_of(type_name, rows, cols))
    weight = pack(native, flat, type_name, out=guarded)
    for tokens in (1, 3, 13):
        x = guarded.copy(tokens_of(tokens, cols))
        scratch = guarded(tokens * native.lib.tc_rounded_bytes(cols))
        y = guarded(4 * tokens * rows)
        arguments = (x.ctypes.data, tokens, 1, scratch.ctypes.data, y.ctypes.data)
        pool = make_pool(1, native)
        native.lib.tc_linear(pool.handle, ctypes.byref(weight), 1, *arguments)
        check_product(y.view(np.float32).reshape(tokens, rows), x, dequantized(flat, type_name))


# ---- variants ----


def test_variants_have_the_same_bits():
    fused = [load_variant(name) for name in variants() if name != "plain"]
    if len(fused) < 2:
        pytest.skip("This machine runs one variant with fused products.")
    x = tokens_of(7, 768)
    for type_name in TYPES:
        flat = blocks_of(type_name, 37, 768)
        found = []
        for native in fused:
            weight = pack(native, flat, type_name)
            found.append(linear(native, [weight], x)[0])
        for other in found[1:]:
            np.testing.assert_array_equal(other.view(np.uint32), found[0].view(np.uint32))
