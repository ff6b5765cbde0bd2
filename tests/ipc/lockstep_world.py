"""Ranks over fake devices that take what rank 0 sends at times of their own.

Nothing but the messages passes between them, as bytes. Each rank has a clock of its own, and some
forms of rank 0 take too long by its clock. What every rank planned is kept.
"""

from __future__ import annotations

import random
from collections import deque

import torch

from tests.engine.fake_device import VOCAB_SIZE, FakeRunner
from tiercel.cache.manager import CacheManager, GroupBlocks
from tiercel.config import SpecConfig
from tiercel.engine.engine import Engine
from tiercel.engine_config import EngineConfig
from tiercel.faults import Faults
from tiercel.grammar.spec import GrammarSpec
from tiercel.ipc.lockstep import Follower, LeadingEngine
from tiercel.ipc.messages import MAX_TO_ENGINE_BYTES, FrameReader
from tiercel.ipc.rank_messages import decode_to_rank
from tiercel.params import SamplingParams
from tiercel.request.request import Request, Status
from tiercel.request.score_task import ScoreRead, ScoreTask
from tiercel.runner.joint_step import joint_step, make_scratch_parts
from tiercel.scheduler.joint import JointOutput, JointScheduler
from tiercel.scheduler.scheduler import Scheduler
from tiercel.scheduler.step_budget import StepBudget
from tiercel.spec.policy import DraftPolicy

STOP_IDS = frozenset({0})
READS = ((ScoreRead(0, (1,)),),)
LONGEST_ITEM = 4


class FakeMatcher:
    """A form that ends some answers, and that takes too long at random where a clock is read."""

    def __init__(self, clock=None):
        self.error, self.is_late = None, False
        self._clock = clock

    def advance(self, token_id):
        if token_id == VOCAB_SIZE - 1:
            self.error = "schema_too_complex"
        self.is_late |= self._clock is not None and self._clock.random() < 0.2

    def num_valid(self, token_ids):
        return next((i for i, token in enumerate(token_ids) if token % 3 == 2), len(token_ids))


class FakeMatchers:
    """Stands in for `SpareMatchers`."""

    def take(self, request):
        return None if request.grammar is None else FakeMatcher()


class JointDevices:
    """The devices of all ranks, each with requests of its own; stands in for `JointRunner`.

    Every rank runs all of them, in place of an exchange of results; and sees that ranks would pass
    the layers together.
    """

    def __init__(self, runners, scratch):
        self.runners, self.rows = runners, self
        self._scratch = make_scratch_parts(scratch)

    def launch(self, plan):
        steps = [joint_step(plan, rank, self._scratch, lambda *_: None)
                 for rank in range(len(self.runners))]  # fmt: skip
        for rank, (step, own) in enumerate(zip(steps, plan.by_rank, strict=True)):
            self._check(rank, step, steps[0].shape, () if own is None else own.scheduled)
        return [own and runner.launch(own)
                for runner, own in zip(self.runners, plan.by_rank, strict=True)]  # fmt: skip

    def _check(self, rank, step, shape, planned):
        """A rank has all its parts, and in each pass what it is said to bring: a row at least."""
        assert step.shape == shape, "every rank knows the same passes"
        real = [part for part in step.parts if part.request.request_id != "scratch"]
        assert sorted(map(id, real)) == sorted(map(id, planned))
        passes = [(shape.answers, step.parts)]
        if shape.drafts:
            answers = [part for part in step.parts if part.is_answer]
            chunks = [part for part in step.parts if not part.is_answer]
            passes = [(shape.answers, answers), (shape.chunks, chunks)]
        for shares, parts in passes:
            assert (shares is None) == (not parts), "all ranks make a pass, or none"
            if shares is not None:
                assert sum(part.num_tokens for part in parts) == shares.tokens[rank] > 0
                assert sum(part.samples for part in parts) == shares.rows[rank]
        drafting = shape.chunks.rows if shape.drafts and shape.chunks else ()
        assert not any(drafting) or all(drafting), "all ranks draft after a pass, or none"

    def collect(self, steps):
        sampled = {}
        for runner, step in zip(self.runners, steps, strict=True):
            sampled |= {} if step is None else runner.collect(step)
        return sampled

    def forget_staged(self):
        """Nothing is staged here."""

    def __getattr__(self, name):  # counts
        return sum(getattr(runner, name) for runner in self.runners)


