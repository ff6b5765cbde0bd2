"""From one attention to the next in one launch: against the oracle, a token's bits its own."""

from __future__ import annotations

import functools

import pytest
import torch

from tests import fused_layer_tail_on_cpu
from tests.fused_layer_tail_model import EPS, make_model, qwen3_8b
from tests.packed_weights import make_weight
from tiercel.errors import ArgumentError
from tiercel.kernels.fused import fused_layer_tail as kernel
from tiercel.kernels.fused.fused_layer_tail_geometry import (
    ChainShape,
    ChainTypes,
    partition,
)
from tiercel.kernels.fused.fused_refusal import SMEM_BYTES, Refusal
from tiercel.ops.fused_layer_tail import (
    fused_layer_tail,
    make_exchange,
    prepare_fused_layer_tail,
)
from tiercel.ops.packed_matvec import prepare_packed
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import fused_layer_tail as oracle

CPU = torch.device("cpu")
V_AND_DOWN = ("v", "down")  # Q6_K in half of the layers of a Q4_K_M file
ALL = ("o", "gate_up", "down", "qk", "v")
# Inputs of four matrices are rounded to float16, weights of Q6_K to 11 bits, one after the other.
TOLERANCE = 1e-3
MAX_TOKENS = 16
QWEN3_8B = qwen3_8b()
# Of 32 SMs or fewer, which tests may have for a GPU. Two groups of the residual for some CTAs, one
# for others; halves of 3 and 5 columns; a last round of half the CTAs; single tiles of q, k and v.
TWO_GROUPS = ChainShape(1536, 1024, 2560, 1024, 512)
# A column a half, which leaves classes without one; tiles of q, k and v for 12 CTAs of 16.
NARROW = ChainShape(512, 512, 1024, 256, 128)
# Attention wider than the residual, which leaves CTAs without a group of it; the last layer.
WIDE_ATTENTION = ChainShape(1024, 1536, 3072, 256, 128)


