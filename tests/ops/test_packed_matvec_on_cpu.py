"""The CUDA source of products with few tokens, on a processor: each type, layout and launch."""

import pytest
import torch

from tests.ops.test_packed_matvec import SMALL_BLOCKS, TOLERANCE, TYPES
from tests.packed_weights import LAYOUTS, make_tokens, make_weight, pooled_error
from tiercel.kernels.packed import packed_matvec as kernel
from tiercel.kernels.packed.packed_types import num_units, tail_groups
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant_types import TILE_ROWS, Layout, QuantType
from tiercel.reference import packed_matvec as oracle

CPU = torch.device("cpu")
ROWS = 35  # two tiles and a part of one


def make_config(qtype, columns, tokens, launch, grid=1, *, is_split=False):
    """`launch`: groups, stages, early, buffers."""
    units = num_units(columns)
    config = kernel.make_config(qtype.name, units, tokens, *launch, 1, grid, is_split=is_split)
    assert config.smem_bytes <= kernel.H200.smem_bytes
    return config


def multiply(tensor, x, config, dtype=torch.float32):
    """The kernel's result; nothing beside x is read, nor written beside the result.

    And the tickets are ready for another launch.
    """
    (tokens, columns), rows = x.shape, tensor.shape[0]
    tiles = -(-rows // TILE_ROWS)
    shape = (kernel.num_slices(columns), tokens, tiles * TILE_ROWS)
    partial, tickets = torch.full(shape, float("nan")), torch.zeros(tiles, dtype=torch.int32)
    wide = torch.full((tokens + 2, rows + 3), float("nan"), dtype=dtype)
    out = wide[1:-1, 2 : rows + 2]
    planes = tensor.ordered_planes()
    kernel.launch_packed_matvec(
        x, planes, tensor.kernel_type, out, partial, tickets, config, is_dependent=True
    )
    found = out.clone()
    out.fill_(float("nan"))
    assert wide.isnan().all()
    assert not tickets.any()
    return found


def sources(cases):
    """Of (type, columns, config, dtype), in both layouts."""
    for qtype, columns, config, dtype in cases:
        tail = tail_groups(columns)
        for in_file in (False, True):
            yield kernel.cuda_source(qtype.name, tail, dtype, config, in_file=in_file)


# Rows of small blocks end within a unit: in its first group of four blocks or in its second. One
# unit of Q8_0 is as large as two of another type.
CASES = [(qtype, 768) for qtype in TYPES if qtype not in SMALL_BLOCKS]
CASES += [(qtype, 576 + 64 * (i % 2)) for i, qtype in enumerate(SMALL_BLOCKS)]
CASES += [(qtype, 1504) for qtype in SMALL_BLOCKS]


def config_of_case(qtype, columns):
    return make_config(qtype, columns, 16, (1, 2, 1, 1) if columns < 768 else (2, 1, 1, 2))


@pytest.fixture(scope="module")
def _every_type(built_products, chosen):
    """One translation unit: with a kernel of its own each takes a third as long as all of them."""
    cases = [(params["qtype"], params["columns"]) for params in chosen if "columns" in params]
    cases = [(*case, config_of_case(*case), torch.float32) for case in cases]
    built_products.build(list(sources(cases)))


@pytest.mark.usefixtures("_every_type")
@pytest.mark.parametrize(("qtype", "columns"), CASES, ids=str)
def test_every_type_matches_oracle(qtype, columns, products):
    """And both layouts give the same bits."""
    part = make_weight(qtype, ROWS, columns, CPU)
    around = torch.full((13, columns), float("nan"), dtype=torch.float16)
    around[1:-1] = make_tokens(11, columns, CPU)
    x = around[1:-1]
    expected = oracle.packed_matvec(x, part.planes["data"], qtype.name)
    results = []
    for seed, layout in enumerate(LAYOUTS):
        products.seed = seed
        products.late.append(x)  # the kernel ahead writes it
        results.append(multiply(packed_repack(part, layout), x, config_of_case(qtype, columns)))
    assert pooled_error(results[0], expected, x) < TOLERANCE[qtype]
    assert torch.equal(*results)


LONG = 4352  # a slice of 16 units and one more
LAUNCHES = [  # of so many tokens at most
    (1, make_config(QuantType.Q4_K, LONG, 1, (1, 1, 1, 1))),
    (4, make_config(QuantType.Q4_K, LONG, 4, (2, 2, 1, 1), is_split=True)),
    (4, make_config(QuantType.Q4_K, LONG, 4, (1, 4, 4, 2), 2, is_split=True)),
    (8, make_config(QuantType.Q4_K, LONG, 8, (2, 1, 1, 2), 2)),
    (16, make_config(QuantType.Q4_K, LONG, 16, (1, 2, 2, 1), 3)),
]


@pytest.fixture(scope="module")
def _every_launch(built_products):
    cases = [(QuantType.Q4_K, LONG, config, torch.float32) for _, config in LAUNCHES]
    cases += [
        (QuantType.Q4_K, LONG, LAUNCHES[1][1], dtype) for dtype in (torch.float16, torch.bfloat16)
    ]
    built_products.build(list(sources(cases)))


@pytest.mark.usefixtures("_every_launch")
def test_every_launch_sums_in_one_order(products):
    """Choices of `select_packed_matvec` and tokens beside one do not change a bit of it."""
    part = make_weight(QuantType.Q4_K, 53, LONG, CPU)
    x = make_tokens(16, LONG, CPU)
    expected = oracle.packed_matvec(x, part.planes["data"], "Q4_K")
    whole = None
    for seed, (most, config) in enumerate(reversed(LAUNCHES)):
        products.seed = seed
        tensor = packed_repack(part, LAYOUTS[seed % 2])
        for tokens in {most, max(1, most - 3)}:
            found = multiply(tensor, x[:tokens], config)
            whole = found if whole is None else whole
            assert torch.equal(found, whole[:tokens])
    assert pooled_error(whole, expected, x) < TOLERANCE[QuantType.Q4_K]


@pytest.mark.usefixtures("_every_launch")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_rounded_once(dtype, products):
    tensor = packed_repack(make_weight(QuantType.Q4_K, ROWS, LONG, CPU), Layout.SOA)
    x, config = make_tokens(3, LONG, CPU), LAUNCHES[1][1]
    exact = multiply(tensor, x, config)
    assert torch.equal(multiply(tensor, x, config, dtype), exact.to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_every_type_and_launch(qtype, stages, products):
    """Rows that are split, or end within a unit, of one unit or many; bits of both layouts."""
    if qtype is QuantType.Q8_0 and stages == 2:
        pytest.skip("two units of a warp in flight are too large")
    small = [(4384, 10), (96, 1), (576, 16)] * (qtype in SMALL_BLOCKS)
    for columns, tokens in [(4352, 10), (1280, 3), *small]:
        is_split = columns > 4096
        config = make_config(qtype, columns, tokens, (2, stages, 1, 2), is_split=is_split)
        products.build(list(sources([(qtype, columns, config, torch.float32)])))
        part = make_weight(qtype, 33, columns, CPU)
        x = make_tokens(tokens, columns, CPU)
        results = [multiply(packed_repack(part, layout), x, config) for layout in LAYOUTS]
        expected = oracle.packed_matvec(x, part.planes["data"], qtype.name)
        assert pooled_error(results[0], expected, x) < TOLERANCE[qtype]
        assert torch.equal(*results)
