"""The engine's loop over a fake runner: every plan keeps the rules, whatever arrives and leaves.

The fake runner keeps a cache of its own, slot by slot. It writes the tokens of a plan where the
block ids say and draws the next token from what it reads back, so a block that two requests share,
or a token that was never computed, changes an answer. Answers must equal decoding each prompt
alone.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tiercel.cache.allocator import NULL_BLOCK, BlockAllocator
from tiercel.cache.prefix import PrefixCache
from tiercel.engine.config import EngineConfig
from tiercel.engine.engine import Engine
from tiercel.engine.request import Request, Status, TokenLogprobs
from tiercel.engine.sampler import Sampled
from tiercel.engine.scheduler import Scheduler
from tiercel.errors import OutOfMemoryError
from tiercel.params import SamplingParams

VOCAB_SIZE = 13
STOP_IDS = frozenset({0})


def next_token(tokens):
    return zlib.crc32(bytes(tokens)) % VOCAB_SIZE


def decode_alone(prompt, max_tokens):
    """What a request must answer, one token after the other."""
    output = []
    while len(output) < max_tokens and (not output or output[-1] not in STOP_IDS):
        output.append(next_token(prompt + output))
    return output


@dataclass
class Plan:
    """One request of a scenario and when things happen to it, in steps."""

    prompt: list[int]
    max_tokens: int
    arrival: int = 0
    abort: int | None = None
    fails_at: int | None = None  # the draw with this number has non-finite logits


@dataclass
class FakeRunner:
    """Checks each plan, writes its tokens to a cache and draws from what it reads."""

    block_size: int
    max_num_seqs: int
    budget: int
    fails_at: dict[str, int | None] = field(default_factory=dict)
    cache: dict[int, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)  # places, in this residency
    allocator: BlockAllocator | None = None
    num_hits: int = 0

    def launch(self, plan):
        rows = plan.scheduled
        assert rows, "an empty plan"
        assert plan.num_tokens == sum(row.num_query for row in rows) <= self.budget
        assert len({row.request.request_id for row in rows}) == len(rows), "a request twice"
        for row in rows:
            self._check(row)
            self._write(row)
        return [row for row in rows if row.samples]

    def _check(self, row):
        request, stop = row.request, row.start + row.num_query
        assert request.status is Status.RUNNING
        assert row.num_query >= 1
        known = self.computed.get(request.request_id)
        assert row.enters or known is not None
        if row.enters:
            assert row.start % self.block_size == 0, "a hit ends with a block"
            self.num_hits += row.start > 0
            known = row.start
        assert row.start == request.num_computed == known, "each token once, in order"
        assert stop <= request.num_tokens
        assert row.samples == (stop == request.num_tokens)
        assert stop <= len(request.block_ids) * self.block_size, "no place to write"

    def _write(self, row):
        request, stop = row.request, row.start + row.num_query
        for place in range(row.start, stop):
            block = request.block_ids[place // self.block_size]
            assert self.allocator._references[block] == 1, "a shared block is written"
            self.cache[self._slot(request, place)] = request.tokens(place, place + 1)[0]
        self.computed[request.request_id] = stop
        if request.params.prompt_logprobs is not None:
            following = request.prompt_token_ids[row.start + 1 : stop + 1]
            request.prompt_logprobs += [TokenLogprobs(i, -1.0, ()) for i in following]

    def _slot(self, request, place):
        block = request.block_ids[place // self.block_size]
        return block * self.block_size + place % self.block_size

    def clear_blocks(self, block_ids):
        for block in block_ids:
            assert self.allocator._references[block] == 1, "a block that another one reads"

    def collect(self, rows):
        token_ids, problems = [], []
        for row in rows:
            request = row.request
            context = [self.cache[self._slot(request, i)] for i in range(request.num_tokens)]
            token_ids.append(next_token(context))
            is_bad = self.fails_at[request.request_id] == len(request.output_token_ids)
            problems.append("nonfinite_logits" if is_bad else None)
        return Sampled(token_ids, problems, [None] * len(rows))


@dataclass
class World:
    """An engine with the fake runner, and what a test wants to know of its run."""

    plans: list[Plan]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    budget: int
    has_prefix_cache: bool = False
    num_preemptions: int = 0
    num_chunks: int = 0

    def __post_init__(self):
        self.allocator = BlockAllocator(self.num_blocks)
        prefix = PrefixCache(self.allocator, self.block_size) if self.has_prefix_cache else None
        scheduler = Scheduler(
            self.allocator, self.block_size, self.max_num_seqs, self.budget, prefix
        )
        self.runner = FakeRunner(
            self.block_size, self.max_num_seqs, self.budget, allocator=self.allocator
        )
        longest = (self.num_blocks - 1) * self.block_size
        config = EngineConfig(
            torch.device("cpu"), torch.float32, longest, self.max_num_seqs, self.budget,
            self.block_size, 0.9, 0,
        )  # fmt: skip
        self.engine = Engine(scheduler, self.runner, config)
        self.scheduler = scheduler
        self.requests = []
        for i, plan in enumerate(self.plans):
            # A prompt whose log-probabilities are asked for is computed whole: no hits.
            params = SamplingParams(prompt_logprobs=None if self.has_prefix_cache else 0)
            request = Request(f"{i}", plan.prompt, params, 0, 0, STOP_IDS, plan.max_tokens)
            self.requests.append(request)
            self.runner.fails_at[request.request_id] = plan.fails_at

    def run(self):
        """Step until all requests have arrived and ended; checks each step."""
        limit = 50 + 40 * sum(len(plan.prompt) + plan.max_tokens for plan in self.plans)
        last = max(plan.arrival for plan in self.plans)
        step = 0
        while step <= last or self.engine.has_work:
            assert step < limit, "no progress"
            for plan, request in zip(self.plans, self.requests, strict=True):
                if plan.arrival == step:
                    self.engine.submit(request)
                if plan.abort == step and plan.arrival <= step:
                    self.engine.abort(request)
            self._step()
            step += 1
        self._check_the_end()

    def _step(self):
        before = list(self.scheduler.running)
        missing = {r.request_id: r.num_tokens - r.num_computed for r in before}
        lengths = {r.request_id: len(r.output_token_ids) for r in self.requests}
        scheduled = []
        launch = self.runner.launch

        def watch(plan):
            scheduled.extend(plan.scheduled)
            self._check_plan(before, missing, plan)
            self._check_ownership()
            return launch(plan)

        self.runner.launch = watch
        updates = self.engine.step()
        self.runner.launch = launch
        self._check_ownership()
        for update in updates:
            request = update.request
            assert (
                tuple(request.output_token_ids[lengths[request.request_id] :])
                == update.new_token_ids
            )
        sampled = [row.request for row in scheduled if row.samples]
        assert [update.request for update in updates] == sampled
        for request in self.requests:
            if request.status is not Status.RUNNING:
                self.runner.computed.pop(request.request_id, None)

    def _check_plan(self, before, missing, plan):
        gave_way = [request for request in before if request.status is Status.WAITING]
        self.num_preemptions += len(gave_way)
        self.num_chunks += sum(not row.samples for row in plan.scheduled)
        rows = [row.request.row for row in plan.scheduled]
        assert len(set(rows)) == len(rows)
        assert all(0 <= row < self.max_num_seqs for row in rows)
        # Of the rows that ran before, single tokens come before chunks; new ones come last.
        order = [
            0 if missing.get(i) == 1 else 1 if i in missing else 2
            for i in (row.request.request_id for row in plan.scheduled)
        ]
        assert order == sorted(order), "a prompt went before a decode step"
        for row in plan.scheduled:
            is_cut = row.num_query < row.request.num_tokens - row.start
            assert not is_cut or gave_way or plan.num_tokens == self.budget, "a chunk too short"
        running = [int(r.request_id) for r in self.scheduler.running]
        waiting = [int(r.request_id) for r in self.scheduler.waiting]
        assert gave_way == [] or min(map(before.index, gave_way)) >= len(before) - len(gave_way), (
            "not the youngest gave way"
        )
        arrival = [(self.plans[i].arrival, i) for i in running + waiting]
        assert arrival == sorted(arrival), "not first come, first served"

    def _check_ownership(self):
        owned = [block for request in self.requests for block in request.block_ids]
        assert NULL_BLOCK not in owned
        if not self.has_prefix_cache:
            assert len(set(owned)) == len(owned), "a block has two owners"
        assert self.allocator.num_free + len(set(owned)) == self.num_blocks - 1, "a block is lost"
        rows = [r.row for r in self.requests if r.status is Status.RUNNING]
        assert len(set(rows)) == len(rows)
        for request in self.requests:
            if request.status is not Status.RUNNING:
                assert not request.block_ids
                assert request.row == -1

    def _check_the_end(self):
        assert self.allocator.num_free == self.num_blocks - 1
        assert self.scheduler.schedule() is None
        for plan, request in zip(self.plans, self.requests, strict=True):
            expected = decode_alone(plan.prompt, plan.max_tokens)
            output = request.output_token_ids
            assert request.status is Status.FINISHED
            assert output == expected[: len(output)], "another answer than alone"
            reason = (request.finish_reason, request.stop_reason)
            if request.finish_reason == "abort":
                assert plan.abort is not None
                continue
            if not self.has_prefix_cache:
                assert [e.token_id for e in request.prompt_logprobs] == plan.prompt[1:]
            if request.finish_reason == "error":
                assert reason[1] == "nonfinite_logits"
                assert len(output) == plan.fails_at
                continue
            assert output == expected
            is_stopped = bool(output) and output[-1] in STOP_IDS
            assert reason == (("stop", output[-1]) if is_stopped else ("length", None))


def blocks_for(num_tokens, block_size):
    return -(-num_tokens // block_size)


@st.composite
def worlds(draw, has_prefix_cache=False):
    block_size = draw(st.integers(1, 4))
    tokens = st.integers(0, 1 if has_prefix_cache else VOCAB_SIZE - 1)  # few: prompts begin alike
    plans = [
        Plan(
            prompt=draw(st.lists(tokens, min_size=1, max_size=11)),
            max_tokens=draw(st.integers(0, 12)),
            arrival=draw(st.integers(0, 6)),
            abort=draw(st.none() | st.integers(0, 30)),
            fails_at=draw(st.none() | st.integers(0, 8)),
        )
        for _ in range(draw(st.integers(2, 8)))
    ]
    plans.sort(key=lambda plan: plan.arrival)
    need = max(blocks_for(len(p.prompt) + p.max_tokens, block_size) for p in plans)
    return World(
        plans,
        block_size=block_size,
        num_blocks=1 + need + draw(st.integers(0, 3)),
        max_num_seqs=draw(st.integers(2, 6)),
        budget=draw(st.integers(1, 12)),
        has_prefix_cache=has_prefix_cache,
    )


@settings(max_examples=400, deadline=None)
@given(world=worlds())
def test_every_plan_keeps_the_rules(world):
    world.run()
    event(f"preemptions: {min(world.num_preemptions, 3)}")
    event(f"chunks: {min(world.num_chunks, 3)}")


@settings(max_examples=400, deadline=None)
@given(world=worlds(has_prefix_cache=True))
def test_every_plan_keeps_the_rules_with_the_prefix_cache(world):
    world.run()
    event(f"preemptions: {min(world.num_preemptions, 3)}")
    event(f"hits: {min(world.runner.num_hits, 5)}")


def test_a_second_prompt_computes_only_what_the_first_does_not_share():
    shared = [3] * 10
    plans = [Plan([*shared, 1], 2), Plan([*shared, 2], 2, arrival=4)]
    world = World(plans, 4, 40, 4, 16, has_prefix_cache=True)
    world.run()
    assert [request.num_cached for request in world.requests] == [0, 8]  # 2 whole blocks of 4


def test_a_prompt_that_is_cached_whole_computes_its_last_token():
    world = World(
        [Plan([3] * 8, 1), Plan([3] * 8, 1, arrival=3)], 4, 40, 4, 16, has_prefix_cache=True
    )
    world.run()
    assert [request.num_cached for request in world.requests] == [0, 4]


def test_blocks_of_unsound_logits_are_not_kept():
    plans = [Plan([3] * 8, 4, fails_at=0), Plan([3] * 8, 1, arrival=3)]
    world = World(plans, 4, 40, 4, 16, has_prefix_cache=True)
    world.run()
    assert world.requests[1].num_cached == 0


def crowd(**changes):
    """Eight requests of 10 + 12 tokens at once in a cache for two of them."""
    plans = [Plan([i + 1] * 10, 12) for i in range(8)]
    sizes = {"block_size": 4, "num_blocks": 13, "max_num_seqs": 5, "budget": 16}
    return World(plans, **(sizes | changes))


def test_a_crowd_in_a_small_cache_is_preempted_and_answers_the_same():
    world = crowd()
    world.run()
    assert world.num_preemptions >= 3


def test_a_long_prompt_is_cut_into_chunks_and_does_not_stall_the_others():
    world = World([Plan([1] * 3, 20), Plan([2] * 40, 3, arrival=2)], 4, 40, 4, 8)
    lengths = []
    step = world._step

    def watched():
        step()
        lengths.append(len(world.requests[0].output_token_ids))

    world._step = watched
    world.run()
    assert world.num_chunks == 5  # of 7 tokens, beside one decode step each: 40 = 5 * 7 + 5
    end = lengths.index(max(lengths)) + 1
    assert lengths[:end] == list(range(1, end + 1)), "a token in every step"


def put(scheduler, prompt, output, num_computed):
    """A request that runs already, in a state that only a change of policy would bring about."""
    request = Request("", prompt, SamplingParams(), 0, 0, STOP_IDS, 9, status=Status.RUNNING)
    request.output_token_ids += output
    request.num_computed, request.row = num_computed, scheduler._free_rows.pop()
    request.block_ids = scheduler.allocator.allocate(blocks_for(num_computed, 4))
    scheduler.running.append(request)
    return request


def test_decode_steps_go_before_an_older_prompt():
    scheduler = Scheduler(BlockAllocator(20), 4, 2, 5)
    older, younger = put(scheduler, [1] * 12, [], 4), put(scheduler, [2] * 4, [3], 4)
    rows = scheduler.schedule().scheduled
    assert [(row.request, row.start, row.num_query, row.samples) for row in rows] == [
        (younger, 4, 1, True),
        (older, 4, 4, False),
    ]


def test_a_planned_row_may_still_give_way_to_an_older_prompt():
    scheduler = Scheduler(BlockAllocator(4), 4, 2, 16)
    older, younger = put(scheduler, [1] * 12, [], 4), put(scheduler, [2] * 4, [3], 4)
    rows = scheduler.schedule().scheduled
    assert [(row.request, row.num_query) for row in rows] == [(older, 8)]
    assert list(scheduler.waiting) == [younger]
    assert (younger.num_computed, younger.block_ids, younger.row) == (0, [], -1)


def test_a_budget_of_one_serves_one_after_the_other():
    crowd(budget=1).run()


def test_decode_steps_share_a_budget_smaller_than_their_number():
    crowd(num_blocks=60, budget=3).run()


@pytest.mark.parametrize("size", [16, 17, 31, 32])
def test_a_prompt_alone_may_fill_the_whole_cache(size):
    """Logits are asked for, no answer: there is no further token to make room for."""
    world = World([Plan([1] * size, 0)], 16, 1 + blocks_for(size, 16), 1, 64)
    world.run()
    assert world.requests[0].finish_reason == "length"


def test_what_can_never_fit_is_refused_at_once():
    world = World([Plan([1] * 10, 7)], 4, 5, 2, 8)
    with pytest.raises(OutOfMemoryError, match="need 17 tokens of cache but it holds 16"):
        world.engine.submit(world.requests[0])
    assert not world.engine.has_work
    assert world.engine.step() == []


def test_a_request_may_be_ended_in_any_state():
    world = crowd()
    engine = world.engine
    for request in world.requests:
        engine.submit(request)
    engine.step()
    running, waiting = world.scheduler.running[0], world.scheduler.waiting[0]
    engine.stop(running, "END")
    engine.abort(waiting)
    engine.abort(running)  # nothing happens: it has finished
    assert (running.finish_reason, running.stop_reason) == ("stop", "END")
    assert (waiting.finish_reason, waiting.stop_reason) == ("abort", None)
    world._check_ownership()
    for request in world.requests:
        engine.abort(request)
    assert not engine.has_work
    assert world.allocator.num_free == world.num_blocks - 1


def test_a_stop_string_in_the_last_token_decides_over_the_length():
    world = World([Plan([3, 4], 1)], 4, 5, 2, 8)
    request = world.requests[0]
    world.engine.submit(request)
    world.engine.step()
    assert request.finish_reason == "length"
    world.engine.stop(request, "END")
    assert (request.finish_reason, request.stop_reason) == ("stop", "END")
