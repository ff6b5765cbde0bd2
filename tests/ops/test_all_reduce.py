"""The all-reduce: its source, rank by rank on a processor, the op, and what refuses it."""

import itertools
import os
import random
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.all_reduce_on_cpu import Norm, Ranks, build
from tiercel.errors import ArgumentError, InternalError
from tiercel.kernels.collectives import all_reduce as kernel
from tiercel.kernels.collectives.symmetric_memory import SymmetricMemory
from tiercel.kernels.runtime import rtc
from tiercel.ops import all_reduce as op
from tiercel.reference import all_reduce as oracle
from tiercel.reference import rms_norm as norm_oracle

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# Elements: less than a word, a unit, a warp and a CTA, and their ends; several CTAs.
SIZES = (1, 2, 3, 7, 8, 9, 100, 255, 256, 257, 1000, 1024, 1025, 2100)
# Ranks, dtype, warps of a CTA.
FORMS = [
    (2, torch.bfloat16, 4),
    (3, torch.float32, 1),
    (4, torch.float16, 2),
    (8, torch.bfloat16, 2),
]


@pytest.fixture(scope="module")
def library_of(tmp_path_factory):
    """Compiles a form once."""
    built = {}

    def compile_form(ranks, dtype, warps):
        if (ranks, dtype, warps) not in built:
            folder = tmp_path_factory.mktemp("all_reduce")
            built[ranks, dtype, warps] = build(ranks, dtype, warps, folder)
        return built[ranks, dtype, warps]

    return compile_form


def make_parts(ranks, size, dtype, generator):
    """Parts of very different sizes, so that the order of a sum shows in its bits."""
    scales = 10 ** torch.linspace(-1, 1, ranks)[torch.randperm(ranks, generator=generator)]
    return [(torch.randn(size, generator=generator) * scale).to(dtype) for scale in scales]


