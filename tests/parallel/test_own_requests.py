"""Loops of ranks with requests of their own on one stream of inputs: each answer as alone."""

import random

import pytest

from tests.dsv4_engine import random_ids, with_blocks, write_repeating
from tests.parallel.shared_models import write_v4
from tests.tiny_llm import greedy
from tiercel.config import LoadOptions
from tiercel.engine.engine import Engine
from tiercel.engine.load import load_model
from tiercel.engine.peers import ALONE
from tiercel.grammar.matchers import Matchers

SHARED = random_ids(128, seed=1)  # a block
NUM_NEW = 14
# Prompts that end just before a block does: two answers of a rank need more blocks than it has.
LENGTHS = (120, 248, 9, 120, 248, 30)


pytestmark = pytest.mark.usefixtures("one_thread")


class PoolPeers:
    """The ranks of a pool: all load alike, and their loops get the same calls."""

    def __init__(self, group):
        self.group, self.rank = group, group.rank

    def check(self, facts):
        """They are one program."""

    def connect(self, device):
        """They have met."""

    def least(self, what, value):
        return value

    def first(self, what, values):
        return list(values)

    def engine(self, scheduler, runner, config):
        return Engine(scheduler, runner, config)

    def matchers(self, tokenizer, vocab_size):
        return Matchers(tokenizer, vocab_size)

    def begin(self):
        """Nobody waits."""


def load(path, spec, peers):
    size = peers.group.size
    options = LoadOptions(
        device="cpu", dtype="float32", threads=1, spec=spec, max_num_seqs=4,
        max_num_batched_tokens=160, tensor_parallel_size=size, data_parallel_attention=size > 1,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERCEL_CPU_RANKS", "1")
        if size > 1:
            with_blocks(patch, full=4, sliding=8)
        return load_model(str(path), options, None, peers)


def make_requests(loaded):
    """Some share a prefix over a block, and some are longer than a step."""
    for number, length in enumerate(LENGTHS):
        ids = random_ids(length, seed=number)
        shared = SHARED if number % 3 == 0 else []
        yield loaded.inputs().request([*shared, *ids], greedy(NUM_NEW), 0)


def run_alone(path, spec):
    loaded = load(path, spec, ALONE)
    requests = list(make_requests(loaded))
    for request in requests:
        loaded.engine.submit(request)
    while loaded.engine.has_work:
        loaded.engine.step()
    return [request.output_token_ids for request in requests]


def run_loop(group, path, spec, seed):
    """Submit, abort and step at random, alike on every rank; returns what this one knows."""
    loaded = load(path, spec, PoolPeers(group))
    engine, dice = loaded.engine, random.Random(seed)
    requests, waiting = list(make_requests(loaded)), []
    waiting += requests
    aborted = requests[2]
    while waiting or engine.has_work:
        if waiting and (not engine.has_work or dice.random() < 0.8):
            engine.submit(waiting.pop(0))
        if len(aborted.output_token_ids) > 2:
            engine.abort(aborted)
        if engine.has_work:
            engine.step()
    scheduler = engine.scheduler
    assert scheduler.cache_usage == 0.0
    counts = scheduler.num_preemptions, scheduler.prefix_hits, engine.draft_counts.num_draft_tokens
    answers = [request.output_token_ids for request in requests]
    return answers, [request.finish_reason for request in requests], counts


def check(pool, path, spec, seed):
    alone = run_alone(path, spec)
    first, *others = pool.run(run_loop, path, spec, seed)
    assert all(other == first for other in others), "every rank knows the same"
    answers, reasons, (num_preempted, num_hits, num_drafts) = first
    for answer, expected, reason in zip(answers, alone, reasons, strict=True):
        assert answer == (expected if reason == "length" else expected[: len(answer)])
    assert reasons.count("abort") == 1
    assert num_hits > 0
    assert (num_drafts > 0) == (spec != "off")
    return num_preempted


SPECS = [
    pytest.param(spec, marks=() if spec == "ngram" else pytest.mark.slow)
    for spec in ("off", "ngram", "mtp", "hybrid")
]


@pytest.mark.parametrize("spec", SPECS)
def test_two_loops(two_ranks, tmp_path, spec):
    assert check(two_ranks, write_repeating(tmp_path), spec, seed=5) > 0


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["off", "hybrid"])
@pytest.mark.parametrize("seed", [1, 2])
def test_four_loops(four_ranks, tmp_path, spec, seed):
    """Some of them have nothing to do for a while."""
    check(four_ranks, write_v4(tmp_path, formats=False), spec, seed)
