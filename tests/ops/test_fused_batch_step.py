"""All layers in one launch for requests with one new token each: against the oracle, own bits."""

from __future__ import annotations

import pytest
import torch

from tests import fused_batch_step_on_cpu
from tests.fused_batch_step_model import expected_step, make_step
from tests.fused_layer_tail_model import qwen3_8b
from tiercel.errors import ArgumentError
from tiercel.kernels.fused.fused_batch_step import cuda_source
from tiercel.kernels.fused.fused_batch_step_geometry import (
    SPAN,
    Heads,
    Refusal,
    join_layers,
    refuse_heads,
)
from tiercel.kernels.fused.fused_layer_tail_geometry import ChainShape, ChainTypes, partition
from tiercel.ops.fused_batch_step import fused_batch_step

CPU = torch.device("cpu")
TOLERANCE = 1e-3  # a layer, as of the layer tail
# Two query heads on a key/value head, and eight; unequal classes of columns, two groups of the
# residual for some CTAs.
NARROW = ChainShape(512, 512, 1024, 768, 256)
SHARED = ChainShape(512, 1024, 1024, 1152, 128)
TURNED = ChainShape(1536, 1024, 2560, 1280, 256)
# Lengths around tiles of 16 keys, rounds of 512 keys and blocks of 64; 0 is padding.
LENGTHS = [600, 70, 1, 2, 17, 33, 513, 16, 1100, 64, 65, 0, 530, 5, 48, 129]
SHORT = {"SPAN": 512}  # several parts of a request without thousands of keys
TYPES = [(), ("v", "down")]  # Q6_K by layer
POSITIONS = 3 * SPAN  # room for three parts


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Like `fused_batch_step_on_cpu.build`; a source is compiled once."""
    known = {}

    def build(tokens, weights, **macros):
        key = cuda_source(tokens, weights.geometry), tuple(macros)
        if key not in known:
            folder = tmp_path_factory.mktemp("source")
            known[key] = fused_batch_step_on_cpu.build(tokens, weights, folder, **macros)
        return known[key]

    return build


def check(x, caches, step, expected):
    """Residual and caches; nothing else of the caches was written."""
    residual, written = expected
    before = step.x.double().cpu()
    error = (x.double().cpu() - residual).norm(dim=1) / (residual - before).norm(dim=1)
    assert error.max().item() < TOLERANCE * len(step.models)
    slots = step.batch.slot_mapping[0].tolist()
    for new, olds, news in zip(caches, step.caches(), written, strict=True):
        for cache, old, rows in zip(new, olds, news, strict=True):
            flat, untouched = cache.flatten(0, 1).cpu(), old.flatten(0, 1).cpu().clone()
            for slot, row in zip(slots, rows, strict=True):
                if slot >= 0:
                    torch.testing.assert_close(flat[slot].double(), row, rtol=0.01, atol=0.01)
                    untouched[slot] = flat[slot]
            assert torch.equal(flat.nan_to_num(7), untouched.nan_to_num(7))


ROWS = [70, 1, 2, 17, 33, 0, 16, 64, 65]
# Widths, key/value heads, requests, Q6_K by layer, whether heads are normed, SMs, macros.
CASES = [
    pytest.param(NARROW, 2, [1100, 1, 513, 40], TYPES, True, 8, SHORT, id="parts"),
    pytest.param(SHARED, 1, ROWS, [("v",), (), ()], False, 8, {}, id="sixteen rows"),
    pytest.param(
        *(TURNED, 2, LENGTHS[:5], [("qk",), ("o", "gate_up"), ()], False, 32, {}),
        id="two groups",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        *(SHARED, 1, LENGTHS, [("v",), ("o", "gate_up"), ()], True, 16, SHORT),
        id="parts of sixteen",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        *(TURNED, 2, LENGTHS, [("v", "down"), ("qk", "v"), ()], True, 32, SHORT),
        id="two groups, parts of sixteen",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(
    ("shape", "kv_heads", "lengths", "sixes", "has_norms", "num_sms", "macros"), CASES
)
def test_source_in_any_order_of_warps(
    shape, kv_heads, lengths, sixes, has_norms, num_sms, macros, build
):
    """It is right, and neither the order of warps nor other requests change a bit."""
    step = make_step(
        shape, kv_heads, lengths, sixes, CPU,
        has_norms=has_norms, num_sms=num_sms, positions=POSITIONS,
    )  # fmt: skip
    tokens, own = len(lengths), step.with_caches()
    library = build(tokens, step.weights, **macros)
    exchange = own.weights.exchange
    exchange[2].fill_(-2)  # counts wrap around at 2**32
    outputs = shape.attended // 256  # a group of these is published token by token
    each = torch.tensor([8] * (exchange[3].shape[0] - outputs) + [64] * outputs)
    exchange[3].copy_(-2 * each[:, None])
    results = []
    for seed in range(2):
        exchange[0].fill_(0xFF)  # NaN
        order = torch.arange(tokens).roll(seed).tolist()
        heads, x, batch = own.some(order)
        fused_batch_step_on_cpu.run(library, heads, x, own.weights, batch, seed=seed)
        if seed == 0:
            check(x, own.caches(), step, expected_step(step))
        results.append(x.roll(-seed, 0))
    assert torch.equal(*results)
    added = torch.tensor([2 * len(sixes) - 2, 2 * len(sixes) - 2 if tokens > 8 else -2])
    assert (exchange[2] == added[:, None]).all()
    assert torch.equal(exchange[3].long(), each[:, None] * added)


def test_a_request_has_its_bits_beside_any_others(build):
    lengths = [1100, 70, 513]
    step = make_step(NARROW, 2, lengths, TYPES, CPU, num_sms=8, positions=POSITIONS)
    library = build(3, step.weights, **SHORT)
    found = {}
    for order in ([0, 1, 2], [0], [2, 0]):
        own = step.with_caches()
        heads, x, batch = own.some(order)
        fused_batch_step_on_cpu.run(library, heads, x, own.weights, batch)
        for place, row in zip(order, x, strict=True):
            assert torch.equal(row, found.setdefault(place, row))


def test_a_cta_that_is_missing_makes_nan_and_no_hang(build):
    step = make_step(NARROW, 2, [70, 1], TYPES, CPU, num_sms=8)
    library = build(2, step.weights, **SHORT)
    heads, x, batch = step.some([0, 1])
    fused_batch_step_on_cpu.run(library, heads, x, step.weights, batch, late=6)
    assert x.isnan().any(1).all()


def test_cpu_matches_oracle():
    step = make_step(NARROW, 2, [70, 1, 130], [("v", "down"), ()], CPU, num_sms=8)
    own = step.with_caches()
    heads, x, batch = own.some([0, 1, 2])
    fused_batch_step(heads, x, own.weights, batch)
    check(x, own.caches(), step, expected_step(step))


def test_wrong_inputs_are_named():
    step = make_step(NARROW, 2, [70, 1], [()], CPU, num_sms=8)
    with pytest.raises(ArgumentError, match=r"heads is \(2, 1024\) torch.float32"):
        fused_batch_step(step.heads.float(), step.x, step.weights, step.batch)


# Of 8B, five heads that share keys (14B), eight (32B), three (Llama 3.2 3B), and unequal classes.
SIZES = {
    "qwen3-8b": (qwen3_8b(), 8),
    "qwen3-4b": (ChainShape(2560, 4096, 9728, 5120, 1024), 8),
    "qwen3-14b": (ChainShape(5120, 5120, 17408, 6144, 1024), 8),
    "qwen3-32b": (ChainShape(5120, 8192, 25600, 9216, 1024), 8),
    "llama3-3b": (ChainShape(3072, 3072, 8192, 4096, 1024), 8),
}


@pytest.mark.gpu
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_matches_oracle_with_bits_of_its_own(size, has_norms, device):
    """In launches of few tokens and many, in any order; one request has three parts."""
    shape, kv_heads = SIZES[size]
    lengths = [2 * SPAN + 77, *LENGTHS[1:]]
    sixes = [("down", "v"), (), ("down",)]
    step = make_step(shape, kv_heads, lengths, sixes, device, has_norms=has_norms)
    expected = expected_step(step)
    found = {}
    for tokens in (16, 8, 1, 2, 5, 9):
        if tokens > step.weights.geometry.max_tokens:
            continue
        for order in (list(range(tokens)), torch.randperm(16)[:tokens].tolist()):
            own = step.with_caches()
            heads, x, batch = own.some(order)
            fused_batch_step(heads, x, own.weights, batch)
            if order == list(range(16)):
                check(x, own.caches(), step, expected)
            for place, row in zip(order, x, strict=True):
                assert torch.equal(row, found.setdefault(place, row.clone()))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 8, 16])
def test_many_launches_have_the_same_bits(tokens, device):
    """One exchange, launches of other numbers of tokens between them."""
    step = make_step(qwen3_8b(), 8, LENGTHS[:tokens], [(), ("down", "v"), ()], device)
    known, few = step.x.clone(), step.some([0])
    fused_batch_step(step.heads, known, step.weights, step.batch)
    different = torch.zeros((), dtype=torch.int64, device=device)
    for index in range(2000):
        if index % 3 == 0:
            fused_batch_step(few[0], few[1].clone(), step.weights, few[2])
        again = step.x.clone()
        fused_batch_step(step.heads, again, step.weights, step.batch)
        different += (again != known).any()
    assert different == 0


EIGHT_B = Heads(32, 8, 128, 128, 64, has_norms=True)


def test_heads_that_do_not_fit():
    assert refuse_heads(EIGHT_B) is None
    assert refuse_heads(Heads(32, 8, 64, 64, 64, True)).reason == "heads of 64, not 128"
    reason = "64 dimensions of a head rotate, not all"
    assert refuse_heads(Heads(32, 8, 128, 64, 64, True)).reason == reason
    reason = "9 query heads share keys, not 2 to 8"
    assert refuse_heads(Heads(9, 1, 128, 128, 64, True)).reason == reason
    reason = "blocks of 24 tokens, not a multiple of 16"
    assert refuse_heads(Heads(8, 2, 128, 128, 24, True)).reason == reason


def tail(shape=None, *types, num_sms=132, ranks=1, in_step=False):
    types = ChainTypes(*(types or (False,) * 5), in_step=in_step)
    return partition(shape or qwen3_8b(), types, num_sms, ranks)


def test_types_of_layers():
    """The last layer has no q, k and v: its types of them decide nothing."""
    merged = ChainShape(4096, 4096, 12288, 6144)
    last = tail(ChainShape(4096, 4096, 12288, 0), False, False, True, False, False)
    mixed = tail(None, False, False, True, False, True)
    alike = join_layers([mixed, mixed, last], EIGHT_B, 132)
    assert (alike.always_six, alike.maybe_six) == (0b10100, 0)
    joined = join_layers([mixed, tail(merged, False, False, True), last], EIGHT_B, 132)
    assert (joined.always_six, joined.maybe_six) == (0b00100, 0b10000)
    assert joined.max_tokens == 16
    assert joined.columns == joined.tail.columns + 16


def test_decoders_that_do_not_fit():
    def reason(*tails, heads=EIGHT_B, num_sms=132):
        found = join_layers(tails, heads, num_sms)
        assert isinstance(found, Refusal)
        return found.reason

    assert reason(tail(ranks=2)) == "several GPUs share the model"
    assert reason(tail(in_step=True)).endswith("(TIERCEL_ONE_COPY)")
    split = ChainShape(4096, 4096, 12288, 4096, 2048)
    assert reason(tail(split)) == "q and k are of different types"
    wide = ChainShape(4096, 4096, 12800, 5120, 1024)
    assert reason(tail(), tail(wide)) == "layers of different widths"
    narrow = ChainShape(4096, 4096, 3584, 5120, 1024)
    assert reason(tail(narrow)) == "some of 128 CTAs have no rows of a matrix"
    assert reason(tail(), heads=Heads(32, 8, 64, 64, 64, True)) == "heads of 64, not 128"