def make_inputs(tokens, device, seed=0, shape=QWEN3_8B):
    """Tokens of different size; some columns stand out."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = 10.0 ** torch.linspace(-1, 2, tokens, device=device)[:, None]
    attended = torch.randn(tokens, shape.attended, device=device, generator=generator)
    x = torch.randn(tokens, shape.hidden, device=device, generator=generator) * sizes
    x[:, ::97] *= 20
    return attended.half(), x


def relative_error(actual, expected):
    return ((actual.double() - expected).norm(dim=1) / expected.norm(dim=1)).max().item()


def run_both(model, tokens, device):
    """The largest error of the update of the residual and of q, k, v; NaN if one is NaN."""
    attended, x = make_inputs(tokens, device, shape=model.weights.geometry.shape)
    before = x.clone()
    expected, heads = oracle.fused_layer_tail(attended, x, model.dense(), EPS)
    found = fused_layer_tail(attended, x, model.weights, model.exchange)
    added = expected - before.double()
    errors = relative_error(x.double() - before.double(), added), relative_error(found, heads)
    return torch.tensor(errors).max().item()


@pytest.mark.parametrize("six", [(), V_AND_DOWN])
def test_cpu_matches_oracle(six):
    assert run_both(make_model(six, TWO_GROUPS, CPU), 3, CPU) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("six", "slices"), [((), 3), (V_AND_DOWN, 3), (ALL, 1), (("qk",), 2), (("o", "gate_up"), 4)]
)
def test_matches_oracle(six, slices, device):
    model = make_model(six, qwen3_8b(slices), device)
    for tokens in (1, 2, 7, 8, 9, 16):
        assert run_both(model, tokens, device) < TOLERANCE, tokens


# Of published sizes other than Qwen3-8B: hidden, heads, inner, rows of q and k and of v.
SIZES = {
    "qwen3-0.6b": ChainShape(1024, 2048, 3072, 3072, 1024),
    "qwen3-1.7b": ChainShape(2048, 2048, 6144, 3072, 1024),
    "qwen3-4b": ChainShape(2560, 4096, 9728, 5120, 1024),
    "qwen3-14b": ChainShape(5120, 5120, 17408, 6144, 1024),
    "qwen3-32b": ChainShape(5120, 8192, 25600, 9216, 1024),
    "llama3-1b": ChainShape(2048, 2048, 8192, 2560, 512),
    "llama3-3b": ChainShape(3072, 3072, 8192, 4096, 1024),
    "llama3-8b": ChainShape(4096, 4096, 14336, 5120, 1024),
    "llama3-70b": ChainShape(8192, 8192, 28672, 9216, 1024),
}


@pytest.mark.gpu
@pytest.mark.parametrize("six", [(), V_AND_DOWN], ids=["four", "six"])
@pytest.mark.parametrize("size", SIZES)
def test_every_size_matches_oracle_with_bits_of_its_own(size, six, device):
    """In launches of few tokens and many; twice, and beside any other tokens."""
    model = make_model(six, SIZES[size], device)
    most = model.weights.geometry.max_tokens
    for tokens in {1, most - 1, most}:
        assert run_both(model, tokens, device) < TOLERANCE, tokens
    attended, start = make_inputs(most, device, shape=model.weights.geometry.shape)
    whole = start.clone()
    heads = fused_layer_tail(attended, whole, model.weights, model.exchange)
    for first in range(most):
        x = start[first:].clone()
        found = fused_layer_tail(attended[first:], x, model.weights, model.exchange)
        assert torch.equal(x, whole[first:])
        assert torch.equal(found, heads[first:])


@pytest.mark.gpu
@pytest.mark.parametrize("six", [(), V_AND_DOWN])
def test_a_token_has_the_same_bits_in_every_batch(six, device):
    model = make_model(six, QWEN3_8B, device)
    attended, x = make_inputs(MAX_TOKENS, device)
    whole = x.clone()
    heads = fused_layer_tail(attended, whole, model.weights, model.exchange)
    for tokens in range(1, MAX_TOKENS + 1):
        for _ in range(3):
            order = torch.randperm(MAX_TOKENS, device=device)[:tokens]
            some = x[order]
            found = fused_layer_tail(attended[order], some, model.weights, model.exchange)
            assert torch.equal(some, whole[order])
            assert torch.equal(found, heads[order])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [qwen3_8b(4), *SIZES.values()], ids=["wide", *SIZES])
@pytest.mark.parametrize("tokens", [7, 16])
def test_many_launches_have_the_same_bits(tokens, shape, device):
    """Sums were overwritten while they were read, in the widest once in 150 launches."""
    model = make_model(("o", "gate_up"), shape, device)
    tokens = min(tokens, model.weights.geometry.max_tokens)
    attended, start = make_inputs(tokens, device, shape=shape)
    x = start.clone()
    heads = fused_layer_tail(attended, x, model.weights, model.exchange)
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(4000):
        again = start.clone()
        found = fused_layer_tail(attended, again, model.weights, model.exchange)
        different += (again != x).any() | (found != heads).any()
    assert different == 0


def make_models_near_the_wrap(shape, device, launches, num_sms=128):
    """An inner layer and a last one; counts of their exchange wrap around after some launches."""
    models = [
        make_model((), shape, device, is_last=last, num_sms=num_sms) for last in (False, True)
    ]
    exchange = models[0].exchange
    exchange.launches.fill_(-launches)
    exchange.counters.fill_(-8 * launches)
    return models, exchange


@pytest.mark.gpu
def test_launches_of_all_shapes_share_an_exchange(device):
    """Counters of tokens 8 and on lag behind; all of them wrap around at 2**32."""
    models, exchange = make_models_near_the_wrap(QWEN3_8B, device, 100)
    attended, start = make_inputs(MAX_TOKENS, device)
    whole = start.clone()
    all_heads = fused_layer_tail(attended, whole, models[0].weights, exchange)
    assert not whole.isnan().any()
    different = torch.zeros((), dtype=torch.int64, device=device)
    for launch in range(2000):
        tokens, is_last = 1 + 7 * launch % MAX_TOKENS, launch % 5 == 3
        x = start[:tokens].clone()
        heads = fused_layer_tail(attended[:tokens], x, models[is_last].weights, exchange)
        different += (x != whole[:tokens]).any()
        if heads is not None:
            different += (heads != all_heads[:tokens]).any()
    assert different == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 16])
def test_replays_have_the_bits_of_direct_launches(tokens, device):
    """Launches that depend on each other, 40 steps."""
    models = [
        make_model(six, QWEN3_8B, device, seed) for seed, six in enumerate(((), V_AND_DOWN, ()))
    ]
    exchange = models[0].exchange
    attended, start = make_inputs(tokens, device)

    def steps(x, *, is_dependent):
        outputs = attended
        for model in models:
            heads = fused_layer_tail(outputs, x, model.weights, exchange, is_dependent=is_dependent)
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
    model, whole = (make_model((), QWEN3_8B, device, is_last=last) for last in (True, False))
    attended, x = make_inputs(5, device)
    expected = x.clone()
    fused_layer_tail(attended, expected, whole.weights, whole.exchange)
    assert fused_layer_tail(attended, x, model.weights, model.exchange) is None
    assert torch.equal(x, expected)


# Every matrix of either type, v of the type of q and k or not; one tile of tokens or two; the last
# layer. `launches`: of the same inputs, the second time each at another place.
SOURCE_CASES = [
    pytest.param(5, TWO_GROUPS, 32, ("gate_up", "v"), False, 2, id="two_groups"),
    pytest.param(11, NARROW, 16, ("o", "down", "qk"), False, 2, id="tiles"),
    pytest.param(2, WIDE_ATTENTION, 48, (), True, 2, id="last"),
    pytest.param(11, TWO_GROUPS, 32, V_AND_DOWN, False, 1, id="two_tiles", marks=pytest.mark.slow),
    pytest.param(16, NARROW, 20, ALL, False, 2, id="six", marks=pytest.mark.slow),
    pytest.param(5, qwen3_8b(1), 128, V_AND_DOWN, False, 1, id="8b", marks=pytest.mark.slow),
    pytest.param(3, SIZES["qwen3-4b"], 128, (), False, 1, id="4b", marks=pytest.mark.slow),
    pytest.param(9, SIZES["qwen3-14b"], 128, (), False, 1, id="14b", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def build_source(tmp_path_factory):
    """Compiles the source for a number of tokens and a model; once for each."""

    @functools.cache
    def build(tokens, shape, num_sms, six, is_last):
        model = make_model(six, shape, CPU, is_last=is_last, num_sms=num_sms)
        folder = tmp_path_factory.mktemp("chain")
        return model, fused_layer_tail_on_cpu.build(tokens, model.weights, folder)

    return build


@pytest.mark.parametrize(("tokens", "shape", "num_sms", "six", "is_last", "launches"), SOURCE_CASES)
def test_source_in_any_order_of_warps(tokens, shape, num_sms, six, is_last, launches, build_source):
    """It is right, and neither the order of warps nor a token's place changes a bit."""
    model, library = build_source(tokens, shape, num_sms, six, is_last)
    attended, start = make_inputs(tokens, CPU, shape=shape)
    expected = start.clone()
    expected_heads = fused_layer_tail(attended, expected, model.weights, model.exchange)
    model.exchange.launches.fill_(-2)  # counts wrap around at 2**32
    model.exchange.counters.fill_(-16)
    results = []
    for seed in range(launches):
        model.exchange.data.fill_(0xFF)  # NaN
        x = start.roll(seed, 0)
        heads = fused_layer_tail_on_cpu.run(
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
    """CTAs that wait in vain for other CTAs end after a while, with NaN."""
    model, library = build_source(2, WIDE_ATTENTION, 48, (), True)
    attended, x = make_inputs(2, CPU, shape=WIDE_ATTENTION)
    exchange = make_exchange(model.weights.geometry, CPU)
    fused_layer_tail_on_cpu.run(library, attended, x, model.weights, exchange, late=40)
    # Numbers of a cluster's CTAs are 24 apart; of 32 groups the late ones own 20 to 23.
    owned = [group for group in range(32) if not 20 <= group % 24 < 24]
    assert x.unflatten(1, (32, 32))[:, owned].isnan().all()


def test_launches_of_all_shapes_share_an_exchange_in_the_source(tmp_path):
    """Counters of tokens 8 and on lag behind; all of them wrap around at 2**32."""
    models, exchange = make_models_near_the_wrap(NARROW, CPU, 2, num_sms=16)
    libraries = {}
    for tokens, is_last in ((16, False), (5, False), (5, True)):
        folder = tmp_path / f"{tokens} {is_last}"
        folder.mkdir()
        weights = models[is_last].weights
        libraries[tokens, is_last] = fused_layer_tail_on_cpu.build(tokens, weights, folder)
    attended, start = make_inputs(MAX_TOKENS, CPU, shape=NARROW)
    shapes = [(16, False), (5, True), (16, False), (5, False)]
    for seed, (tokens, is_last) in enumerate(shapes):
        exchange.data.fill_(0xFF)  # NaN
        x, weights = start[:tokens].clone(), models[is_last].weights
        library = libraries[tokens, is_last]
        heads = fused_layer_tail_on_cpu.run(
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
    return prepare_packed(make_weight(qtype, rows, columns, CPU), layout)


def test_what_does_not_fit_says_why():
    norm = torch.ones(512)
    o, down, gate_up = pack(512, 1024), pack(512, 1536), pack(3072, 512)
    qkv = pack(256, 512)

    def prepare(o=o, gate_up=gate_up, down=down, qkv=(qkv,)):
        found = prepare_fused_layer_tail([o], [gate_up], [down], qkv, norm, norm, EPS, 16)
        return found.reason if isinstance(found, Refusal) else found.geometry.shape

    assert prepare() == ChainShape(512, 1024, 1536, 256)
    assert prepare(qkv=()) == ChainShape(512, 1024, 1536, 0)
    v = pack(64, 512, QuantType.Q6_K)
    assert prepare(qkv=(qkv, v)) == ChainShape(512, 1024, 1536, 256, 64)
    assert prepare(qkv=(qkv, pack(64, 512))) == "q, k and v: two segments of one type"
    assert prepare(qkv=(qkv, v, qkv)) == "q, k and v: 3 segments of different types"
    assert prepare(o=pack(512, 512, QuantType.Q5_K)) == "o: Q5_K; the kernel reads Q4_K and Q6_K"
    in_file = pack(512, 1536, layout=Layout.FILE)
    assert "in the layout of the file" in prepare(down=in_file)
    assert prepare(o=pack(256, 1024)).startswith("matrices of shapes [(256, 1024)")
    assert prepare(gate_up=pack(1536, 512)).startswith("matrices of shapes")
    assert prepare(qkv=(pack(256, 1024),)).startswith("matrices of shapes")
    assert prepare(o=pack(512, 768)) == "num_heads * head_dim is 768, not a multiple of 512"
    assert prepare(qkv=(pack(272, 512),)) == "q and k have 272 rows, not a multiple of 32"


def test_wrong_arguments():
    model = make_model((), NARROW, CPU, num_sms=16)
    attended, x = make_inputs(3, CPU, shape=NARROW)
    for wrong in (attended.float(), attended[:2], attended[:, :256], attended[:0]):
        with pytest.raises(ArgumentError, match="attended is"):
            fused_layer_tail(wrong, x, model.weights, model.exchange)
    other = partition(TWO_GROUPS, ChainTypes(False, False, False), 32)
    with pytest.raises(ArgumentError, match=r"is for 22 columns of 256, the layer has 8\."):
        fused_layer_tail(attended, x, model.weights, make_exchange(other, CPU))
    many = make_inputs(MAX_TOKENS + 1, CPU, shape=NARROW)
    with pytest.raises(ArgumentError, match=r"attended is \(17, 512\)"):
        fused_layer_tail(*many, model.weights, model.exchange)


@pytest.mark.parametrize("six", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_sources_fit_shared_memory(size, six):
    """Beside a CTA of the next kernel, of 1 KiB as each has, but for 16 tokens of the widest."""
    geometry = partition(SIZES[size], ChainTypes(False, False, six), 132)
    for tokens in (1, geometry.max_tokens):
        beside = 1024 if tokens == 1 or geometry.ring(2).slots == 12 else 0
        assert kernel.smem_bytes(tokens, geometry) + beside <= SMEM_BYTES
