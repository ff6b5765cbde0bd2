"""packed_gemm against its oracle: equal bits in every run, and launches that fit a device."""

import pytest
import torch

from tests.packed_weights import (
    LAYOUTS,
    check_dependent_launches,
    make_massive,
    make_tokens,
    make_weight,
    relative_error,
)
from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_gemm as kernel
from tiercel.ops.packed_gemm import TYPES, has_packed_gemm, packed_gemm
from tiercel.ops.packed_matvec import prepare_packed, weight_exponent
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import packed_gemm as oracle

# A weight is rounded to float16, its factors before that: 2**-12 each, random; the worst token.
TOLERANCE = 8e-4
NORMED_TOLERANCE = 1e-3  # a rounding more, which a massive activation does not average
# (rows, columns): less than a tile, a row more than one, more rows than a CTA, uneven units.
SHAPES = [(1, 256), (17, 512), (129, 768), (200, 1280), (1000, 512)]
# Types with code of their own in every shape, others in two.
CASES = [(qtype, *shape) for qtype in TYPES[:2] for shape in SHAPES]
CASES += [(qtype, *shape) for qtype in TYPES[2:] for shape in SHAPES[1:3]]


@pytest.fixture
def hopper(device):
    """The device, if the kernel runs there; a CPU has the op's other path."""
    if device.type == "cuda" and not has_packed_gemm(device):
        pytest.skip("the kernel is built for Hopper")
    return device


