"""The CUDA source of products that rotate heads and write the cache, on a processor."""

import pytest
import torch

from tests.ops.test_packed_gemm_heads import product_of_heads
from tiercel.kernels.packed import packed_gemm as kernel

CPU = torch.device("cpu")
# Heads of a CTA: one and a half of a warp's, one, three; CTAs of a sum; turns in registers or not.
CASES = [
    ("Q4_K", 128, True, kernel.PackedGemmConfig(tokens=64, groups=2, splits=2, stages=2, steps=4)),
    ("Q6_K", 64, False, kernel.PackedGemmConfig(tokens=32, groups=3, splits=1, stages=2, steps=2)),
    ("Q4_K", 64, True, kernel.PackedGemmConfig(tokens=32, groups=1, splits=1, stages=2, steps=2)),
]


def name_of(parameter):
    return f"{parameter.groups}x{parameter.splits}" if hasattr(parameter, "groups") else None


@pytest.fixture(scope="module", autouse=True)
def _all_together(built_products, chosen):
    """One translation unit: each of its own takes half as long as all of them."""
    sources = []
    for params in chosen:
        name, config = params["name"], params["config"]
        kind = params["head_dim"], params["has_norms"]
        sources += [
            kernel.image_source(kernel.column_order(name), config.tokens),
            kernel.gemm_source(name, torch.float16, config, heads=kind),
        ]
    built_products.build(sources)


@pytest.mark.parametrize(("name", "head_dim", "has_norms", "config"), CASES, ids=name_of)
def test_matches_oracle(name, head_dim, has_norms, config, products):
    """In any order of copies and warps, with the same bits."""
    results = []
    for products.seed in range(2 if config.tokens == 32 else 1):
        results.append(product_of_heads(name, head_dim, config, CPU, has_norms=has_norms))
        for found, first in zip(results[-1], results[0], strict=True):
            assert torch.equal(found.nan_to_num(), first.nan_to_num())
