"""The CUDA sources of products with 8-bit tokens, on a processor: each layout, tile and split."""

import pytest
import torch

from tests.ops.test_packed_mmq import TOLERANCE, TYPES
from tests.packed_weights import LAYOUTS, make_tokens, make_weight, relative_error
from tiercel.kernels.packed import packed_mmq as kernel
from tiercel.ops.packed_matvec import prepare_packed
from tiercel.ops.packed_mmq import packed_mmq
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant_types import Layout
from tiercel.reference import packed_mmq as oracle

CPU = torch.device("cpu")
ROWS, COLUMNS = 133, 1024  # two CTAs, the second with a part of a tile; more units than stages
# Of two stages and of three, with sums of one CTA and of several.
CONFIGS = [kernel.make_config(32, 3), kernel.make_config(64), kernel.make_config(128)]
HALVES = (torch.float16, torch.bfloat16)


def multiply(x, tensor, config, dtype=torch.float32):
    """The kernels' result; nothing beside it is written, and they can be launched again."""
    (tokens, columns), rows = x.shape, tensor.shape[0]
    wide = torch.full((tokens + 2, rows + 3), float("nan"), dtype=dtype)
    out = wide[1:-1, 2:-1]
    tickets = torch.zeros(-(-rows // 16), dtype=torch.int32)
    kernel.launch_packed_mmq(
        x,
        tensor.ordered_planes(),
        tensor.qtype.name,
        torch.full(kernel.image_shape(tokens, columns, config), 255, dtype=torch.uint8),
        out,
        torch.full(kernel.partial_shape(tokens, rows, config), float("nan")),
        tickets,
        config,
        is_dependent=True,
    )
    found = out.clone()
    out.fill_(float("nan"))
    assert wide.isnan().all()
    assert not tickets.any()
    return found


@pytest.fixture(scope="module", autouse=True)
def _all_together(built_products, chosen):
    """One translation unit: each of its own takes half as long as all of them."""
    usual = {"qtype": TYPES[0], "config": CONFIGS[0], "dtype": torch.float32}
    sources = []
    for params in ({**usual, **params} for params in (*chosen, {})):
        name, whole = params["qtype"].name, kernel.make_config(params["config"].tokens)
        sources += [
            kernel.quantise_source(whole.tokens),
            *(
                kernel.mmq_source(name, dtype, whole, in_file=in_file)
                for dtype in (torch.float32, params["dtype"])
                for in_file in (False, True)
            ),
        ]
    built_products.build(sources)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_matches_oracle(qtype, config, products):
    weight = make_weight(qtype, ROWS, COLUMNS, CPU)
    tokens = 37 if config.tokens == 32 else config.tokens - 3  # two tiles, or a part of one
    x = make_tokens(tokens, COLUMNS, CPU)
    expected = oracle.packed_mmq(x, weight.planes["data"], qtype.name)
    products.late.append(x)  # the kernel ahead writes it
    found = multiply(x, packed_repack(weight, Layout.SOA), config)
    assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_layouts_give_the_same_bits(qtype, products):
    """In any order of warps and CTAs."""
    weight, x = make_weight(qtype, ROWS, COLUMNS, CPU), make_tokens(7, COLUMNS, CPU)
    results = []
    for products.seed, layout in enumerate(LAYOUTS):
        results.append(multiply(x, packed_repack(weight, layout), CONFIGS[0]))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_results_are_rounded_once(dtype, products):
    tensor = packed_repack(make_weight(TYPES[0], 17, COLUMNS, CPU), Layout.SOA)
    x = make_tokens(5, COLUMNS, CPU)
    exact = multiply(x, tensor, CONFIGS[0])
    assert torch.equal(multiply(x, tensor, CONFIGS[0], dtype), exact.to(dtype))


def test_zeros_infinity_and_nan(products):
    """A group of zeros adds nothing; infinity and NaN stay with their token, as in the op."""
    weight = make_weight(TYPES[0], 17, COLUMNS, CPU)
    x = make_tokens(6, COLUMNS, CPU)
    x[1], x[2, 64:128] = 0, 0
    x[3, 300], x[4, 700] = float("inf"), float("nan")
    found = multiply(x, packed_repack(weight, Layout.SOA), CONFIGS[0])
    assert not found[1].any()
    assert found[4].isnan().all()
    assert not found[3].isfinite().any()
    others = [0, 2, 5]
    expected = packed_mmq(x[others], prepare_packed(weight, Layout.SOA), torch.float32)
    assert relative_error(found[others], expected.double()) < TOLERANCE
