"""Which rank gets a request, where each has its own."""

from tiercel.cache.manager import CacheManager, GroupBlocks
from tiercel.params import SamplingParams
from tiercel.request.request import Request
from tiercel.scheduler.joint import JointScheduler
from tiercel.scheduler.scheduler import Scheduler
from tiercel.scheduler.step_budget import StepBudget

BLOCK = 4


def make_scheduler(num_ranks, max_num_seqs=2):
    budget = StepBudget(8, is_timed=False)
    return JointScheduler([
        Scheduler(CacheManager([GroupBlocks(20)], BLOCK, 8), max_num_seqs, budget, 1)
        for _ in range(num_ranks)
    ])  # fmt: skip


def add(scheduler, prompt, max_tokens=4):
    request = Request("r", prompt, SamplingParams(), 0, 0, frozenset(), max_tokens)
    scheduler.add(request)
    return request


def run(scheduler):
    """Run all requests to their ends, each token 1."""
    while scheduler.has_work:
        plan = scheduler.schedule()
        for part in plan.scheduled:
            new = (1,) if part.samples else ()
            scheduler.commit(part, is_sound=True, new_token_ids=new)
            part.request.output_token_ids += new
            if len(part.request.output_token_ids) == part.request.max_tokens:
                scheduler.finish(part.request, "length")


def test_the_fewest_tokens_to_compute_win():
    scheduler = make_scheduler(3)
    ranks = [add(scheduler, [2] * count).rank for count in (9, 3, 5, 1, 1, 6)]
    assert ranks == [0, 1, 2, 1, 1, 2]
    run(scheduler)


def test_equal_ranks_take_turns_until_one_knows_the_prompt():
    scheduler = make_scheduler(2)
    turns = []
    for number in range(4):
        turns.append(add(scheduler, [number + 2] * 9).rank)
        run(scheduler)
    assert turns == [0, 1, 0, 1]
    assert add(scheduler, [3] * 9).rank == 1, "it has these blocks"
    assert add(scheduler, [3] * 9).rank == 0, "a wait would be as long as computing them"
    run(scheduler)
    assert scheduler.prefix_hits > 0
    scheduler.forget_history()
    assert (scheduler.prefix_hits, scheduler.prefix_queries, scheduler.num_preemptions) == (0, 0, 0)


def test_a_plan_has_the_parts_of_all_ranks():
    """Each rank has the whole room of a step; one with nothing to do has no plan."""
    scheduler = make_scheduler(3)
    first, second = add(scheduler, [2] * 12), add(scheduler, [3] * 5)
    plan = scheduler.schedule()
    assert [part.num_tokens for part in plan.scheduled] == [8, 5]
    assert [part.request for part in plan.scheduled] == [first, second]
    assert plan.by_rank[2] is None
    assert [chunk.num_tokens for chunk in plan.chunks] == [8], "of the rank that takes longest"
    assert scheduler.cache_usage == (2 + 2) / 19 / 3
    scheduler.withdraw(plan)
    assert (first.num_computed, second.num_computed) == (0, 0)
    assert (scheduler.capacity, scheduler.num_blocks) == (19 * BLOCK, 60)
    scheduler.finish(second, "abort")
    run(scheduler)
    assert first.finish_reason == "length"
