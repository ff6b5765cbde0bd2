"""The product with K-quants: against the oracle, and each token's bits its own."""

import numpy as np
import pytest
import torch

from tiercel.errors import ArgumentError
from tiercel.kernels import q4k_matvec as kernel
from tiercel.ops.dequantize import dequantize
from tiercel.ops.linear import select_form
from tiercel.ops.q4k_matvec import MAX_TOKENS, prepare_q4k, q4k_matvec
from tiercel.quant import PLANES, Layout, QuantTensor, QuantType
from tiercel.reference import q4k_matvec as oracle

TYPES = list(PLANES)
# Q4_K: float32 sums of exact operands. Q6_K: scale * (q - 32) keeps 11 bits, so half of the
# weights are rounded, by 2**-12 at most. CPUs multiply the decoded float32 weights.
TOLERANCE = {QuantType.Q4_K: 2e-6, QuantType.Q6_K: 3e-4}
# (rows, columns): one row, less than a tile, a row more than one, uneven tiles; fewer units than
# warps, more, a slice and a bit.
SHAPES = [(1, 256), (15, 512), (17, 1024), (100, 2304), (33, 4352)]


def make_weight(qtype, rows, columns, device, seed=0):
    """Random bits with d (and dmin) of real files: 1e-5 to 1e-3, of both signs, some subnormal."""
    rng = np.random.default_rng(seed)
    blocks = columns // 256
    data = rng.integers(0, 256, (rows, blocks, qtype.block_bytes), dtype=np.uint8)
    places = (0, 2) if qtype is QuantType.Q4_K else (208,)
    for at in places:
        d = 10.0 ** rng.uniform(-5, -3, (rows, blocks, 1)) * rng.choice([-1, 1], (rows, blocks, 1))
        data[:, :, at : at + 2] = d.astype(np.float16).view(np.uint8).reshape(rows, blocks, 2)
    flat = torch.from_numpy(data.reshape(rows, -1)).to(device)
    return QuantTensor(qtype, Layout.FILE, (rows, columns), {"data": flat})


def make_tokens(tokens, columns, device):
    """Tokens of different size, with outliers that decide: each scale and mean shows."""
    x = torch.randn(tokens, columns) * 10.0 ** torch.linspace(-2, 1, tokens)[:, None]
    x[:, ::97] *= 50
    return x.half().to(device)


def relative_error(actual, expected):
    return ((actual.double().cpu() - expected).norm(dim=1) / expected.norm(dim=1)).max().item()


@pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_matches_oracle(rows, columns, qtype, layout, device):
    part = make_weight(qtype, rows, columns, device)
    weight = prepare_q4k(part, layout)
    x = make_tokens(5, columns, device)
    wide = torch.full((7, rows + 3), float("nan"), device=device)
    out = q4k_matvec(x, weight, out=wide[1:6, 2 : rows + 2])
    assert out.data_ptr() == wide[1:6, 2:].data_ptr()
    expected = oracle.q4k_matvec(x, part.planes["data"], qtype.name)
    assert relative_error(out, expected) < TOLERANCE[qtype]
    wide[1:6, 2 : rows + 2] = float("nan")
    assert wide.isnan().all()  # nothing beside the result was written


@pytest.mark.parametrize("dtype", kernel.OUT_CODES, ids=str)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_results_are_rounded_once(qtype, dtype, device):
    weight = prepare_q4k(make_weight(qtype, 40, 768, device), Layout.SOA)
    x = make_tokens(3, 768, device)
    exact = q4k_matvec(x, weight, torch.float32)
    out = q4k_matvec(x, weight, dtype)
    assert out.dtype == dtype
    assert torch.equal(out, exact.to(dtype))


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
@pytest.mark.parametrize(("rows", "columns"), [(37, 1280), (20, 4096), (24, 12288)])
def test_a_tokens_bits_are_its_own(rows, columns, qtype, device):
    """Alone, in every batch of up to 16, at every place, from both layouts: bit by bit."""
    part = make_weight(qtype, rows, columns, device)
    x = make_tokens(MAX_TOKENS, columns, device)
    weight = prepare_q4k(part, Layout.SOA)
    file_weight = prepare_q4k(part, Layout.FILE)
    whole = q4k_matvec(x, weight, torch.float32)
    for tokens in range(1, MAX_TOKENS + 1):
        first = q4k_matvec(x[:tokens], weight, torch.float32)
        assert torch.equal(first, whole[:tokens])
        last = q4k_matvec(x[-tokens:], file_weight, torch.float32)
        assert torch.equal(last, whole[-tokens:])


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_every_launch_sums_in_one_order(qtype, device):
    """What `select_q4k_matvec` may change between shapes does not change a bit."""
    if device.type == "cpu":
        pytest.skip("launches differ on a GPU alone")
    part = make_weight(qtype, 70, 8448, device)
    weight = prepare_q4k(part, Layout.SOA)
    x = make_tokens(4, 8448, device)
    expected = q4k_matvec(x, weight, torch.float32)
    for groups, stages, early, buffers, is_split in (
        (1, 1, 1, 1, False),
        (2, 2, 1, 1, True),
        (1, 4, 4, 2, True),
        (2, 1, 1, 2, False),
    ):
        for grid in (1, 2):
            config = kernel.make_config(
                qtype.name, 33, 4, groups, stages, early, buffers, 1, grid, is_split=is_split
            )
            out = torch.full((4, 70), float("nan"), device=device)
            partial = torch.full((3, 4, 80), float("nan"), device=device)
            kernel.launch_q4k_matvec(
                x,
                weight.tensor.ordered_planes(),
                qtype.name,
                out,
                partial,
                weight.tickets,
                config,
                is_dependent=False,
            )
            assert torch.equal(out, expected)
            assert not weight.tickets.any()  # ready for the next launch


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_dependent_launches_in_a_graph(qtype, device):
    """Each product reads what the one before wrote: 50 replays, bits of direct launches."""
    is_dependent = torch.cuda.get_device_capability() >= (9, 0)
    parts = [make_weight(qtype, 1024, 1024, device, seed) for seed in range(4)]
    weights = [prepare_q4k(p, Layout.SOA, is_dependent=is_dependent) for p in parts]
    start = make_tokens(2, 1024, device) * 0.01

    def chain(y, weights):
        for weight in weights:
            y = q4k_matvec(y, weight)
            y = y / y.abs().amax(dim=1, keepdim=True)
            y = q4k_matvec(y.contiguous(), weight) * 0.01
        return y

    x = start.clone()
    chain(x, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, weights)
    plain = [prepare_q4k(p, Layout.SOA) for p in parts]
    for step in range(50):
        x.copy_(start * (1 + step / 50))
        graph.replay()
        assert torch.equal(out, chain(x, plain))


