"""packed_norm against its oracle, and what it refuses."""

import pytest
import torch

from tests.packed_images import read_image
from tests.packed_weights import make_weight, relative_error
from tiercel.errors import ArgumentError
from tiercel.ops.linear import image_orders, linear, prepare_linear
from tiercel.ops.packed_gemm import has_packed_gemm
from tiercel.ops.packed_norm import norm_refusal, packed_norm
from tiercel.ops.rms_norm import rms_norm
from tiercel.quant_types import QuantType
from tiercel.reference import packed_norm as oracle

TOLERANCE = 1e-3  # one rounding to float16


def make_rows(tokens, columns, device):
    """A residual, its update, and the weight of a norm."""
    x = torch.randn(tokens, columns, device=device) * torch.linspace(0.01, 30, tokens)[:, None].to(
        device
    )
    update = torch.randn(tokens, columns, device=device).half()
    return x, update, torch.randn(columns, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("orders", [(4,), (6, 4), (32,)], ids=str)
@pytest.mark.parametrize("columns", [256, 2560, 4096, 16384])
def test_matches_oracle(columns, orders, device):
    if not has_packed_gemm(device):
        pytest.skip("images are of packed_gemm, which is built for Hopper")
    for tokens in (17, 33, 70, 128, 200):
        x, update, weight = make_rows(tokens, columns, device)
        for given in (None, update):
            total = x if given is None else x + given.float()
            image = packed_norm(x, weight, 1e-6, orders, given)
            assert torch.equal(x, total)
            expected = oracle.packed_norm(total.cpu(), weight.cpu(), 1e-6)
            for order in orders:
                found, rest = read_image(image.tensors[order].cpu(), order, tokens, columns)
                torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
                assert not rest.any()


@pytest.mark.gpu
def test_products_read_the_images(device):
    """Matrices of two types and a bias: the product is that of the normed rows."""
    if not has_packed_gemm(device):
        pytest.skip("images are of packed_gemm, which is built for Hopper")
    parts = [make_weight(qtype, 96, 512, device) for qtype in (QuantType.Q4_K, QuantType.Q6_K)]
    weight = prepare_linear(parts, torch.float16, device)
    bias = torch.randn(192, device=device).half()
    for tokens in (17, 64, 90):
        x, _, scale = make_rows(tokens, 512, device)
        orders = image_orders(weight, tokens)
        assert orders == (4, 6)
        out = linear(packed_norm(x, scale, 1e-6, orders), weight, bias)
        plain = linear(rms_norm(x, scale, 1e-6, torch.float16), weight, bias)
        assert relative_error(out, plain.double().cpu()) < TOLERANCE
    assert image_orders(weight, 16) == image_orders(weight, 97) == ()


def test_refusals():
    assert norm_refusal(4096, (4, 6)) == ""
    assert "100 columns" in norm_refusal(100, (4,))
    assert "32768 columns" in norm_refusal(32768, (4,))
    for orders in ((), (4, 4), (4, 6, 32)):
        assert f"{len(orders)} orders" in norm_refusal(512, orders)


def test_wrong_arguments(device):
    x, update, weight = make_rows(20, 512, device)
    for bad in ((x.half(), weight, update), (x, weight[:5], update), (x, weight, update.float())):
        with pytest.raises(ArgumentError, match="packed_norm: x is"):
            packed_norm(bad[0], bad[1], 1e-6, (4,), bad[2])
    with pytest.raises(ArgumentError, match="0 orders"):
        packed_norm(x, weight, 1e-6, ())