def check(ranks, calls, seed):
    """Run calls, and compare all ranks with the oracle, bit by bit."""
    for parts, results in zip(calls, ranks.run(calls, seed), strict=True):
        expected = oracle.all_reduce(parts)
        for result in results:
            assert torch.equal(result, expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_size_matches_the_oracle_on_all_ranks(form, library_of):
    ranks = Ranks(form[0], library_of(*form), form[2])
    generator = torch.Generator().manual_seed(1)
    check(ranks, [make_parts(form[0], size, form[1], generator) for size in SIZES], seed=0)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_gather_has_the_parts_of_all_ranks(num_ranks, library_of):
    """Launch after launch, of sizes that 16 bytes do and do not divide."""
    ranks = Ranks(num_ranks, library_of(num_ranks, kernel.GATHER, 2), 2, gathers=True)
    generator = torch.Generator().manual_seed(9)
    calls = [make_parts(num_ranks, size, torch.float16, generator) for size in SIZES + SIZES[::-1]]
    for parts, results in zip(calls, ranks.run(calls, seed=1), strict=True):
        for result in results:
            assert torch.equal(result, torch.cat(parts))


NORMS = [(2, torch.bfloat16, 2), (3, torch.float16, 3), (8, torch.bfloat16, 1)]


@pytest.mark.parametrize("form", NORMS, ids=str)
def test_a_sum_is_added_to_the_residual_and_normed(form, tmp_path):
    """Launch after launch, each adds to what the one before has left; on all ranks alike."""
    num_ranks, dtype, warps = form
    hidden, eps = 256 * warps, 0.1
    ranks = Ranks(num_ranks, build(*form, tmp_path, has_norm=True), warps)
    generator = torch.Generator().manual_seed(2)
    calls = [
        [part.view(3, hidden) for part in make_parts(num_ranks, 3 * hidden, dtype, generator)]
        for _ in range(6)
    ]
    start = 10 * torch.randn(3, hidden, generator=generator)
    weight = torch.randn(hidden, generator=generator)
    residuals = [start.clone() for _ in range(num_ranks)]
    results = ranks.run(calls, 3, Norm(residuals, weight, eps))
    expected = start.double()
    for parts, found in zip(calls, results, strict=True):
        expected = expected + sum(part.double() for part in parts)
        normed = norm_oracle.rms_norm(expected, weight, eps)
        for result in found:
            assert torch.equal(result, found[0])
            close = {"rtol": 1e-2, "atol": 1e-2}
            torch.testing.assert_close(result.view(3, hidden).double(), normed.double(), **close)
    for residual in residuals:
        assert torch.equal(residual, residuals[0])
        torch.testing.assert_close(residual.double(), expected, rtol=1e-5, atol=1e-4)


# Calls of two ranks; more ranks make fewer.
ROUNDS = [pytest.param(250, id="some"), pytest.param(10_000, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_many_rounds_of_changing_sizes_while_ranks_lag(form, rounds, library_of):
    """Buffers are reused in each third call; a rank stops for a while, or starts late."""
    num_ranks, dtype, warps = form
    ranks = Ranks(num_ranks, library_of(*form), warps)
    generator, chooser = torch.Generator().manual_seed(2), random.Random(3)
    left = 2 * rounds // num_ranks
    while left > 0:
        count = min(left, chooser.choice((5, 60)))
        # Mostly one size in a row: then ranks are as far apart as they can be.
        sizes = [size for size in chooser.choices(SIZES, k=count) for _ in range(4)][:count]
        check(ranks, [make_parts(num_ranks, n, dtype, generator) for n in sizes], seed=left)
        left -= count


def test_counts_of_launches_wrap(library_of):
    ranks = Ranks(2, library_of(*FORMS[0]), FORMS[0][2])
    generator = torch.Generator().manual_seed(4)
    ranks.epochs -= 3  # the words are of no launch near these
    calls = [make_parts(2, 300, torch.bfloat16, generator) for _ in range(8)]
    check(ranks, calls, seed=5)
    assert ranks.epochs[:, 0].tolist() == [5, 5]


def test_values_that_are_not_finite_stay_so(library_of):
    ranks = Ranks(2, library_of(*FORMS[0]), FORMS[0][2])
    values = [float("inf"), float("-inf"), float("nan"), -0.0, 3.38e38, 1e-40]
    first, second = zip(*itertools.product(values, values), strict=True)
    parts = [torch.tensor(part, dtype=torch.bfloat16) for part in (first, second)]
    expected = oracle.all_reduce(parts)
    for result in ranks.run([parts], 0)[0]:
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))


def test_the_largest_size_uses_the_last_channel(library_of):
    form = (2, torch.bfloat16, 4)
    ranks = Ranks(2, library_of(*form), 4)
    generator = torch.Generator().manual_seed(6)
    size = kernel.MAX_BYTES // 2
    check(ranks, [make_parts(2, size - more, torch.bfloat16, generator) for more in (0, 1)], 7)
    assert ranks.epochs.min() == 2


@pytest.mark.reliability
def test_a_rank_that_is_never_heard_of_ends_the_wait(library_of):
    """Its stores go elsewhere, as with a wrong address."""
    ranks = Ranks(2, library_of(*FORMS[0]), FORMS[0][2])
    elsewhere = torch.zeros_like(ranks.memory[0])
    ranks.addresses[1][0] = elsewhere.data_ptr()
    parts = make_parts(2, 100, torch.bfloat16, torch.Generator().manual_seed(8))
    with pytest.raises(AssertionError, match=r"of CTA 0: a wait was given up"):
        ranks.run([parts], 0)


# ---- the op


@pytest.fixture
def launches(monkeypatch):
    """Launches that were made instead of run: kernels, CTAs, threads, arguments."""
    made = []
    monkeypatch.setattr(rtc, "load_kernel", lambda source, device: source)
    monkeypatch.setattr(rtc, "launch", lambda *given, **_: made.append(given))
    return made


@pytest.fixture
def reducer():
    buffer = torch.zeros(64, dtype=torch.uint8)
    return op.SmallAllReduce(SymmetricMemory(1, (4096, 8192, 12288), buffer, None), CPU)


def test_a_launch_has_the_addresses_of_all_ranks(reducer, launches):
    x = torch.randn(3, 700).half()
    out = reducer.all_reduce(x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    ((source, ctas, threads, (arguments,)),) = launches
    assert dict(source.macros)["RANKS"] == 3
    assert ctas * threads >= x.nbytes / 16 > (ctas - 1) * threads
    assert (arguments.x, arguments.out) == (x.data_ptr(), out.data_ptr())
    assert (arguments.num_bytes, arguments.rank) == (4200, 1)
    assert list(arguments.memory) == [4096, 8192, 12288]


def test_parts_at_odd_addresses_and_with_strides_are_copied(reducer, launches):
    storage = torch.randn(40, 6).bfloat16()
    for x in (storage.flatten()[1:], storage[:, :3], storage.T):
        assert reducer.all_reduce(x).shape == x.shape
        ((_, _, _, (arguments,)),) = launches
        assert arguments.x % 16 == 0
        assert arguments.num_bytes == x.nbytes
        launches.clear()


def test_a_norm_has_a_row_for_each_cta(reducer, launches):
    x, residual = torch.randn(5, 768).bfloat16(), torch.randn(5, 768)
    weight = torch.ones(768)
    assert reducer.norms(x)
    out = reducer.add_norm(x, residual, weight, 0.5)
    ((source, ctas, threads, (arguments,)),) = launches
    assert (ctas, threads, dict(source.macros)["HAS_NORM"]) == (5, 96, 1)
    assert (arguments.residual, arguments.out) == (residual.data_ptr(), out.data_ptr())
    assert (arguments.weight, arguments.eps) == (weight.data_ptr(), 0.5)
    for other in (x.float(), x[:, :700], x[0], x[:0], torch.zeros(1, 16384).half()):
        assert not reducer.norms(other)
    for wrong in (residual[:4], residual.half(), residual.T.contiguous().T):
        with pytest.raises(ArgumentError, match=r"add_norm: x is \(5, 768\)"):
            reducer.add_norm(x, wrong, weight, 0.5)


def test_a_gather_of_any_dtype(reducer, launches):
    x = torch.arange(15).view(5, 3)
    out = reducer.all_gather(x.T)
    assert (out.shape, out.dtype) == ((3, 3, 5), torch.int64)
    ((source, _, _, (arguments,)),) = launches
    assert dict(source.macros)["IS_GATHER"] == 1
    assert (arguments.out, arguments.num_bytes) == (out.data_ptr(), 120)
    with pytest.raises(ArgumentError, match="x has 3 bytes"):
        reducer.all_gather(torch.zeros(3, dtype=torch.uint8))


def test_an_empty_tensor_launches_nothing(reducer, launches):
    assert reducer.all_reduce(torch.empty(0, 5)).shape == (0, 5)
    assert reducer.all_gather(torch.empty(0, 5)).shape == (3, 0, 5)
    assert launches == []


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(5, dtype=torch.float64), "x is torch.float64"),
        (torch.zeros(kernel.MAX_BYTES // 4 + 1), "x has 1048580 bytes"),
        (torch.zeros(5, device="meta"), "x is on meta"),
    ],
    ids=["dtype", "size", "device"],
)
def test_other_tensors_are_refused(x, message, reducer, launches):
    with pytest.raises(ArgumentError, match=message):
        reducer.all_reduce(x)
    assert launches == []


def test_reasons_against_the_kernel(monkeypatch):
    monkeypatch.delenv("TIERCEL_SMALL_ALL_REDUCE", raising=False)
    assert op.refuse_small_all_reduce(2, (9, 0)) == ""
    assert op.refuse_small_all_reduce(8, (8, 0)) == ""
    assert op.refuse_small_all_reduce(1, (9, 0)) == "there is one rank"
    assert op.refuse_small_all_reduce(9, (9, 0)) == "more than 8 ranks"
    assert op.refuse_small_all_reduce(2, (7, 5)) == "the GPU is older than Ampere"
    monkeypatch.setenv("TIERCEL_SMALL_ALL_REDUCE", "0")
    assert op.refuse_small_all_reduce(2, (9, 0)) == "TIERCEL_SMALL_ALL_REDUCE=0"
    assert op.make_small_all_reduce(None, CPU) == "the device is cpu, not a GPU"


@pytest.mark.parametrize("fault", ["", "no compiler"])
def test_all_ranks_learn_that_one_cannot_compile(fault, monkeypatch):
    """A rank that gives up alone would leave the others waiting."""
    told = []

    def load(ranks, device):
        if fault:
            raise InternalError(f"{fault}\nits log")

    def make(num_bytes, group, device, refusal):
        told.append((num_bytes, refusal))
        return "from the exchange"

    monkeypatch.delenv("TIERCEL_SMALL_ALL_REDUCE", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(op, "load_all_reduce", load)
    monkeypatch.setattr(op, "make_symmetric_memory", make)
    group = types.SimpleNamespace(size=lambda: 2)
    assert op.make_small_all_reduce(group, torch.device("cuda", 0)) == "from the exchange"
    assert told == [(kernel.exchange_bytes(2), fault)]


def test_words_of_all_ranks_fit_the_shared_memory():
    for ranks in range(2, kernel.MOST_RANKS + 1):
        assert kernel.exchange_bytes(ranks) == 2 * ranks * kernel.CHANNELS * 2 * 32 * 16
    assert kernel.num_ctas(kernel.MAX_BYTES) * kernel.WARPS == kernel.CHANNELS
    assert kernel.num_ctas(1) == 1


# ---- on GPUs


@pytest.mark.gpu
@pytest.mark.multigpu
def test_two_gpus_agree_with_the_oracle_eagerly_and_in_graphs():
    command = [sys.executable, "-m", "tests.all_reduce_on_gpus", "--rounds", "2000"]
    command += ["--replays", "200"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300
    )
    assert done.returncode == 0