class Shape:
    """The sizes and options of a scenario; the same on every rank."""

    def __init__(self, dice, num_ranks):
        self.num_ranks = num_ranks
        self.block_size, self.max_num_seqs = dice.randint(1, 5), dice.randint(1, 5)
        self.budget = dice.randint(max(LONGEST_ITEM, self.max_num_seqs), 40)
        self.max_drafts = dice.choice((0, 0, 1, 3))
        method = dice.choice(("ngram", "mtp", "hybrid"))
        self.spare_places = max(0, self.max_drafts - 1) if method == "mtp" else 0
        self.spec = SpecConfig(method, self.max_drafts) if self.max_drafts else SpecConfig()
        self.costs = dice.choice(((), ((2, 0.1), (5, 0.6))))
        self.window = dice.choice((0, 0, 3, 7))
        self.has_prefix_cache = dice.random() < 0.7
        self.overlaps = dice.random() < 0.7
        self.is_timed = dice.random() < 0.4
        self.least_computed = dice.choice((1, 3))
        longest = 34 + self.spare_places
        self.num_blocks = 1 + -(-longest // self.block_size) + dice.randint(0, 12)
        self.num_schedulers = num_ranks if dice.random() < 0.5 else 1

    def engine(self, make, clock):
        """The engine of a rank, by `make(scheduler, runner, config)`, and its runner."""
        most_places = self.budget + self.spare_places
        groups = [GroupBlocks(self.num_blocks)]
        if self.window:
            most = len(range(0, self.window - 1 + most_places - 1, self.block_size)) + 1
            groups.append(GroupBlocks(2 + 2 * most, self.window))
        budget = StepBudget(self.budget, is_timed=self.is_timed)
        schedulers, runners = [], []
        for _ in range(self.num_schedulers):
            cache = CacheManager(
                groups, self.block_size, most_places, has_prefix_cache=self.has_prefix_cache
            )
            policy = DraftPolicy(self.costs, self.spare_places) if self.max_drafts else None
            schedulers.append(
                Scheduler(cache, self.max_num_seqs, budget, self.least_computed, policy)
            )
            runners.append(FakeRunner(cache, self.max_num_seqs, self.budget))
        scheduler, runner = schedulers[0], runners[0]
        if len(schedulers) > 1:
            scheduler = JointScheduler(schedulers)
            runner = JointDevices(runners, self.max_num_seqs)
        longest = (self.num_blocks - 1) * self.block_size
        config = EngineConfig(
            torch.device("cpu"), torch.float32, longest, self.max_num_seqs, self.budget,
            self.block_size, 0.9, 0, 1, overlap=self.overlaps, spec=self.spec,
            timed_steps=self.is_timed, tensor_parallel_size=self.num_ranks,
            data_parallel_attention=self.num_schedulers > 1,
        )  # fmt: skip
        engine = make(scheduler, runner, config)
        engine._clock = clock
        return engine


class Record:
    """What a rank planned, step by step, and the requests that it was given."""

    def __init__(self, engine):
        self.engine, self.plans, self.requests = engine, [], []
        schedule, submit = engine.scheduler.schedule, engine.submit

        def watched_schedule():
            plan = schedule()
            self.plans.append(plan and self.describe(plan))
            return plan

        def watched_submit(request):
            submit(request)
            self.requests.append(request)

        engine.scheduler.schedule, engine.submit = watched_schedule, watched_submit

    def describe(self, plan):
        if isinstance(plan, JointOutput):
            return plan.step_id, [own and self.describe(own) for own in plan.by_rank]
        parts = [
            (p.request.arrival, p.row, p.start, p.num_query, p.num_drafts, p.samples, p.items)
            for p in plan.scheduled
        ]
        return plan.step_id, parts, plan.new_blocks, plan.unsound_blocks

    def end(self):
        """All that is left at the end."""
        scheduler = self.engine.scheduler
        caches = [part.cache for part in getattr(scheduler, "schedulers", [scheduler])]
        allocators = [allocator for cache in caches for allocator in cache.allocators]
        return (
            [(r.output_token_ids, r.finish_reason, r.stop_reason) for r in self.requests],
            [r.scores.tolist() for r in self.requests],
            [list(a._free) for a in allocators],
            [list(a._idle) for a in allocators],
            [request.rank for request in self.requests],
            (scheduler.num_preemptions, scheduler.prefix_queries, scheduler.prefix_hits),
        )


class Clock:
    """Time that passes by leaps."""

    def __init__(self, seed):
        self._dice, self._now = random.Random(seed), 0.0

    def __call__(self):
        self._now += self._dice.choice((0.001, 0.02, 0.3, 2.0))
        return self._now


class LockstepWorld:
    """Rank 0 and its followers; also the `Audience` of rank 0."""

    failure = None

    def __init__(self, seed, num_ranks):
        self.dice = random.Random(seed)
        self.shape = Shape(self.dice, num_ranks)
        self.words = [[] for _ in range(num_ranks)]
        self.num_late = 0
        leader = self.shape.engine(lambda *parts: LeadingEngine(*parts, self), Clock(seed))
        self.leader, self.engine = Record(leader), leader
        self.followers, self.records, self.queues, self.readers = [], [], [], []
        for rank in range(1, num_ranks):
            engine = self.shape.engine(Engine, Clock(f"{seed}-{rank}"))
            self.records.append(Record(engine))
            self.followers.append(Follower(engine, FakeMatchers(), Faults(), self.teller(rank)))
            self.queues.append(deque())
            self.readers.append(FrameReader(MAX_TO_ENGINE_BYTES))

    def teller(self, rank):
        return lambda steps, word: self.note_word(rank, steps, word)

    def send(self, frames):
        for queue, reader in zip(self.queues, self.readers, strict=True):
            queue.extend(decode_to_rank(body) for body in reader.feed(frames))

    def note_step(self):
        """Nothing hangs here."""

    def note_word(self, rank, num_steps, word):
        self.words[rank].append((num_steps, word))

    def give_up(self, error):
        raise AssertionError from error

    def follow(self, *, most=None):
        """Let each follower take some of what was sent to it."""
        for follower, queue in zip(self.followers, self.queues, strict=True):
            count = self.dice.choice((0, 1, 2, 5)) if most is None else most
            for _ in range(min(count, len(queue))):
                follower.take(queue.popleft())

    def request(self, number):
        """A random request; many begin alike."""
        dice, shape = self.dice, self.shape
        prompt = [dice.choice((3, 4))] * dice.randint(1, 14)
        prompt += [dice.randrange(1, VOCAB_SIZE) for _ in range(dice.randint(0, 6))]
        kind = dice.random()
        items = None
        if kind < 0.15:
            items = [(1,) * dice.randint(1, LONGEST_ITEM) for _ in range(dice.randint(1, 6))]
        has_grammar = kind > 0.7
        params = SamplingParams(
            prompt_logprobs=0 if kind > 0.95 else None,
            bad_words=("x",) if 0.15 < kind < 0.25 else (),
            num_spec_tokens=dice.choice((None, 1)) if shape.max_drafts else None,
        )
        request = Request(
            f"{number}", prompt, params, 0, 0, STOP_IDS,
            0 if items else dice.randint(0, 14), priority=dice.choice((0, 0, -1)),
            grammar=GrammarSpec("form") if has_grammar and not items else None,
            score=None if items is None else ScoreTask(tuple(items), READS),
        )  # fmt: skip
        if request.grammar is not None:
            request.matcher = FakeMatcher(dice)
        return request

    def run(self, num_requests=8):
        """Submit, abort, stop and step at random, with followers behind; then let them end."""
        live, number = [], 0
        for _ in range(2000):
            self._end_some(live)
            while number < num_requests and self.dice.random() < 0.35:
                number += 1
                live.append(self.request(number))
                self.engine.submit(live[-1])
            if self.engine.has_work:
                self.num_late += len(self.engine.late)
                self.engine.step()
            elif number == num_requests:
                break
            elif self.dice.random() < 0.2:
                self.engine.forget()
            self.follow()
        assert not self.engine.has_work, "no progress"
        self.follow(most=10**6)

    def _end_some(self, live):
        for request in live:
            if request.status is not Status.FINISHED and self.dice.random() < 0.01:
                if self.dice.random() < 0.5:
                    self.engine.abort(request)
                else:
                    self.engine.stop(request, "END")
