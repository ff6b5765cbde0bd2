"""Every rank plans the same steps, whatever comes when and however far it lags behind."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.ipc.lockstep_world import LockstepWorld
from tiercel.engine.engine import RequestUpdate
from tiercel.ipc import lockstep
from tiercel.params import SamplingParams
from tiercel.request.request import Request


def check(seed, num_ranks):
    """Run a random scenario; all ranks have planned and computed the same at its end."""
    world = LockstepWorld(seed, num_ranks)
    world.run(8 * world.shape.num_schedulers)
    for rank, record in enumerate(world.records, 1):
        where = f"seed {seed}, rank {rank}"
        assert record.plans == world.leader.plans, where
        assert record.end() == world.leader.end(), where
        assert world.words[rank] == world.words[0], where
        follower = world.followers[rank - 1]
        assert not follower._requests, where
        assert not follower._keys, where
    assert not world.engine._keys
    return world


def check_many(seeds):
    """Run many scenarios; returns how often what can tell ranks apart has happened."""
    seen = Counter()
    for seed in seeds:
        world = check(seed, random.Random(seed).choice((2, 2, 3, 4)))
        scheduler, requests = world.engine.scheduler, world.leader.requests
        seen["preemptions"] += scheduler.num_preemptions
        seen["hits"] += scheduler.prefix_hits
        seen["drafts"] += world.engine.runner.num_right
        seen["wrong drafts"] += world.engine.runner.num_wrong
        seen["chunks"] += world.engine.runner.num_chunks
        seen["late forms"] += world.num_late
        seen["timed"] += world.shape.is_timed
        if world.shape.num_schedulers > 1:
            seen["own requests"] += len({request.rank for request in requests}) > 1
            seen["preemptions beside others"] += scheduler.num_preemptions
        seen["items"] += sum(request.num_items_done for request in requests)
        seen.update(str(request.finish_reason) for request in requests)
    return seen


def test_ranks_plan_alike(monkeypatch):
    monkeypatch.setattr(lockstep, "WORD_STEPS", 4)
    seen = check_many(range(150))
    kinds = ("preemptions", "hits", "drafts", "wrong drafts", "chunks", "late forms", "timed",
             "own requests", "preemptions beside others")  # fmt: skip
    for kind in (*kinds, "items", "abort", "stop", "length", "error"):
        assert seen[kind] > 5, kind


def test_a_check_word_depends_on_every_id_and_its_place(monkeypatch):
    monkeypatch.setattr(lockstep, "WORD_STEPS", 2)
    first, second = (Request(n, [], SamplingParams(), 0, 0, frozenset(), 9) for n in "ab")
    second.arrival = 5
    scheduler = SimpleNamespace(num_preemptions=1, prefix_hits=64)

    def word(*steps, scheduler=scheduler):
        told = []
        check = lockstep.CheckWord(lambda *pair: told.append(pair))
        for ids in steps:
            check.add(scheduler, [RequestUpdate(r, i) for r, i in ids])
        ((num_steps, found),) = told
        assert num_steps == 2
        return found

    one, other = [(first, (1, 2)), (second, (3,))], [(first, (4,))]
    preempted = SimpleNamespace(num_preemptions=2, prefix_hits=64)
    words = {
        word(one, other), word(other, one), word(one, []), word([one[1], one[0]], other),
        word([(first, (1,)), (second, (3,))], other), word([(second, (1, 2)), one[1]], other),
        word(one, other, scheduler=preempted),
    }  # fmt: skip
    assert len(words) == 7
    assert word(one, other) == word(one, other, []) == word(list(one), list(other))


@pytest.mark.slow
def test_ranks_plan_alike_in_many_more_runs(monkeypatch):
    monkeypatch.setattr(lockstep, "WORD_STEPS", 4)
    check_many(range(1000, 4000))
