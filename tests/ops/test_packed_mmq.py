"""Tokens of 8 bits times K-quants: against the oracle, both layouts alike, and how near to x."""

import itertools

import pytest
import torch

from tests.kernels.test_rtc import ARCH, ELSEWHERE, compile_here
from tests.packed_weights import (
    LAYOUTS,
    check_dependent_launches,
    make_tokens,
    make_weight,
    relative_error,
)
from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_mmq as kernel
from tiercel.kernels.packed.packed_matvec import DeviceLimits
from tiercel.ops.packed_matvec import prepare_packed
from tiercel.ops.packed_mmq import packed_mmq
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import packed_gemm as exact_oracle
from tiercel.reference import packed_mmq as oracle

TYPES = [QuantType[name] for name in kernel.TYPES]
# Sums in float32; the oracle rounds x as the kernel does, to the bit: one
# code of 127 more or less would be 1e-3.
TOLERANCE = 3e-5
# (rows, columns): less than a tile, a row more than one, more rows than a CTA, uneven units.
SHAPES = [(5, 256), (17, 512), (129, 768), (200, 1280)]


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_matches_oracle(rows, columns, qtype, device):
    part = make_weight(qtype, rows, columns, device)
    weights = [prepare_packed(part, layout) for layout in LAYOUTS]
    x = make_tokens(300, columns, device)
    expected = oracle.packed_mmq(x, part.planes["data"], qtype.name)
    for weight, tokens in itertools.product(weights, (1, 33, 70, 300)):
        wide = torch.full((tokens + 2, rows + 3), float("nan"), device=device)
        out = packed_mmq(x[:tokens], weight, out=wide[1:-1, 2 : rows + 2])
        assert out.data_ptr() == wide[1:, 2:].data_ptr()
        assert relative_error(out, expected[:tokens]) < TOLERANCE, (weight.tensor.layout, tokens)
        assert not weight.tickets.any()  # ready for the next launch
        wide[1:-1, 2 : rows + 2] = float("nan")
        assert wide.isnan().all()  # nothing beside the result was written


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_rounding_of_x_stays_within_its_limit(qtype, device):
    """NMSE against the product with x itself; a whole model may have 2e-2."""
    part = make_weight(qtype, 100, 1024, device)
    x = make_tokens(40, 1024, device)
    expected = exact_oracle.packed_gemm(x, part.planes["data"], qtype.name)
    out = packed_mmq(x, prepare_packed(part, Layout.SOA), torch.float32)
    assert relative_error(out, expected) ** 2 < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_results_are_rounded_once(qtype, dtype, device):
    weight = prepare_packed(make_weight(qtype, 40, 768, device), Layout.SOA)
    x = make_tokens(19, 768, device)
    exact = packed_mmq(x, weight, torch.float32)
    out = packed_mmq(x, weight, dtype)
    assert out.dtype == dtype
    assert torch.equal(out, exact.to(dtype))


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_zeros_and_what_is_no_number(qtype, device):
    """A group of zeros is nothing; infinity and NaN stay with their token."""
    weight = prepare_packed(make_weight(qtype, 40, 768, device), Layout.SOA)
    x = make_tokens(20, 768, device)
    usual = packed_mmq(x, weight)
    x[3] = 0
    x[5, 64:128] = 0
    x[7, 300], x[9, 700] = float("inf"), float("nan")
    out = packed_mmq(x, weight)
    assert not out[3].any()
    assert not out[7].isfinite().any()
    assert out[9].isnan().all()
    others = [n for n in range(20) if n not in (3, 5, 7, 9)]
    assert torch.equal(out[others], usual[others])
    assert out[5].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_every_launch_is_right(qtype, device):
    """Tokens of a CTA and CTAs of a sum, each at every value, from both layouts: same bits."""
    part = make_weight(qtype, 330, 1280, device)
    weights = [prepare_packed(part, layout) for layout in LAYOUTS]
    x = make_tokens(150, 1280, device)
    expected = oracle.packed_mmq(x, part.planes["data"], qtype.name)
    for tokens in kernel.TOKEN_TILES:
        for splits in (1, 2, 3, 5):
            config = kernel.make_config(tokens, splits)
            shape = kernel.image_shape(150, 1280, config)
            results = []
            for weight in (*weights, weights[0]):
                out = torch.full((150, 330), float("nan"), device=device)
                kernel.launch_packed_mmq(
                    x,
                    weight.tensor.ordered_planes(),
                    qtype.name,
                    torch.full(shape, 255, dtype=torch.uint8, device=device),
                    out,
                    torch.full(kernel.partial_shape(150, 330, config), float("nan"), device=device),
                    weight.tickets,
                    config,
                    is_dependent=False,
                )
                results.append(out)
            assert torch.equal(results[0], results[1]), config
            assert torch.equal(results[0], results[2]), config
            assert relative_error(results[0], expected) < TOLERANCE, config
            assert not weights[0].tickets.any()


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_dependent_launches_in_a_graph(qtype, device):
    check_dependent_launches(packed_mmq, qtype, 40, device)


