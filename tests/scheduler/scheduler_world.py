"""Random requests and what happens to them, for tests of the scheduler.

Each plan, and all that is held after it, must be exactly what `scheduler_oracle.py` predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st

from tests.engine.fake_device import VOCAB_SIZE, FakeRunner, next_token
from tests.scheduler.scheduler_oracle import Oracle
from tiercel.cache.allocator import NULL_BLOCK
from tiercel.cache.manager import CacheManager, GroupBlocks
from tiercel.config import SpecConfig
from tiercel.engine.engine import Engine
from tiercel.engine_config import EngineConfig
from tiercel.params import SamplingParams
from tiercel.request.request import Request, Status
from tiercel.request.score_task import ScoreRead, ScoreTask
from tiercel.scheduler.scheduler import Scheduler
from tiercel.scheduler.step_budget import StepBudget
from tiercel.spec.policy import DraftPolicy

STOP_IDS = frozenset({0})
READS = ((ScoreRead(0, (1,)),),)  # the fake device has one value for each item


def decode_alone(prompt, max_tokens, window=0):
    """What a request must answer, one token after the other."""
    output = []
    while len(output) < max_tokens and (not output or output[-1] not in STOP_IDS):
        output.append(next_token(prompt + output, window))
    return output


@dataclass
class Plan:
    """One request of a scenario and when things happen to it, in steps."""

    prompt: list[int]
    max_tokens: int
    arrival: int = 0
    abort: int | None = None
    fails_at: int | None = None  # the draw with this number has non-finite logits
    priority: int = 0
    needs_last_token: bool = False
    reads_prompt: bool = False  # its log-probabilities: it is computed whole, without hits
    num_spec_tokens: int | None = None
    items: list[tuple[int, ...]] | None = None  # to score; none: the prompt's end

    @property
    def num_tokens(self):
        return len(self.prompt) + self.max_tokens + sum(map(len, self.items or ()))


@dataclass
class World:
    """An engine with the fake device, and what a test wants to know of its run."""

    plans: list[Plan]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    budget: int
    has_prefix_cache: bool = False
    overlaps: bool = True
    window: int = 0
    more_window_blocks: int = 0  # than one sequence needs
    memory_errors: frozenset[int] = frozenset()
    max_drafts: int = 0
    spare_places: int = 0
    least_computed: int = 1
    requests: list[Request] = field(default_factory=list)
    tables: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    lost: list = field(default_factory=list)  # accounts of the last plan that was withdrawn

    def __post_init__(self):
        groups, most_places = [GroupBlocks(self.num_blocks)], self.budget + self.spare_places
        if self.window:
            most = len(range(0, self.window - 1 + most_places - 1, self.block_size)) + 1
            groups.append(GroupBlocks(1 + most + self.more_window_blocks, self.window))
        self.cache = CacheManager(
            groups, self.block_size, most_places, has_prefix_cache=self.has_prefix_cache
        )
        self.scheduler = Scheduler(
            self.cache, self.max_num_seqs, StepBudget(self.budget, is_timed=False),
            least_computed=self.least_computed,
            policy=DraftPolicy(spare_places=self.spare_places) if self.max_drafts else None,
        )  # fmt: skip
        self.oracle = Oracle(
            self.cache, self.max_num_seqs, self.budget, self.least_computed,
            self.spare_places if self.max_drafts else None,
        )  # fmt: skip
        self._watch()
        self.runner = FakeRunner(
            self.cache, self.max_num_seqs, self.budget, memory_errors=set(self.memory_errors)
        )
        longest = (self.num_blocks - 1) * self.block_size
        config = EngineConfig(
            torch.device("cpu"), torch.float32, longest, self.max_num_seqs, self.budget,
            self.block_size, 0.9, 0, 1, overlap=self.overlaps,
            spec=SpecConfig("ngram", self.max_drafts) if self.max_drafts else SpecConfig(),
        )  # fmt: skip
        self.engine = Engine(self.scheduler, self.runner, config)
        for i, plan in enumerate(self.plans):
            params = SamplingParams(
                prompt_logprobs=0 if plan.reads_prompt else None,
                bad_words=("x",) if plan.needs_last_token else (),
                num_spec_tokens=plan.num_spec_tokens,
            )
            request = Request(
                f"{i}", plan.prompt, params, 0, 0, STOP_IDS, plan.max_tokens,
                priority=plan.priority,
                score=None if plan.items is None else ScoreTask(tuple(plan.items), READS),
            )  # fmt: skip
            self.requests.append(request)
            self.runner.fails_at[request.request_id] = plan.fails_at

    def _watch(self):
        """Let the oracle hear of every call of the scheduler, and judge every plan."""
        scheduler, oracle = self.scheduler, self.oracle
        add, schedule, commit = scheduler.add, scheduler.schedule, scheduler.commit
        withdraw, finish = scheduler.withdraw, scheduler.finish

        def watched_schedule():
            expected, plan = oracle.plan(), schedule()
            self._check_plan(plan, expected)
            self._check_state()
            return plan

        def watched_commit(part, *, is_sound, new_token_ids=()):
            commit(part, is_sound=is_sound, new_token_ids=new_token_ids)
            oracle.commit(part.request, part.request.is_unsound, new_token_ids)

        scheduler.schedule, scheduler.commit = watched_schedule, watched_commit
        scheduler.add = lambda request: (add(request), oracle.add(request))

        def watched_withdraw(plan):
            self.lost = [oracle.accounts[part.request] for part in plan.scheduled]
            withdraw(plan)
            oracle.withdraw(plan)

        scheduler.withdraw = watched_withdraw

        def watched_finish(request, reason, stop_reason=None):
            if stop_reason == "out_of_memory":
                alive = [a for a in self.lost if a.status is not Status.FINISHED]
                assert oracle.accounts[request] is max(alive, key=lambda account: account.number)
            finish(request, reason, stop_reason)
            oracle.finish(request)

        scheduler.finish = watched_finish

    def _check_plan(self, plan, expected):
        if plan is None:
            assert expected == []
            return
        told = [
            (p.request, p.row, p.start, p.num_query, p.num_drafts, p.samples, p.enters, p.items)
            for p in plan.scheduled
        ]
        names = ("start", "query", "drafts", "samples", "enters", "items")
        assert told == [(a.request, a.row, *(part[name] for name in names)) for a, part in expected]
        assert [p.num_tokens for p in plan.scheduled] == [part["tokens"] for _, part in expected]
        assert plan.step_id == self.oracle.step_id
        for group, blocks in enumerate(plan.unsound_blocks):
            assert len(set(blocks)) == len(blocks)
            assert set(blocks) == self.oracle.unsound[group]
            self.oracle.unsound[group].clear()
        written = set()
        for row, write in plan.new_blocks:
            table = self.tables.setdefault((write.group, row), [])
            stop = write.start + len(write.block_ids)
            places = {(write.group, row, i) for i in range(write.start, stop)}
            assert not places & written, "a place twice"
            written |= places
            table += [NULL_BLOCK] * (stop - len(table))
            table[write.start : stop] = write.block_ids
        rows = {request.row for request in self.requests}
        assert {row for row, _ in plan.new_blocks} <= rows, "tables of rows that are free"
        for request in self.scheduler.running:
            for group, held in enumerate(request.block_ids):
                assert self.tables.get((group, request.row), [])[: len(held)] == held

    def _check_state(self):
        """All that the scheduler and the cache hold is what the oracle holds."""
        scheduler, oracle = self.scheduler, self.oracle
        for status, queue in ((Status.RUNNING, "running"), (Status.WAITING, "waiting")):
            assert getattr(scheduler, queue) == [a.request for a in oracle.queue(status)]
        for request, own in oracle.accounts.items():
            if request.status is Status.WAITING:
                assert request.next_drafts == ()
                assert request.prompt_logprobs == []
            assert (
                request.status, request.row, request.num_computed, request.num_committed,
                request.num_items_planned, request.num_items_done, request.num_in_flight,
                request.num_ahead, request.num_prefix_blocks, request.num_cached, request.block_ids,
                request.leader,
            ) == (
                own.status, own.row, own.computed, own.committed,
                own.items_planned, own.items_done, len(own.flights),
                own.ahead, own.num_kept, own.cached, own.held,
                own.leader and own.leader.request,
            )  # fmt: skip
        for allocator, pool in zip(self.cache.allocators, oracle.pools, strict=True):
            assert sorted(allocator._free) == pool.free
            assert list(allocator._idle) == pool.idle
            assert allocator._kept.keys() == pool.kept.keys()
            for block in range(allocator.num_blocks):
                assert allocator._references[block] == pool.readers.get(block, 0)
        if self.has_prefix_cache:
            assert len(self.cache._prefix._entries) == len(oracle.table)
        assert sorted(scheduler._free_rows) == sorted(oracle.rows)
        counts = scheduler.num_preemptions, scheduler.prefix_queries, scheduler.prefix_hits
        assert counts == (oracle.num_preemptions, oracle.queries, oracle.hits)

    def run(self):
        """Step until all requests have arrived and ended; checks each step."""
        limit = 60 + 60 * sum(plan.num_tokens for plan in self.plans)
        last = max(plan.arrival for plan in self.plans)
        step = 0
        while step <= last or self.engine.has_work:
            assert step < limit, "no progress"
            for plan, request in zip(self.plans, self.requests, strict=True):
                if plan.arrival == step:
                    self.engine.submit(request)
                if plan.abort == step and plan.arrival <= step:
                    self.engine.abort(request)
            self.step()
            step += 1
        self._check_the_end()

    def step(self):
        """One step of the engine."""
        lengths = {r.request_id: len(r.output_token_ids) for r in self.requests}
        ended = {r.request_id for r in self.requests if r.status is Status.FINISHED}
        updates = self.engine.step()
        self._check_state()
        self.check_ownership()
        for update in updates:
            request = update.request
            assert request.request_id not in ended, "news of a request that had ended"
        for request in self.requests:
            told = [i for u in updates if u.request is request for i in u.new_token_ids]
            assert request.output_token_ids[lengths[request.request_id] :] == told
        self._check_turns()

    def _check_turns(self):
        running, waiting = self.scheduler.running, self.scheduler.waiting
        for queue in (running, waiting):
            turns = [(r.priority, r.arrival) for r in queue]
            assert turns == sorted(turns)
        if running and waiting and not self.has_prefix_cache:
            first, last = waiting[0], running[-1]
            # Only one that arrived after the last plan may have an earlier turn than a running one.
            is_new = first.arrival == self.scheduler._num_added - 1
            assert (last.priority, last.arrival) < (first.priority, first.arrival) or (
                is_new or first.priority < last.priority
            ), "not first come, first served"

    def check_ownership(self):
        """Blocks and rows belong to whom they are given, and to nobody else."""
        for group, allocator in enumerate(self.cache.allocators):
            held = [r.block_ids[group] for r in self.requests if r.block_ids]
            owned = [block for blocks in held for block in blocks if block != NULL_BLOCK]
            if not self.has_prefix_cache:
                assert len(set(owned)) == len(owned), "a block has two owners"
            free = allocator.num_blocks - 1 - len(set(owned))
            assert allocator.num_free == free, "a block is lost"
        rows = [r.row for r in self.requests if r.row >= 0]
        assert len(set(rows)) == len(rows)
        for request in self.requests:
            holds = bool(request.block_ids) or request.row >= 0
            is_used = request.status is Status.RUNNING or request.num_in_flight > 0
            assert holds == is_used
            assert 0 <= request.num_in_flight <= (1 if self.overlaps else 0)

    def _check_the_end(self):
        for allocator in self.cache.allocators:
            assert allocator.num_free == allocator.num_blocks - 1
        assert self.scheduler.schedule() is None
        assert not self.runner.queue
        for plan, request in zip(self.plans, self.requests, strict=True):
            expected = decode_alone(plan.prompt, plan.max_tokens, self.window)
            output = request.output_token_ids
            assert request.status is Status.FINISHED
            assert output == expected[: len(output)], "another answer than alone"
            reason = (request.finish_reason, request.stop_reason)
            if request.finish_reason == "abort":
                assert plan.abort is not None
                continue
            if request.finish_reason == "error" and reason[1] == "out_of_memory":
                assert self.memory_errors
                continue
            if plan.items is not None:
                self._check_scores(plan, request)
                continue
            if plan.reads_prompt:
                assert [e.token_id for e in request.prompt_logprobs] == plan.prompt[1:]
            if request.finish_reason == "error":
                assert reason[1] == "nonfinite_logits"
                if self.max_drafts:  # a step may have yielded several
                    assert len(output) >= plan.fails_at
                else:
                    assert len(output) == plan.fails_at
                continue
            assert output == expected
            is_stopped = bool(output) and output[-1] in STOP_IDS
            assert reason == (("stop", output[-1]) if is_stopped else ("length", None))
            if not self.memory_errors:
                wasted = self.runner.num_draws[request.request_id] - max(1, len(output))
                assert wasted <= (1 if self.overlaps and is_stopped else 0), "drawn for nothing"

    def _check_scores(self, plan, request):
        run = self.runner.num_items_run.get(request.request_id, 0)
        if not self.memory_errors:
            assert run <= len(plan.items), "an item was computed twice"
        if request.finish_reason == "error":
            assert request.stop_reason == "nonfinite_logits"
            assert plan.fails_at is not None
            return
        assert run >= len(plan.items)
        assert (request.finish_reason, request.stop_reason) == ("length", None)
        expected = [next_token([*plan.prompt, *item], self.window) for item in plan.items or [()]]
        assert request.scores.tolist() == expected


def blocks_for(num_tokens, block_size):
    return -(-num_tokens // block_size)


@st.composite
def scorings(draw, plan, tokens, budget):
    """The same plan with items to score instead of an answer."""
    item = st.lists(tokens, min_size=1, max_size=min(budget, 7)).map(tuple)
    items = draw(st.lists(item, max_size=9))
    prompt = [] if items and draw(st.integers(0, 3)) == 0 else plan.prompt
    return replace(
        plan, prompt=prompt, max_tokens=0, items=items, needs_last_token=False, reads_prompt=False
    )


@st.composite
def worlds(draw, has_prefix_cache=False, has_window=False, fails=True, drafts=False):
    block_size = draw(st.integers(1, 4))
    tokens = st.integers(0, 1 if has_prefix_cache else VOCAB_SIZE - 1)  # few: prompts begin alike
    budget = draw(st.integers(1, 12))
    plans = [
        Plan(
            prompt=draw(st.lists(tokens, min_size=1, max_size=11)),
            max_tokens=draw(st.integers(0, 12)),
            arrival=draw(st.integers(0, 6)),
            abort=draw(st.none() | st.integers(0, 30)),
            fails_at=draw(st.none() | st.integers(0, 8)) if fails else None,
            priority=draw(st.integers(0, 1)),
            needs_last_token=draw(st.integers(0, 3)) == 0,
            reads_prompt=draw(st.integers(0, 3)) == 0,
            num_spec_tokens=draw(st.none() | st.integers(0, 3)) if drafts else None,
        )
        for _ in range(draw(st.integers(2, 8)))
    ]
    plans = [
        draw(scorings(plan, tokens, budget)) if draw(st.integers(0, 2)) == 0 else plan
        for plan in plans
    ]
    need = max(blocks_for(len(p.prompt) + p.max_tokens, block_size) for p in plans)
    return World(
        plans,
        block_size=block_size,
        num_blocks=1 + need + draw(st.integers(0, 3)),
        max_num_seqs=draw(st.integers(2, 6)),
        budget=budget,
        has_prefix_cache=has_prefix_cache,
        overlaps=draw(st.booleans()),
        window=draw(st.integers(1, 6)) if has_window else 0,
        more_window_blocks=draw(st.integers(0, 6)),
        memory_errors=frozenset() if fails else draw(st.frozensets(st.integers(1, 30), max_size=3)),
        max_drafts=draw(st.integers(1, 5)) if drafts else 0,
        spare_places=draw(st.integers(0, 4)) if drafts else 0,
        least_computed=draw(st.integers(1, 4)),
    )


@st.composite
def scored_worlds(draw):
    """Answers that draft beside long lists of items, which ask for more than half of a step."""
    tokens, budget = st.integers(1, VOCAB_SIZE - 1), draw(st.integers(6, 20))
    answers = [
        Plan(draw(st.lists(tokens, min_size=1, max_size=2)), draw(st.integers(8, 16)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    item = st.lists(tokens, min_size=1, max_size=budget - 3).map(tuple)
    lists = [
        Plan([1], 0, draw(st.integers(0, 4)), items=draw(st.lists(item, min_size=2, max_size=9)))
        for _ in range(draw(st.integers(2, 3)))
    ]
    return World(
        [*answers, *lists],
        block_size=4, num_blocks=60, max_num_seqs=8, budget=budget, max_drafts=7,
        overlaps=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def crowded_worlds(draw):
    """Long answers in a cache for hardly more than one of them: most give way, some more than once.

    With drafts, windows, hits and lists of items, or without.
    """
    tokens, drafts = st.integers(1, draw(st.sampled_from((2, 12)))), draw(st.booleans())
    item = st.lists(tokens, min_size=1, max_size=3).map(tuple)
    plans = [
        Plan(
            draw(st.lists(tokens, min_size=1, max_size=6)),
            draw(st.integers(6, 14)),
            arrival=draw(st.integers(0, 3)),
            priority=draw(st.integers(0, 1)),
            needs_last_token=draw(st.integers(0, 4)) == 4,
            reads_prompt=draw(st.integers(0, 3)) == 3,
        )
        for _ in range(draw(st.integers(3, 6)))
    ]
    if draw(st.booleans()):
        items = draw(st.lists(item, min_size=4, max_size=9))
        plans.append(Plan(draw(st.lists(tokens, min_size=1, max_size=6)), 0, items=items))
    block_size = draw(st.integers(1, 3))
    need = max(blocks_for(len(p.prompt) + p.max_tokens, block_size) for p in plans)
    return World(
        plans, block_size=block_size, num_blocks=1 + need + draw(st.integers(0, 2)),
        max_num_seqs=draw(st.integers(2, 5)), budget=draw(st.integers(3, 12)),
        has_prefix_cache=draw(st.booleans()), overlaps=draw(st.booleans()),
        window=draw(st.sampled_from((0, 3))), max_drafts=3 * drafts,
        spare_places=draw(st.integers(0, 2)) * drafts,
    )  # fmt: skip
