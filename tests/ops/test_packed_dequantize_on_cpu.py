"""The CUDA source that decodes weights, on a processor: each type, layout, dtype and row index."""

import pytest
import torch

from tests.ops.test_dequantize import as_tensor, random_blocks
from tests.packed_weights import LAYOUTS
from tiercel.kernels.packed import packed_dequantize as kernel
from tiercel.ops.dequantize import dequantize
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant_types import PLANES, QuantType

TYPES = [qtype.name for qtype in PLANES]
HALVED = ["Q6_K", "Q5_1"]  # also decoded to 16 bits: of other types that is the same code
ROWS = 21  # a tile and a part of one


def make_matrix(type_name):
    """Random bits; rows of whole blocks that end within a unit where blocks are small."""
    blocks = 23 if QuantType[type_name].block_weights == 32 else 3
    return as_tensor(random_blocks(type_name, ROWS, blocks).reshape(ROWS, -1), type_name, "cpu")


def decode(planes, type_name, shape, dtype, index=None):
    """The kernel's result; nothing beside it is written."""
    rows, columns = shape
    room = torch.full((rows + 2, columns), float("nan"), dtype=dtype)
    kernel.launch_packed_dequantize(planes, type_name, room[1:-1], index)
    assert room[0].isnan().all()
    assert room[-1].isnan().all()
    return room[1:-1]


@pytest.fixture(scope="module", autouse=True)
def _all_together(built_products, chosen):
    """One translation unit: with a kernel of its own each takes half as long as all of them."""
    cases = [(params["type_name"], params.get("dtype", torch.float32)) for params in chosen]
    built_products.build(
        [
            kernel.dequantize_source(name, dtype, in_file=in_file)
            for name, dtype in cases
            for in_file in (False, True)
        ]
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("type_name", TYPES)
def test_bits_are_those_of_the_op(type_name, layout, products):
    weight = make_matrix(type_name)
    expected = dequantize(weight, torch.float32)
    planes = packed_repack(weight, layout).ordered_planes()
    found = decode(planes, type_name, weight.shape, torch.float32)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("type_name", TYPES)
def test_rows_by_number(type_name, products):
    """Of the file's layout, in any order, some twice, and from strided rows."""
    weight = make_matrix(type_name)
    whole = dequantize(weight, torch.float32)
    wide = torch.nn.functional.pad(weight.planes["data"], (0, 48), value=255)
    data = wide[:, : weight.planes["data"].shape[1]]
    for index in (None, torch.tensor([20]), torch.randint(0, ROWS, (35,))):
        expected = whole if index is None else whole[index]
        rows = None if index is None else index.int()
        found = decode([data], type_name, expected.shape, torch.float32, rows)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("type_name", HALVED)
def test_results_are_rounded_once(type_name, dtype, products):
    weight = make_matrix(type_name)
    expected = dequantize(weight, dtype)
    found = decode(weight.ordered_planes(), type_name, weight.shape, dtype)
    assert torch.equal(found, expected)