# An H200, an A100, a device with 99 KiB a CTA (sm_89, sm_120).
LIMITS = [kernel.H200, DeviceLimits(108, 163 << 10), DeviceLimits(142, 99 << 10)]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_configs_fit_every_shape(qtype, limits):
    tiles = kernel.fitting_tiles(qtype.name, limits)
    assert tiles
    for rows in (1, 576, 1024, 4096, 6144, 24576, 151936):
        for columns in (256, 512, 1024, 3072, 4096, 9728, 12288, 25600):
            for tokens in (1, 17, 32, 33, 64, 100, 128, 129, 1000, 8192):
                config = kernel.select_packed_mmq(qtype.name, (rows, columns), tokens, limits)
                assert config.tokens in tiles
                assert 1 <= config.splits <= columns // 256
                assert config.smem_bytes(qtype.name) <= limits.smem_bytes
                groups = -(-rows // kernel.ROWS) * -(-tokens // config.tokens)
                assert config.splits == 1 or groups <= -(-rows // 16)  # tickets of a weight


@pytest.mark.parametrize(
    "arch", [ARCH, *(pytest.param(arch, marks=pytest.mark.slow) for arch in ELSEWHERE)]
)
def test_the_quantiser_compiles_for(arch, tmp_path):
    assert compile_here(kernel.quantise_source(64), tmp_path, arch)


# By default the first type in each layout on Hopper, and on the oldest.
COMPILED = [
    pytest.param(
        qtype,
        in_file,
        arch,
        marks=[pytest.mark.slow]
        * (qtype != TYPES[0] or (arch != ARCH and (arch, in_file) != ("sm_80", False))),
    )
    for qtype in TYPES
    for in_file in (False, True)
    for arch in (ARCH, *ELSEWHERE)
]


@pytest.mark.parametrize(("qtype", "in_file", "arch"), COMPILED, ids=str)
def test_compiles_for(qtype, in_file, arch, tmp_path):
    config = kernel.make_config(64)
    source = kernel.mmq_source(qtype.name, torch.bfloat16, config, in_file=in_file)
    assert compile_here(source, tmp_path, arch)


def test_no_tokens(device):
    weight = prepare_packed(make_weight(TYPES[0], 17, 256, device), Layout.SOA)
    assert packed_mmq(torch.empty(0, 256).half().to(device), weight).shape == (0, 17)


def test_wrong_arguments(device):
    part = make_weight(TYPES[0], 17, 512, device)
    weight = prepare_packed(part, Layout.SOA)
    x = torch.zeros(20, 512, dtype=torch.float16, device=device)
    for bad in (x.float(), x[:, :256], x[0], x.t().contiguous().t()):
        with pytest.raises(ArgumentError, match="packed_mmq: x is"):
            packed_mmq(bad, weight)
    for bad in (torch.zeros(20, 16), torch.zeros(17, 20).t(), torch.zeros(20, 17).double()):
        with pytest.raises(ArgumentError, match="packed_mmq: out is"):
            packed_mmq(x, weight, out=bad.to(device))