@pytest.mark.parametrize(("qtype", "rows", "columns"), CASES, ids=str)
def test_matches_oracle(qtype, rows, columns, hopper):
    part = make_weight(qtype, rows, columns, hopper)
    weight = prepare_packed(part, Layout.SOA)
    x = make_tokens(300, columns, hopper)
    expected = oracle.packed_gemm(x, part.planes["data"], qtype.name)
    for tokens in (1, 17, 33, 64, 70, 128, 300):
        wide = torch.full((tokens + 2, rows + 3), float("nan"), device=hopper)
        out = packed_gemm(x[:tokens], weight, out=wide[1:-1, 2 : rows + 2])
        assert out.data_ptr() == wide[1:, 2:].data_ptr()
        assert relative_error(out, expected[:tokens]) < TOLERANCE, tokens
        wide[1:-1, 2 : rows + 2] = float("nan")
        assert wide.isnan().all()  # nothing beside the result was written


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_results_are_rounded_once(qtype, dtype, hopper):
    weight = prepare_packed(make_weight(qtype, 40, 768, hopper), Layout.SOA)
    x = make_tokens(19, 768, hopper)
    exact = packed_gemm(x, weight, torch.float32)
    out = packed_gemm(x, weight, dtype)
    assert out.dtype == dtype
    assert torch.equal(out, exact.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_every_launch_is_right(qtype, hopper):
    """Tokens of a tile, rows of a CTA and CTAs of a cluster, each at every value."""
    part = make_weight(qtype, 330, 2304, hopper)
    weight = prepare_packed(part, Layout.SOA)
    planes, order = weight.tensor.ordered_planes(), kernel.column_order(qtype.name)
    launches = [(1, 1), (2, 1), (3, 1), (3, 2), (2, 3), (2, 4), (1, 6), (1, 8)]
    for tile, tokens in zip(kernel.TOKEN_CLASSES, (30, 50, 90, 150), strict=True):
        x = make_tokens(tokens, 2304, hopper)
        expected = oracle.packed_gemm(x, part.planes["data"], qtype.name)
        image = x.new_full(kernel.image_shape(tokens, 2304), float("nan"))
        kernel.launch_packed_image(x, order, image, is_dependent=False)
        for groups, splits in launches if qtype in TYPES[:2] else launches[2:4]:
            config = kernel.make_config(qtype.name, tile, groups, splits)
            if config.stages < 2:
                continue  # `most_groups` leaves it out
            results = []
            for _ in range(2):
                out = torch.full((tokens, 330), float("nan"), device=hopper)
                kernel.launch_packed_product(
                    planes,
                    qtype.name,
                    image,
                    out,
                    (tokens, 330, 2304),
                    weight.exponent,
                    config,
                    is_dependent=False,
                )
                results.append(out)
            assert torch.equal(*results), config  # the order of sums is fixed
            assert relative_error(results[0], expected) < TOLERANCE, config


def residual_and_norm(config, size, device):
    """A product that is added to the residual, and one that reads its norm, against the oracle.

    Args:
        config: of both launches.
        size: of the norm's weight.
        device: of the kernels.

    Returns:
        What was compared last.
    """
    torch.manual_seed(config.tokens)
    tokens, inner, hidden = config.tokens - 5, 768, 512
    first = make_weight(TYPES[0], hidden, inner, device)
    second = make_weight(TYPES[1], 70, hidden, device, 1)
    x = make_tokens(tokens, inner, device)
    weight = size * (torch.rand(hidden) + 0.5).to(device)
    earlier, residual = make_massive(tokens, hidden, device)
    before = torch.full((config.tokens,), float("nan"), device=device)
    before[:tokens] = (earlier.square().mean(dim=1) + 1e-6).rsqrt()
    room = kernel.select_room(weight.max().item(), hidden)
    total = residual.double().cpu() + oracle.packed_gemm(x, first.planes["data"], "Q4_K")
    squares = total.square().mean(dim=1, keepdim=True) + 1e-6
    normed = total / squares.sqrt() * weight.cpu()
    expected = oracle.packed_gemm(normed, second.planes["data"].cpu(), "Q6_K")

    given = x.new_full(kernel.image_shape(*x.shape), float("nan"))
    kernel.launch_packed_image(x, 4, given, is_dependent=True)
    shape = kernel.image_shape(tokens, hidden)
    images = {order: x.new_full(shape, float("nan")) for order in (4, 6)}
    sums = torch.full((1, hidden // 64, config.tokens), float("nan"), device=device)
    roots, own = before * float("nan"), residual.clone()
    written = kernel.NormOutputs(own, weight, images, sums, before, room)
    _launch(first, given, written, (tokens, hidden, inner), config)
    assert relative_error(own, total) < TOLERANCE
    out = torch.full((tokens, 70), float("nan"), device=device)
    scaled = kernel.NormInputs(sums, before, roots, 1e-6, room)
    _launch(second, images[6], out, (tokens, 70, hidden), config, scaled)
    assert relative_error(out, expected) < NORMED_TOLERANCE
    assert relative_error(roots[None, :tokens], squares.T.rsqrt()) < 1e-4
    return out


def _launch(weight, image, out, shape, config, scaled=None):
    tensor = packed_repack(weight, Layout.SOA)
    kernel.launch_packed_product(
        tensor.ordered_planes(),
        tensor.kernel_type,
        image,
        out,
        shape,
        weight_exponent(weight),
        config,
        scaled=scaled,
        is_dependent=True,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("size", [0.05, 1, 8])
@pytest.mark.parametrize("tile", kernel.TOKEN_CLASSES)
def test_residual_and_norm(tile, size, hopper):
    """At every launch, with the same bits each time."""
    for groups, splits in [(1, 1), (2, 2), (3, 1), (1, 3), (2, 3)]:
        configs = [kernel.make_config(qtype.name, tile, groups, splits) for qtype in TYPES[:2]]
        config = min(configs, key=lambda config: config.stages)
        if config.stages >= 2:  # `most_groups` leaves it out
            results = [residual_and_norm(config, size, hopper) for _ in range(2)]
            assert torch.equal(*results), config


@pytest.mark.parametrize("columns", [512, 4096, 5120])
@pytest.mark.parametrize("weight", [0.01, 1.0, 30.0])
def test_images_have_room(weight, columns):
    """For a channel that has a row's whole square, after the row grew; twice as much would not."""
    most = weight * columns**0.5 * 2.0 ** (13 + kernel.select_room(weight, columns))
    assert 65504 / 2 < most <= 65504


def test_room_of_odd_norms():
    """Zeros and what is no number; powers that a float32 has."""
    assert kernel.select_room(0.0, 512) == kernel.select_room(float("nan"), 512) == 0
    assert (kernel.select_room(1e30, 512), kernel.select_room(1e-30, 512)) == (-24, 24)


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_dependent_launches_in_a_graph(qtype, hopper):
    check_dependent_launches(packed_gemm, qtype, 40, hopper)


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_configs_fit_every_shape(qtype):
    for rows in (1, 576, 1024, 4096, 6144, 24576, 151936):
        for columns in (256, 512, 1024, 3072, 4096, 9728, 12288, 25600):
            for tokens in (1, 17, 32, 33, 64, 100, 128, 129, 1000):
                config = kernel.select_packed_gemm(qtype.name, (rows, columns), tokens)
                assert config.tokens >= min(tokens, 128)
                assert 1 <= config.splits <= columns // 256
                assert config.stages >= 2
                smem = config.smem_bytes(qtype.name)
                assert smem <= 227 << 10
                # The sums of a CTA take the place of its ring.
                assert config.tokens * (64 * config.groups + 4) * 4 <= smem


@pytest.mark.parametrize(("scale", "least"), [(0.05, 1e-3), (40.0, 0.0), (1e-3, 300.0)])
def test_factors_fit_float16(scale, least):
    """The largest factor is in range, and twice as large it would not be."""
    exponent = kernel.select_exponent(scale, least)
    most = max(scale * 2.0 ** (24 + exponent), least * 2.0 ** (10 + exponent))
    assert 65504 / 2 < most <= 65504


def test_exponents_of_odd_matrices():
    """Zeros, tiny weights and those that are no numbers have factors that the kernel can make."""
    assert kernel.select_exponent(0.0, 0.0) == kernel.select_exponent(1e-9, 1e-9) == 0
    for odd in (float("nan"), float("inf"), 1e9):
        assert kernel.select_exponent(odd, 1.0) == -24
    part = make_weight(QuantType.Q4_K, 17, 512, torch.device("cpu"))
    exponents = [weight_exponent(packed_repack(part, layout)) for layout in LAYOUTS]
    data = part.planes["data"].unflatten(1, (-1, 144))[:, :, :2].contiguous().view(torch.float16)
    assert exponents == [kernel.select_exponent(63 * data.abs().max().item(), 0.0)] * 2


def test_no_tokens(hopper):
    weight = prepare_packed(make_weight(TYPES[0], 17, 256, hopper), Layout.SOA)
    assert packed_gemm(torch.empty(0, 256).half().to(hopper), weight).shape == (0, 17)


def test_wrong_arguments(device):
    part = make_weight(TYPES[0], 17, 512, device)
    weight = prepare_packed(part, Layout.SOA)
    x = torch.zeros(20, 512, dtype=torch.float16, device=device)
    for bad in (x.float(), x[:, :256], x[0], x.t().contiguous().t()):
        with pytest.raises(ArgumentError, match="packed_gemm: x is"):
            packed_gemm(bad, weight)
    with pytest.raises(ArgumentError, match="in layout FILE"):
        packed_gemm(x, prepare_packed(part, Layout.FILE))
    for bad in (torch.zeros(20, 16), torch.zeros(17, 20).t(), torch.zeros(20, 17).double()):
        with pytest.raises(ArgumentError, match="packed_gemm: out is"):
            packed_gemm(x, weight, out=bad.to(device))
