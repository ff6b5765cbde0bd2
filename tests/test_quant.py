"""Storage types against the `gguf` package's table, and the cuts of a `QuantTensor`."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tests.gguf_files import ENCODERS
from tiercel.errors import ArgumentError, ModelFormatError
from tiercel.quant import QuantTensor
from tiercel.quant_types import GGML_TYPES, Layout, QuantType

FLOATS = {"F32", "F16", "BF16"}
GGML = [qtype for qtype in QuantType if qtype.is_ggml]
IN_GGML = [qtype for qtype in QuantType if qtype.ggml_id >= 0]
STORAGE = {"F8_E4M3", "F8_E8M0", "U8", "I8", "I32", "I64"}


def make_case(qtype, rows=5, blocks=3):
    """Random weights in a storage type, and the tensor over their bytes."""
    width = blocks * max(qtype.block_weights, 2)
    values = np.random.default_rng(1).normal(size=(rows, width))
    encode, per_block = ENCODERS[qtype.name]
    data = encode(values.reshape(-1, per_block)).reshape(rows, -1)
    planes = {"data": torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).copy())}
    return QuantTensor(qtype, Layout.FILE, (rows, width), planes)


def weights(tensor):
    """(out, in) float32, by the `gguf` package."""
    data = tensor.planes["data"].contiguous().numpy()
    if tensor.qtype.name in ("F32", "F16"):
        dtype = np.float32 if tensor.qtype.name == "F32" else np.float16
        return data.view(dtype).astype(np.float32)
    return dequantize(data, GGMLQuantizationType(tensor.qtype.ggml_id))


@pytest.mark.parametrize("qtype", IN_GGML, ids=lambda q: q.name)
def test_table_agrees_with_the_gguf_package(qtype):
    theirs = GGMLQuantizationType[qtype.name]
    assert qtype.ggml_id == theirs.value
    assert (qtype.block_weights, qtype.block_bytes) == GGML_QUANT_SIZES[theirs]
    assert GGML_TYPES[theirs.value] is qtype
    assert qtype.is_float == (qtype.name in FLOATS)
    assert qtype.row_bytes(1024) == 1024 * qtype.block_bytes // qtype.block_weights


def test_every_type_is_in_the_table_once():
    numbers = [qtype.ggml_id for qtype in QuantType]
    assert len(set(numbers)) == len(QuantType.__members__)
    assert set(GGML_TYPES) == {number for number in numbers if number >= 0}
    assert {qtype.name for qtype in QuantType if qtype.is_storage} == STORAGE
    assert {q for q in QuantType if not q.is_ggml and not q.is_storage} == {
        QuantType.FP8_BLOCK, QuantType.NVFP4
    }  # fmt: skip


@pytest.mark.parametrize("qtype", GGML, ids=lambda q: q.name)
def test_cuts_are_cuts_of_the_weights(qtype):
    tensor = make_case(qtype)
    whole = weights(tensor)
    assert whole.shape == tensor.shape
    assert tensor.nbytes == tensor.shape[0] * qtype.row_bytes(tensor.shape[1])

    part = tensor.rows(1, 4)
    assert part.shape == (3, tensor.shape[1])
    assert part.nbytes == 3 * qtype.row_bytes(tensor.shape[1])
    np.testing.assert_array_equal(weights(part), whole[1:4])

    order = [4, 0, 0, 2]
    picked = tensor.take(torch.tensor(order))
    assert picked.shape == (4, tensor.shape[1])
    np.testing.assert_array_equal(weights(picked), whole[order])

    block = qtype.block_weights
    cut = tensor.cols(block, 3 * block)
    assert cut.shape == (tensor.shape[0], 2 * block)
    assert cut.nbytes == tensor.shape[0] * 2 * qtype.block_bytes
    np.testing.assert_array_equal(weights(cut), whole[:, block : 3 * block])
    np.testing.assert_array_equal(
        weights(cut.cols(block, 2 * block).rows(2, 3)), whole[2:3, 2 * block : 3 * block]
    )
    assert tensor.to(torch.device("cpu")).planes["data"].equal(tensor.planes["data"])


def test_rows_and_columns_are_views_and_take_is_a_copy():
    tensor = make_case(QuantType.Q4_0)
    data = tensor.planes["data"]
    rows, cols, taken = tensor.rows(2, 3), tensor.cols(32, 64), tensor.take(torch.tensor([2]))
    data.zero_()
    assert not rows.planes["data"].any()
    assert not cols.planes["data"].any()
    assert taken.planes["data"].any()


@pytest.mark.parametrize(("start", "stop"), [(1, 32), (0, 31), (16, 48), (32, 65)])
def test_a_cut_inside_a_block_is_refused(start, stop):
    with pytest.raises(ModelFormatError) as caught:
        make_case(QuantType.Q4_0).cols(start, stop)
    assert f"columns {start}..{stop}" in str(caught.value)
    assert "Q4_0" in str(caught.value)
    assert "multiples of 32" in caught.value.hint


@pytest.mark.parametrize(("start", "stop"), [(-32, 32), (64, 32), (0, 128), (128, 128)])
def test_a_cut_outside_the_tensor_is_refused(start, stop):
    tensor = make_case(QuantType.Q4_0, rows=96, blocks=3)
    with pytest.raises(ArgumentError, match=f"columns {start}..{stop} are outside a tensor of 96"):
        tensor.cols(start, stop)
    with pytest.raises(ArgumentError, match=f"rows {start}..{stop} are outside a tensor of 96"):
        tensor.rows(start, stop)
    assert tensor.rows(0, 96).shape == tensor.cols(0, 96).shape == (96, 96)
    wide, tall = make_case(QuantType.Q4_0, 2, 3), make_case(QuantType.Q4_0, 70, 2)
    assert wide.cols(64, 96).shape == (2, 32)
    assert tall.rows(69, 70).shape == (1, 64)
    for read in (lambda: wide.rows(2, 3), lambda: tall.cols(64, 96)):
        with pytest.raises(ArgumentError, match="are outside"):
            read()


def test_empty_cuts():
    tensor = make_case(QuantType.Q8_0)
    assert tensor.rows(2, 2).shape == (0, 96)
    assert tensor.rows(2, 2).nbytes == 0
    assert tensor.cols(32, 32).shape == (5, 0)
    assert tensor.take(torch.empty(0, dtype=torch.int64)).shape == (0, 96)


def random_bytes(*shape):
    return torch.randint(0, 255, shape, dtype=torch.uint8)


def block_case(qtype, stack=(), out=96, cols=160, block=(32, 48)):
    """Random planes of a block format."""
    if qtype is QuantType.FP8_BLOCK:
        scales = (-(-out // block[0]), -(-cols // block[1]))
        q = random_bytes(*stack, out, cols).view(torch.float8_e4m3fn)
        planes = {"q": q, "scale": random_bytes(*stack, *scales)}
        return QuantTensor(qtype, Layout.BLOCKS, (*stack, out, cols), planes, block)
    planes = {"q": random_bytes(*stack, out, cols // 2)}
    if qtype is QuantType.MXFP4:
        planes["scale"] = random_bytes(*stack, out, cols // 32)
    else:
        planes["scale"] = random_bytes(*stack, out, cols // 16).view(torch.float8_e4m3fn)
        planes["global_scale"] = torch.rand(stack)
    return QuantTensor(qtype, Layout.BLOCKS, (*stack, out, cols), planes)


def element(tensor, row, col, expert=()):
    """What the planes hold for one weight: its byte or nibble, its scale, that of the matrix."""
    q, scale = (tensor.planes[name].view(torch.uint8)[expert] for name in ("q", "scale"))
    if tensor.qtype is QuantType.FP8_BLOCK:
        b0, b1 = tensor.block
        return int(q[row, col]), int(scale[row // b0, col // b1])
    group = 32 if tensor.qtype is QuantType.MXFP4 else 16
    total = tensor.planes.get("global_scale")
    nibble = int(q[row, col // 2]) >> 4 * (col % 2) & 15
    whole = None if total is None else float(total[expert])
    return nibble, int(scale[row, col // group]), whole


BLOCKS = [QuantType.FP8_BLOCK, QuantType.MXFP4, QuantType.NVFP4]


@pytest.mark.parametrize("qtype", BLOCKS, ids=lambda q: q.name)
def test_cuts_of_block_formats(qtype):
    """FP8 with blocks of 32 x 48: the last columns are part of a block."""
    whole = block_case(qtype)
    rows, cols = whole.rows(32, 96), whole.cols(96, 160)
    assert (rows.shape, cols.shape) == ((64, 160), (96, 64))
    for row, col in ((0, 0), (63, 63), (17, 50)):
        assert element(rows, row, col) == element(whole, row + 32, col)
        assert element(cols, row, col) == element(whole, row, col + 96)
    index = torch.tensor([95, 0, 40, 40])
    for few in (index, index[:1], index.repeat(5)):
        taken = whole.take(few)
        assert taken.shape == (few.numel(), 160)
        for place, row in enumerate(few.tolist()):
            for col in (0, 47, 48, 159):
                assert element(taken, place, col) == element(whole, row, col)
    empty = whole.rows(32, 32)
    assert empty.shape == (0, 160)
    assert empty.planes["q"].numel() == empty.planes["scale"].numel() == 0


@pytest.mark.parametrize("qtype", BLOCKS, ids=lambda q: q.name)
def test_cuts_of_stacks_of_block_formats(qtype):
    whole = block_case(qtype, (3,), 64, 96)
    assert whole.nbytes == sum(whole.take(torch.tensor([i])).nbytes for i in range(3))
    first = 48 if qtype is QuantType.FP8_BLOCK else 32
    taken = whole.take(torch.tensor([2, 0, 2, 1])).rows(32, 64).cols(first, 96)
    assert taken.shape == (4, 32, 96 - first)
    for place, expert in enumerate((2, 0, 2, 1)):
        for row, col in ((0, 0), (31, 47)):
            found = element(taken, row, col, place)
            assert found == element(whole, row + 32, col + first, expert)


def test_a_cut_inside_a_block_of_scales_is_refused():
    fp8, mx, nv = (block_case(qtype) for qtype in BLOCKS)
    for cut, text in (
        (lambda: fp8.rows(16, 32), "rows 16..32 of a FP8_BLOCK tensor cut a block of 32"),
        (lambda: fp8.rows(0, 33), "rows 0..33"),
        (lambda: fp8.cols(0, 47), "columns 0..47 of a FP8_BLOCK tensor cut a block of 48"),
        (lambda: mx.cols(16, 32), "cut a block of 32"),
        (lambda: nv.cols(0, 8), "cut a block of 16"),
    ):
        with pytest.raises(ModelFormatError, match=text):
            cut()
    with pytest.raises(ArgumentError, match=r"rows 0..97 are outside a tensor of 96"):
        fp8.rows(0, 97)


def test_a_stack_of_a_ggml_type():
    matrix = make_case(QuantType.Q4_0, 6, 3)
    data = matrix.planes["data"].unflatten(0, (2, 3))
    stack = QuantTensor(QuantType.Q4_0, Layout.FILE, (2, 3, 96), {"data": data})
    part = stack.take(torch.tensor([1, 0, 1])).rows(1, 3).cols(32, 96)
    assert part.shape == (3, 2, 64)
    for place, expert in enumerate((1, 0, 1)):
        expected = matrix.rows(3 * expert + 1, 3 * expert + 3).cols(32, 96)
        assert torch.equal(part.planes["data"][place], expected.planes["data"])
