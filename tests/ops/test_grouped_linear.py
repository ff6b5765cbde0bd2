"""The grouped linear layer: reference, oracle, block formats, bad arguments."""

import pytest
import torch

from tests.dsv4_cases import FORMATS, captured, case, poison, strided
from tests.packed_weights import make_weight
from tiercel.errors import ArgumentError
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.grouped_linear import grouped_linear
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import grouped_linear as oracle

SHAPES = [(1, 1, 3, 5), (5, 3, 80, 16), (7, 2, 192, 48), (3, 8, 33, 7)]  # tokens, groups, in, out
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5}


def test_output_projection_matches_the_reference(device):
    data = case("gout", device)
    mid = grouped_linear(data["o"], data["wo_a"], 3)
    torch.testing.assert_close(mid, data["mid"], rtol=0, atol=1e-5)
    torch.testing.assert_close(mid @ data["wo_b"].t(), data["out"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_groups", "cols", "rows"), SHAPES)
def test_matches_oracle(num_tokens, num_groups, cols, rows, dtype, device):
    x = strided(torch.randn(num_tokens, num_groups * cols, device=device).to(dtype))
    weight = strided(torch.randn(num_groups * rows, cols, device=device) / cols**0.5)
    poison(device)
    out = grouped_linear(x, weight, num_groups)
    assert out.is_contiguous()
    assert out.dtype == dtype
    expected = oracle.grouped_linear(x.cpu(), weight.cpu(), num_groups)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("qtype", FORMATS, ids=lambda q: q.name)
def test_blocks_are_their_decoded_weights(qtype, device):
    """48 rows a group: FP8 blocks of 128 rows reach over the border of groups."""
    weight = block_quantize(torch.randn(96, 160, device=device), qtype)
    x = torch.randn(5, 4, 80, device=device)
    expected = oracle.grouped_linear(x.cpu(), dequantize(weight, torch.float32).cpu(), 2)
    out = grouped_linear(x, weight, 2).double().cpu()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["Q4_K", "IQ2_XXS", "Q8_0"])
def test_ggml_types(name, device):
    weight = make_weight(QuantType[name], 6, 256, device)
    x = torch.randn(5, 512, device=device)
    expected = oracle.grouped_linear(x.cpu(), dequantize(weight, torch.float32).cpu(), 2)
    poison(device)
    out = grouped_linear(x, weight, 2).double().cpu()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_float_tensor_of_the_file(device):
    x, weight = torch.randn(5, 66, device=device), torch.randn(14, 33, device=device).bfloat16()
    stored = QuantTensor(
        QuantType.BF16, Layout.FILE, (14, 33), {"data": weight.contiguous().view(torch.uint8)}
    )
    assert torch.equal(grouped_linear(x, stored, 2), grouped_linear(x, weight, 2))


def test_no_tokens(device):
    assert grouped_linear(
        torch.empty(0, 6, device=device), torch.randn(4, 3, device=device), 2
    ).shape == (0, 4)


def test_op_names_the_bad_argument(device):
    x, weight = torch.randn(2, 12, device=device), torch.randn(9, 4, device=device)
    with pytest.raises(ArgumentError, match=r"x is \(12,\)"):
        grouped_linear(x[0], weight, 3)
    with pytest.raises(ArgumentError, match=r"x has 11 inputs, weight is \(9, 4\)") as error:
        grouped_linear(x[:, :11], weight, 3)
    assert "(groups * out, in)" in error.value.hint
    with pytest.raises(ArgumentError, match="num_groups=2"):
        grouped_linear(x[:, :8], weight, 2)
    with pytest.raises(ArgumentError, match=r"weight is \(9, 4, 1\)"):
        grouped_linear(x, weight[..., None], 3)
    with pytest.raises(ArgumentError, match="num_groups=0"):
        grouped_linear(x, weight, 0)


@pytest.mark.gpu
def test_replay_equals_eager(device):
    x = torch.randn(5, 320, device=device).bfloat16()
    weight = block_quantize(torch.randn(96, 160, device=device), QuantType.FP8_BLOCK)
    assert torch.equal(captured(lambda: grouped_linear(x, weight, 2)), grouped_linear(x, weight, 2))