# An H200, a device with 99 KiB a CTA (sm_89, sm_120), one with few multiprocessors.
LIMITS = (kernel.H200, kernel.DeviceLimits(142, 99 << 10), kernel.DeviceLimits(20, 163 << 10))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_configs_fit_every_shape(qtype, limits):
    """Every model's matrices get a launch that fits an SM; a class of tokens has one kernel."""
    for rows in (1, 576, 1024, 4096, 6144, 24576, 151936):
        for columns in (256, 512, 1024, 2048, 3072, 4096, 5120, 9728, 12288, 17408, 25600):
            for tokens in range(1, MAX_TOKENS + 1):
                config = kernel.select_q4k_matvec(qtype.name, (rows, columns), tokens, limits)
                assert config.smem_bytes <= limits.smem_bytes
                assert 1 <= config.early <= config.stages
                assert 0 < config.grid * config.groups < rows / 16 + 1 + config.groups
                assert config.grid <= config.ctas * limits.num_sms
                assert config.parts == (4 if columns <= 1024 else 8)
                most = kernel.token_class(tokens, qtype.name, limits)
                assert most >= min(tokens, 8)
                assert kernel.select_q4k_matvec(qtype.name, (rows, columns), most, limits) == config


def test_no_tokens(device):
    weight = prepare_q4k(make_weight(QuantType.Q4_K, 17, 256, device), Layout.SOA)
    assert q4k_matvec(torch.empty(0, 256).half().to(device), weight).shape == (0, 17)


def test_wrong_arguments(device):
    part = make_weight(QuantType.Q4_K, 17, 512, device)
    weight = prepare_q4k(part, Layout.SOA)
    x = torch.zeros(2, 512, dtype=torch.float16, device=device)
    for bad in (x.float(), x[:, :256], x.repeat(9, 1), x[0], x.t().contiguous().t()):
        with pytest.raises(ArgumentError, match="q4k_matvec: x is"):
            q4k_matvec(bad, weight)
    for bad in (torch.zeros(2, 16), torch.zeros(17, 2).t(), torch.zeros(2, 17).double()):
        with pytest.raises(ArgumentError, match="q4k_matvec: out is"):
            q4k_matvec(x, weight, out=bad.to(device))
    empty = QuantTensor(part.qtype, part.layout, (0, 512), {"data": part.planes["data"][:0]})
    with pytest.raises(ArgumentError, match="is not read here"):
        prepare_q4k(empty, Layout.SOA)
    dense = QuantTensor(QuantType.F16, Layout.FILE, (1, 4), {"data": part.planes["data"][:1, :8]})
    with pytest.raises(ArgumentError, match="F16 of shape"):
        prepare_q4k(dense, Layout.SOA)


def test_forms_and_types_agree():
    """What `linear` keeps packed is what this op reads."""
    packed = {q for q in QuantType if select_form(q.name, 64, torch.float16, "cuda") == "q4k"}
    assert packed == set(TYPES)


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_both_layouts_decode_alike(qtype, device):
    part = make_weight(qtype, 21, 768, device)
    weight = prepare_q4k(part, Layout.SOA).tensor
    for dtype in kernel.OUT_CODES:
        assert torch.equal(dequantize(weight, dtype), dequantize(part, dtype))
