"""The engine's loop with steps bounded in time, over the fake device and a clock of the test's own.

The device takes a fixed time for each step, each token and each key that a token attends to.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_device import FakeRunner
from tests.scheduler.scheduler_world import READS, STOP_IDS, decode_alone
from tiercel.cache.manager import CacheManager, GroupBlocks
from tiercel.engine.engine import Engine
from tiercel.engine_config import EngineConfig
from tiercel.params import SamplingParams
from tiercel.request.request import Request, Status
from tiercel.request.score_task import ScoreTask
from tiercel.scheduler.scheduler import Scheduler
from tiercel.scheduler.step_budget import ALONE_S, BESIDE_ANSWERS_S, Chunk, StepBudget

MOST = 2048  # tokens of a step
SLOW = {"fixed_s": 0.02, "token_s": 2e-3, "pair_s": 1e-7}


@dataclass
class SlowRunner(FakeRunner):
    """The fake device; a launch moves the clock."""

    now_s: float = 0.0
    fixed_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    steps: list = field(default_factory=list)  # (seconds, tokens of chunks, tokens of items)

    def launch(self, plan):
        launched = super().launch(plan)
        parts = plan.scheduled
        chunks = [Chunk(part.start, part.num_tokens) for part in parts]
        seconds = self.fixed_s + sum(
            self.token_s * chunk.num_tokens + self.pair_s * chunk.num_pairs for chunk in chunks
        )
        self.now_s += seconds
        num_chunk = sum(part.num_tokens for part in parts if part.is_chunk)
        self.steps.append((seconds, num_chunk, sum(part.num_item_tokens for part in parts)))
        return launched


def make_engine(costs=SLOW, *, is_timed=True, most=MOST, max_num_seqs=6):
    cache = CacheManager([GroupBlocks(600)], 64, most, has_prefix_cache=False)
    runner = SlowRunner(cache, max_num_seqs, most, **costs)
    scheduler = Scheduler(
        cache, max_num_seqs, StepBudget(most, is_timed=is_timed), least_computed=1
    )
    config = EngineConfig(
        torch.device("cpu"), torch.float32, 30000, max_num_seqs, most, 64, 0.9, 0, 1
    )  # fmt: skip
    return Engine(scheduler, runner, config, lambda: runner.now_s)


def make_request(length, max_tokens=1, items=None, stop_ids=frozenset(), first=1):
    task = None if items is None else ScoreTask(tuple(items), READS)
    prompt = [(first + i * 7) % 13 for i in range(length)]
    return Request(
        f"{first} {length}", prompt, SamplingParams(), 0, 0, stop_ids,
        0 if task else max_tokens, score=task,
    )  # fmt: skip


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()


def warm_up(engine):
    for length in (1, 40, 100, 100):
        run(engine, make_request(length, 4))
    engine.runner.steps.clear()


def gaps_beside(engine, prompt):
    """Times between the tokens of a stream while a prompt is computed beside it."""
    stream = make_request(5, 400)
    engine.submit(stream)
    for _ in range(20):
        engine.step()
    engine.submit(prompt)
    times = [engine.runner.now_s]
    while not prompt.output_token_ids:
        (update,) = [u for u in engine.step() if u.request is stream]
        assert len(update.new_token_ids) == 1
        times.append(engine.runner.now_s)
    while engine.has_work:
        engine.step()
    assert len(stream.output_token_ids) == 400
    assert len(prompt.output_token_ids) == 1
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize("token_s", [1e-4, 2e-3, 1e-2])
@pytest.mark.parametrize("pair_s", [1e-9, 3e-7])
def test_a_stream_goes_on_while_a_long_prompt_enters(token_s, pair_s):
    engine = make_engine({"fixed_s": 0.02, "token_s": token_s, "pair_s": pair_s})
    warm_up(engine)
    gaps = gaps_beside(engine, make_request(6000, first=3))
    assert max(gaps) <= 4 * median(gaps)
    assert max(gaps) < 2 * BESIDE_ANSWERS_S


def test_without_the_bound_the_stream_stands_still():
    engine = make_engine(is_timed=False)
    warm_up(engine)
    assert max(gaps_beside(engine, make_request(6000, first=3))) > 16 * BESIDE_ANSWERS_S


def test_prompts_alone_take_longer_steps():
    engine = make_engine()
    warm_up(engine)
    run(engine, make_request(6000))
    settled = [seconds for seconds, *_ in engine.runner.steps[5:-1]]
    assert 0.8 * ALONE_S < median(settled) < 1.1 * ALONE_S


def test_lists_of_items_share_bounded_steps():
    engine = make_engine()
    warm_up(engine)
    stream, items = make_request(5, 30), [(1, 2, 3)] * 500
    run(engine, stream, make_request(300, items=items, first=4))
    with_items = [seconds for seconds, _, num_items in engine.runner.steps if num_items]
    assert len(with_items) > 8
    assert max(with_items) < 1.5 * ALONE_S
    assert sum(num_items for *_, num_items in engine.runner.steps) == 1500


@pytest.mark.parametrize("length", [0, 30])
def test_an_item_larger_than_the_bound_has_a_step_of_its_own(length):
    engine = make_engine({"fixed_s": 0.02, "token_s": 1e-2, "pair_s": 1e-9})
    warm_up(engine)
    scored = make_request(length, items=[(1,) * 1000, (2,) * 3, (3,) * 900])
    prompt = make_request(400, first=2)
    run(engine, make_request(5, 60), prompt, scored)
    assert scored.status is Status.FINISHED
    assert len(scored.scores) == 3
    large = [step for step in engine.runner.steps if step[2] >= 900]
    assert sorted(num_chunk for _, num_chunk, _ in large) == [900, 1000]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 30)), min_size=1, max_size=6),
    lists=st.lists(
        st.lists(st.integers(1, 200).map(lambda n: (1,) * n), min_size=1, max_size=5), max_size=2
    ),
    arrivals=st.lists(st.integers(0, 10), min_size=8, max_size=8),
    token_s=st.sampled_from((1e-6, 1e-3, 1e-1)),
)
def test_all_requests_end_with_the_answers_of_unbounded_steps(lengths, lists, arrivals, token_s):
    engine = make_engine({"fixed_s": 0.01, "token_s": token_s, "pair_s": 1e-8}, most=256)
    requests = [
        make_request(length, most, stop_ids=STOP_IDS, first=i)
        for i, (length, most) in enumerate(lengths)
    ]
    requests += [make_request(20, items=items, first=7) for items in lists]
    step = 0
    while engine.has_work or step <= max(arrivals):
        for arrival, request in zip(arrivals, requests, strict=False):
            if arrival == step:
                engine.submit(request)
        engine.step()
        step += 1
        assert step < 4000, "no progress"
    for request in requests:
        assert request.status is Status.FINISHED
        if request.score is None:
            expected = decode_alone(request.prompt_token_ids, request.max_tokens)
            assert request.output_token_ids == expected
        else:
            assert len(request.scores) == request.num_items
