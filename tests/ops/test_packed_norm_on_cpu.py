"""The CUDA source of packed_norm, on a processor."""

import pytest
import torch

from tests.ops.test_packed_norm import TOLERANCE, make_rows
from tests.packed_images import read_image
from tiercel.kernels.packed import packed_norm as kernel
from tiercel.kernels.packed.packed_gemm import image_shape, tile_tokens
from tiercel.reference import packed_norm as oracle

CPU = torch.device("cpu")
# Columns (one and a half warps; more), tokens, orders, whether there is an update.
CASES = [(768, 35, (4, 6), True), (1280, 19, (32,), False)]


@pytest.fixture(scope="module", autouse=True)
def _all_together(built_products):
    """One translation unit for all."""
    built_products.build(
        [
            kernel.norm_source(columns, tile_tokens(tokens), orders, has_update=has_update)
            for columns, tokens, orders, has_update in CASES
        ]
    )


@pytest.mark.parametrize(("columns", "tokens", "orders", "has_update"), CASES, ids=str)
def test_matches_oracle(columns, tokens, orders, has_update, products):
    x, update, weight = make_rows(tokens, columns, CPU)
    total = x + update.float() if has_update else x.clone()
    shape = image_shape(tokens, columns)
    images = {order: torch.full(shape, float("nan"), dtype=torch.float16) for order in orders}
    products.late.append(update)  # the kernel ahead writes it
    given = update if has_update else None
    roots = torch.full((tokens,), float("nan"))
    kernel.launch_packed_norm(x, given, weight, 1e-6, images, roots, is_dependent=True)
    assert torch.equal(x, total)
    expected = oracle.packed_norm(total, weight, 1e-6)
    torch.testing.assert_close(roots, (total.square().mean(dim=1) + 1e-6).rsqrt())
    for order, image in images.items():
        found, rest = read_image(image, order, tokens, columns)
        torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
        assert not rest.any()  # padding too is written
