"""From one attention to the next in one launch: against the oracle, a token's bits its own."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from tests import decode_chain_on_cpu
from tests.decode_chain_model import EPS, make_model
from tests.q4k_weights import make_weight
from tiercel.errors import ArgumentError
from tiercel.kernels import decode_chain as kernel
from tiercel.ops.decode_chain import (
    MAX_TOKENS,
    decode_chain,
    make_exchange,
    prepare_decode_chain,
)
from tiercel.ops.q4k_matvec import prepare_q4k
from tiercel.quant import Layout, QuantType
from tiercel.reference import decode_chain as oracle

CPU = torch.device("cpu")
V_AND_DOWN = ("v", "down")  # Q6_K in half of the layers of a Q4_K_M file
ALL = ("o", "gate_up", "down", "qk", "v")
# Inputs of four matrices are rounded to float16, weights of Q6_K to 11 bits, one after the other.
TOLERANCE = 1e-3


def make_inputs(tokens, device, seed=0):
    """Tokens of different size; some columns stand out."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = 10.0 ** torch.linspace(-1, 2, tokens, device=device)[:, None]
    attended = torch.randn(tokens, 4096, device=device, generator=generator)
    x = torch.randn(tokens, 4096, device=device, generator=generator) * sizes
    x[:, ::97] *= 20
    return attended.half(), x


def relative_error(actual, expected):
    return ((actual.double() - expected).norm(dim=1) / expected.norm(dim=1)).max().item()


def run_both(model, tokens, device):
    """The largest error, of what is added to the residual and of q, k, v; NaN if one is."""
    attended, x = make_inputs(tokens, device)
    before = x.clone()
    expected, heads = oracle.decode_chain(attended, x, model.dense(), EPS)
    found = decode_chain(attended, x, model.weights, model.exchange)
    added = expected - before.double()
    errors = relative_error(x.double() - before.double(), added), relative_error(found, heads)
    return torch.tensor(errors).max().item()


@pytest.mark.parametrize("six", [(), V_AND_DOWN])
def test_cpu_matches_oracle(six):
    assert run_both(make_model(six, 1, CPU), 3, CPU) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("six", "slices"), [((), 3), (V_AND_DOWN, 3), (ALL, 1), (("qk",), 2), (("o", "gate_up"), 4)]
)
def test_matches_oracle(six, slices, device):
    model = make_model(six, slices, device)
    for tokens in (1, 2, 7, 8, 9, 16):
        assert run_both(model, tokens, device) < TOLERANCE, tokens


@pytest.mark.gpu
@pytest.mark.parametrize("six", [(), V_AND_DOWN])
def test_a_token_has_the_same_bits_in_every_batch(six, device):
    model = make_model(six, 3, device)
    attended, x = make_inputs(MAX_TOKENS, device)
    whole = x.clone()
    heads = decode_chain(attended, whole, model.weights, model.exchange)
    for tokens in range(1, MAX_TOKENS + 1):
        for _ in range(3):
            order = torch.randperm(MAX_TOKENS, device=device)[:tokens]
            some = x[order]
            found = decode_chain(attended[order], some, model.weights, model.exchange)
            assert torch.equal(some, whole[order])
            assert torch.equal(found, heads[order])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [7, 16])
def test_many_launches_have_the_same_bits(tokens, device):
    """Sums were overwritten while they were read, here once in 150 launches."""
    model = make_model(("o", "gate_up"), 4, device)
    attended, start = make_inputs(tokens, device)
    x = start.clone()
    heads = decode_chain(attended, x, model.weights, model.exchange)
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(4000):
        again = start.clone()
        found = decode_chain(attended, again, model.weights, model.exchange)
        different += (again != x).any() | (found != heads).any()
    assert different == 0


def make_models_near_the_wrap(slices, device, launches):
    """An inner layer and a last one; counts of their exchange wrap around after some launches."""
    models = [make_model((), slices, device, is_last=last) for last in (False, True)]
    exchange = models[0].exchange
    exchange.launches.fill_(-launches)
    exchange.counters.fill_(-8 * launches)
    return models, exchange


