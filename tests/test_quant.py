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


@pytest.mark.parametrize("qtype", QuantType, ids=lambda q: q.name)
def test_table_agrees_with_the_gguf_package(qtype):
    theirs = GGMLQuantizationType[qtype.name]
    assert qtype.ggml_id == theirs.value
    assert (qtype.block_weights, qtype.block_bytes) == GGML_QUANT_SIZES[theirs]
    assert GGML_TYPES[theirs.value] is qtype
    assert qtype.is_float == (qtype.name in FLOATS)
    assert qtype.row_bytes(1024) == 1024 * qtype.block_bytes // qtype.block_weights


def test_every_type_is_in_the_table_once():
    assert len(GGML_TYPES) == len(QuantType) == len({qtype.value for qtype in QuantType})


@pytest.mark.parametrize("qtype", QuantType, ids=lambda q: q.name)
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
