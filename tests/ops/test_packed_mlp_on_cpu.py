"""The CUDA sources of packed_mlp, on a processor: its image between two products."""

import pytest
import torch

from tests.launches_on_cpu import QUICK_TO_RUN
from tests.ops.test_packed_mlp import PAIRS, TOLERANCE, expect, make_inputs, make_parts
from tests.packed_weights import relative_error
from tiercel.kernels.packed import packed_gemm, packed_mlp
from tiercel.ops.packed_matvec import weight_exponent
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant_types import Layout

LEVEL = QUICK_TO_RUN
CPU = torch.device("cpu")
SIZES = (512, 768)
# Groups, CTAs of a sum and of a copy, each at several values; in tiles of 32 and 64 tokens.
CONFIGS = [
    (
        packed_gemm.PackedGemmConfig(tokens=32, groups=1, splits=1, stages=2, steps=4),
        packed_gemm.PackedGemmConfig(tokens=32, groups=1, splits=2, stages=2, steps=4),
    ),
    (
        packed_gemm.PackedGemmConfig(tokens=64, groups=1, splits=2, stages=2, steps=2),
        packed_gemm.PackedGemmConfig(tokens=64, groups=1, splits=3, stages=2, steps=4),
    ),
]
CASES = [
    (PAIRS[0], "silu", CONFIGS[0]),
    (PAIRS[2], "gelu_tanh", CONFIGS[1]),
]


@pytest.fixture(scope="module", autouse=True)
def _all_together(built_products):
    """One translation unit: each of its own takes half as long as all of them."""
    sources = []
    for types, activation, (first, second) in CASES:
        names = types[0].name, types[1].name
        gate = packed_gemm.Gate(activation, packed_gemm.column_order(names[1]))
        sources += [
            packed_gemm.image_source(packed_gemm.column_order(names[0]), first.tokens),
            packed_gemm.gemm_source(names[0], torch.float16, first, gate),
            packed_gemm.gemm_source(names[1], torch.float16, second),
        ]
    built_products.build(sources)


@pytest.mark.parametrize(("types", "activation", "configs"), CASES, ids=str)
def test_matches_oracle(types, activation, configs, products):
    """In any order of copies and warps, with the same bits."""
    parts = make_parts(types, SIZES, CPU)
    planes = [packed_repack(part, Layout.SOA).ordered_planes() for part in parts]
    exponents = weight_exponent(parts[0]), weight_exponent(parts[1])
    names = types[0].name, types[1].name
    matrices = packed_mlp.MlpMatrices(names, SIZES, *planes, exponents)
    x = make_inputs(configs[0].tokens - 9, SIZES[0], CPU)
    expected = expect(x, parts, activation)
    results = []
    for products.seed in range(2):
        images = [
            torch.full(packed_gemm.image_shape(len(x), size), float("nan"), dtype=torch.float16)
            for size in SIZES
        ]
        wide = torch.full((len(x) + 2, SIZES[0] + 3), float("nan"), dtype=torch.float16)
        out = wide[1:-1, 2:-1]
        order = packed_gemm.column_order(types[0].name)
        packed_gemm.launch_packed_image(x, order, images[0], is_dependent=True)
        packed_mlp.launch_packed_mlp(
            images[0], matrices, activation, images[1], out, configs, is_dependent=True
        )
        results.append(out.clone())
        assert relative_error(results[-1], expected) < TOLERANCE
        assert images[1].isfinite().all()  # padding too
        out.fill_(float("nan"))
        assert wide.isnan().all()
    assert torch.equal(*results)