@pytest.mark.gpu
def test_launches_of_all_shapes_share_an_exchange(device):
    """Counters of tokens 8 and on lag behind; all of them wrap around at 2**32."""
    models, exchange = make_models_near_the_wrap(3, device, 100)
    attended, start = make_inputs(MAX_TOKENS, device)
    whole = start.clone()
    all_heads = decode_chain(attended, whole, models[0].weights, exchange)
    assert not whole.isnan().any()
    different = torch.zeros((), dtype=torch.int64, device=device)
    for launch in range(2000):
        tokens, is_last = 1 + 7 * launch % MAX_TOKENS, launch % 5 == 3
        x = start[:tokens].clone()
        heads = decode_chain(attended[:tokens], x, models[is_last].weights, exchange)
        different += (x != whole[:tokens]).any()
        if heads is not None:
            different += (heads != all_heads[:tokens]).any()
    assert different == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 16])
def test_replays_have_the_bits_of_direct_launches(tokens, device):
    """Launches that depend on each other, 40 steps."""
    models = [make_model(six, 3, device, seed) for seed, six in enumerate(((), V_AND_DOWN, ()))]
    exchange = models[0].exchange
    attended, start = make_inputs(tokens, device)

    def steps(x, *, is_dependent):
        outputs = attended
        for model in models:
            heads = decode_chain(outputs, x, model.weights, exchange, is_dependent=is_dependent)
            outputs = heads[:, :4096].contiguous()
        return heads

    x = start.clone()
    steps(x, is_dependent=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        heads = steps(x, is_dependent=True)
    for step in range(40):
        x.copy_(start * (1 + step / 40))
        direct = x.clone()
        graph.replay()
        expected = steps(direct, is_dependent=False)
        assert torch.equal(x, direct)
        assert torch.equal(heads, expected)


@pytest.mark.gpu
def test_the_last_layer_has_no_next_one(device):
    model, whole = (make_model((), 3, device, is_last=last) for last in (True, False))
    attended, x = make_inputs(5, device)
    expected = x.clone()
    decode_chain(attended, expected, whole.weights, whole.exchange)
    assert decode_chain(attended, x, model.weights, model.exchange) is None
    assert torch.equal(x, expected)


# Every matrix of either type, v of the type of q and k or not; one tile of tokens or two, one slice
# or two, the last layer. `launches`: of the same inputs, the second time each at another place.
SOURCE_CASES = [
    pytest.param(5, 2, ("gate_up", "v"), False, 1, id="slices"),
    pytest.param(11, 1, ("o", "down", "qk"), False, 2, id="tiles"),
    pytest.param(2, 1, (), True, 1, id="last"),
    pytest.param(5, 2, (), False, 2, marks=pytest.mark.slow),
    pytest.param(11, 1, V_AND_DOWN, False, 2, marks=pytest.mark.slow),
    pytest.param(16, 1, ALL, False, 2, marks=pytest.mark.slow),
    pytest.param(2, 1, ("o",), True, 2, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def build_source(tmp_path_factory):
    """Compiles the source for a number of tokens and a model; once for each."""

    @functools.cache
    def build(tokens, slices, six, is_last):
        model = make_model(six, slices, CPU, is_last=is_last)
        folder = tmp_path_factory.mktemp("chain")
        return model, decode_chain_on_cpu.build(tokens, model.weights, folder)

    return build


@pytest.mark.parametrize(("tokens", "slices", "six", "is_last", "launches"), SOURCE_CASES, ids=str)
def test_source_in_any_order_of_warps(tokens, slices, six, is_last, launches, build_source):
    """It is right, and neither who comes first nor a token's place changes a bit."""
    model, library = build_source(tokens, slices, six, is_last)
    attended, start = make_inputs(tokens, CPU)
    expected = start.clone()
    expected_heads = decode_chain(attended, expected, model.weights, model.exchange)
    model.exchange.launches.fill_(-2)  # counts wrap around at 2**32
    model.exchange.counters.fill_(-16)
    results = []
    for seed in range(launches):
        model.exchange.data.fill_(0xFF)  # NaN
        x = start.roll(seed, 0)
        heads = decode_chain_on_cpu.run(
            library, attended.roll(seed, 0), x, model.weights, model.exchange, seed=seed
        )
        assert (heads is None) == is_last
        results.append([y.roll(-seed, 0) for y in (x, heads) if y is not None])
    assert relative_error(results[0][0] - start, (expected - start).double()) < TOLERANCE
    if not is_last:
        assert relative_error(results[0][1], expected_heads.double()) < TOLERANCE
    for first, second in zip(results[0], results[-1], strict=True):
        assert torch.equal(first, second)
    added = torch.tensor([launches, launches if tokens > 8 else 0])  # tokens 8 and on: the second
    assert (model.exchange.launches == added[:, None] - 2).all()
    assert (model.exchange.counters == 8 * (added - 2)).all()


def test_source_ends_without_its_neighbours(build_source):
    """CTAs that wait for others in vain end after a while, with NaN."""
    model, library = build_source(2, 1, (), True)
    attended, x = make_inputs(2, CPU)
    exchange = make_exchange(1, CPU)
    decode_chain_on_cpu.run(library, attended, x, model.weights, exchange, late=120)
    assert x[:, : 120 * 32].isnan().all()


@pytest.mark.slow
def test_launches_of_all_shapes_share_an_exchange_in_the_source(tmp_path):
    """Counters of tokens 8 and on lag behind; all of them wrap around at 2**32."""
    models, exchange = make_models_near_the_wrap(1, CPU, 2)
    libraries = {}
    for tokens, is_last in ((16, False), (5, False), (5, True)):
        folder = tmp_path / f"{tokens} {is_last}"
        folder.mkdir()
        weights = models[is_last].weights
        libraries[tokens, is_last] = decode_chain_on_cpu.build(tokens, weights, folder)
    attended, start = make_inputs(MAX_TOKENS, CPU)
    shapes = [(16, False), (5, True), (16, False), (5, False)]
    for seed, (tokens, is_last) in enumerate(shapes):
        exchange.data.fill_(0xFF)  # NaN
        x, weights = start[:tokens].clone(), models[is_last].weights
        library = libraries[tokens, is_last]
        heads = decode_chain_on_cpu.run(
            library, attended[:tokens].clone(), x, weights, exchange, seed=seed
        )
        if seed == 0:
            whole, all_heads = x, heads
        assert torch.equal(x, whole[:tokens])
        assert is_last == (heads is None)
        assert heads is None or torch.equal(heads, all_heads[:tokens])
    assert (exchange.launches == torch.tensor([[2], [0]])).all()
    assert (exchange.counters == torch.tensor([16, 0])).all()


def pack(rows, columns, qtype=QuantType.Q4_K, layout=Layout.SOA):
    return prepare_q4k(make_weight(qtype, rows, columns, CPU), layout)


def test_what_does_not_fit():
    norm = torch.ones(4096)
    o, down, gate_up = pack(4096, 4096), pack(4096, 4096), pack(8192, 4096)
    qkv = pack(6144, 4096)

    def prepare(o=o, gate_up=gate_up, down=down, qkv=(qkv,)):
        return prepare_decode_chain([o], [gate_up], [down], qkv, norm, norm, EPS)

    assert prepare() is not None
    assert prepare(qkv=()) is not None
    assert prepare(qkv=(pack(5120, 4096), pack(1024, 4096, QuantType.Q6_K))) is not None
    assert prepare(qkv=(pack(5120, 4096), pack(1024, 4096))) is None
    assert prepare(o=pack(4096, 4096, QuantType.Q5_K)) is None
    assert prepare(o=pack(4096, 4096, layout=Layout.FILE)) is None
    assert prepare(o=pack(4096, 2048)) is None
    assert prepare(qkv=(pack(5120, 4096),)) is None
    assert prepare(gate_up=pack(4096, 4096)) is None


def test_wrong_arguments():
    model = make_model((), 1, CPU)
    attended, x = make_inputs(3, CPU)
    for wrong in (attended.float(), attended[:2], attended[:, :2048], attended[:0]):
        with pytest.raises(ArgumentError, match="attended is"):
            decode_chain(wrong, x, model.weights, model.exchange)
    with pytest.raises(ArgumentError, match="the exchange is for 3 slices of 4096, down has 1"):
        decode_chain(attended, x, model.weights, make_exchange(3, CPU))
    many = make_inputs(MAX_TOKENS + 1, CPU)
    with pytest.raises(ArgumentError, match=r"attended is \(17, 4096\)"):
        decode_chain(*many, model.weights, model.exchange)


def test_sources_fit_shared_memory():
    """Beside a CTA of the next kernel, of 1 KiB as each has."""
    for tokens in (1, 8, 9, 16):
        for six in (False, True):
            types = replace(kernel.ChainTypes(False, False, False), down=six)
            assert kernel.smem_bytes(tokens, types) + 1024 <= kernel.SMEM_BYTES
            macros = dict(kernel.cuda_source(tokens, 3, types, is_last=False).macros)
            assert macros["XSLOTS"] % 4 == 0
