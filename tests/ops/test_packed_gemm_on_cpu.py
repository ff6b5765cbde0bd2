"""The CUDA sources of products with dozens of tokens, on a processor: each tile, ring and split."""

import pytest
import torch

from tests.ops.test_packed_gemm import TOLERANCE, residual_and_norm
from tests.packed_weights import make_tokens, make_weight, relative_error
from tiercel.kernels.packed import packed_gemm as kernel
from tiercel.ops.packed_gemm import TYPES
from tiercel.ops.packed_matvec import weight_exponent
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant_types import Layout
from tiercel.reference import packed_gemm as oracle

CPU = torch.device("cpu")
COLUMNS = 1280  # five units: rings of two come round
# Tiles of tokens, warpgroups and CTAs of a row's sum, each at several values.
CONFIGS = [
    kernel.PackedGemmConfig(tokens=32, groups=1, splits=1, stages=2, steps=4),
    kernel.PackedGemmConfig(tokens=64, groups=2, splits=2, stages=2, steps=2),
    kernel.PackedGemmConfig(tokens=96, groups=1, splits=4, stages=2, steps=4),
    kernel.PackedGemmConfig(tokens=128, groups=1, splits=1, stages=2, steps=4),
]


def name_of(parameter):
    return getattr(parameter, "name", None) or str(parameter)


def multiply(x, weight, config, dtype=torch.float32):
    """The kernels' result; nothing beside it is written."""
    tensor = weight if weight.layout is not Layout.FILE else packed_repack(weight, Layout.SOA)
    order = kernel.column_order(tensor.kernel_type)
    image = torch.full(kernel.image_shape(*x.shape), float("nan"), dtype=torch.float16)
    wide = torch.full((x.shape[0] + 2, weight.shape[0] + 3), float("nan"), dtype=dtype)
    out = wide[1:-1, 2:-1]
    kernel.launch_packed_image(x, order, image, is_dependent=True)
    kernel.launch_packed_product(
        tensor.ordered_planes(),
        tensor.kernel_type,
        image,
        out,
        (x.shape[0], *weight.shape),
        weight_exponent(weight),
        config,
        is_dependent=True,
    )
    found = out.clone()
    out.fill_(float("nan"))
    assert wide.isnan().all()
    return found


@pytest.fixture(scope="module", autouse=True)
def _all_together(built_products, chosen):
    """One translation unit: each of its own takes half as long as all of them."""
    usual = {"qtype": TYPES[0], "config": CONFIGS[0], "dtype": torch.float32}
    sources = []
    for params in ({**usual, **params} for params in chosen):
        name, config = params["qtype"].name, params["config"]
        sources += [
            kernel.image_source(kernel.column_order(name), config.tokens),
            kernel.gemm_source(name, torch.float32, config),
            kernel.gemm_source(name, params["dtype"], config),
        ]
    built_products.build(sources)


# Types with code of their own in every launch, others in one.
CASES = [(qtype, config) for qtype in TYPES[:2] for config in CONFIGS]
CASES += [(qtype, CONFIGS[0]) for qtype in TYPES[2:]]


@pytest.mark.parametrize(("qtype", "config"), CASES, ids=name_of)
def test_matches_oracle(qtype, config, products):
    """In any order of copies and warps, with the same bits."""
    weight = make_weight(qtype, 70, COLUMNS, CPU)
    tokens = {32: 19, 64: 35, 96: 91, 128: 131}[config.tokens]  # the last two tiles
    x = make_tokens(tokens, COLUMNS, CPU)
    expected = oracle.packed_gemm(x, weight.planes["data"], qtype.name)
    results = []
    for products.seed in range(2 if config.tokens <= 64 else 1):
        products.late.append(x)  # the kernel ahead writes it
        results.append(multiply(x, weight, config))
        assert torch.equal(results[0], results[-1])
    assert relative_error(results[0], expected) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_rounded_once(dtype, products):
    weight, x = make_weight(TYPES[0], 17, COLUMNS, CPU), make_tokens(5, COLUMNS, CPU)
    exact = multiply(x, weight, CONFIGS[0])
    assert torch.equal(multiply(x, weight, CONFIGS[0], dtype), exact.to(dtype))


@pytest.mark.parametrize(("config", "size"), [(CONFIGS[0], 0.05), (CONFIGS[1], 8)], ids=name_of)
def test_residual_and_norm(config, size, products):
    """In any order of copies and warps, with the same bits."""
    results = []
    for products.seed in range(2):
        results.append(residual_and_norm(config, size, CPU))
    assert torch.equal(*results)
