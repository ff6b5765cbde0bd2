"""The engine's loop over a fake device: every plan keeps the rules, whatever arrives and leaves.

Answers must equal decoding each prompt alone, with and without overlapping steps.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from tests.scheduler.scheduler_world import (
    STOP_IDS,
    Plan,
    World,
    blocks_for,
    crowded_worlds,
    decode_alone,
    scored_worlds,
    worlds,
)
from tiercel.cache.allocator import NULL_BLOCK
from tiercel.cache.manager import CacheManager, GroupBlocks
from tiercel.errors import OutOfMemoryError
from tiercel.params import SamplingParams
from tiercel.request.request import Request, Status
from tiercel.scheduler.scheduler import Scheduler
from tiercel.scheduler.step_budget import StepBudget

# To shrink a world takes minutes: `test_many_more_runs` does that.
quick = settings(
    deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate), report_multiple_bugs=False
)


def run_and_note(world):
    world.run()
    event(f"preemptions: {min(world.scheduler.num_preemptions, 3)}")
    event(f"chunks: {min(world.runner.num_chunks, 3)}")
    event(f"hits: {min(world.runner.num_hits, 5)}")
    event(f"overlaps: {world.runner.most_pending}")
    event(
        f"right drafts: {min(world.runner.num_right, 5)}, wrong: {min(world.runner.num_wrong, 5)}"
    )


@settings(quick, max_examples=140)
@given(world=worlds())
def test_every_plan_keeps_the_rules(world):
    run_and_note(world)


@settings(quick, max_examples=140)
@given(world=worlds(has_prefix_cache=True))
def test_every_plan_keeps_the_rules_with_the_prefix_cache(world):
    run_and_note(world)


@settings(quick, max_examples=110)
@given(world=worlds(has_window=True))
def test_every_plan_keeps_the_rules_with_a_window(world):
    run_and_note(world)


@settings(quick, max_examples=110)
@given(world=worlds(has_window=True, has_prefix_cache=True))
def test_every_plan_keeps_the_rules_with_a_window_and_the_prefix_cache(world):
    run_and_note(world)


@settings(quick, max_examples=70)
@given(world=worlds(has_prefix_cache=True, fails=False))
def test_a_step_without_memory_costs_one_request(world):
    run_and_note(world)


@settings(quick, max_examples=140)
@given(world=worlds(drafts=True))
def test_drafts_change_no_answer(world):
    run_and_note(world)


@settings(quick, max_examples=110)
@given(world=crowded_worlds())
def test_those_that_give_way_lose_nothing_but_time(world):
    run_and_note(world)


@settings(quick, max_examples=60)
@given(world=scored_worlds())
def test_drafts_leave_room_for_the_longest_item_that_is_next(world):
    run_and_note(world)


@settings(quick, max_examples=140)
@given(world=worlds(drafts=True, has_prefix_cache=True, has_window=True))
def test_drafts_change_no_answer_with_a_window_and_the_prefix_cache(world):
    """Rejections, hits, aborts and preemptions at once: a block is kept of accepted tokens only."""
    run_and_note(world)


@settings(quick, max_examples=70)
@given(world=worlds(drafts=True, has_prefix_cache=True, fails=False))
def test_a_step_without_memory_costs_one_request_of_those_that_draft(world):
    run_and_note(world)


def test_a_lost_step_takes_no_blocks_from_those_that_sat_it_out():
    """The last in turn has got blocks in the plan, but gives way for a step: it is not in it."""
    plans = [Plan([1], 8), Plan([1] * 10, 1), Plan([1], 2), Plan([1, 1], 2, arrival=1)]
    for step in range(1, 16):
        World(plans, 1, 13, 3, 5, window=3, memory_errors=frozenset({step})).run()


@pytest.mark.parametrize("overlaps", [False, True])
def test_blocks_to_zero_are_zeroed_though_their_step_is_lost(overlaps):
    plans = [Plan([1], 9), Plan([3] * 4, 6, fails_at=0), Plan([5] * 4, 4, arrival=4)]
    for step in range(1, 16):
        World(plans, 1, 16, 3, 8, True, overlaps=overlaps, memory_errors=frozenset({step})).run()


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(
    world=st.one_of(
        worlds(),
        worlds(has_prefix_cache=True, has_window=True),
        worlds(drafts=True),
        worlds(has_prefix_cache=True, has_window=True, drafts=True),
    )
)
def test_many_more_runs(world):
    run_and_note(world)


def test_a_second_prompt_computes_only_what_the_first_does_not_share():
    shared = [3] * 10
    plans = [Plan([*shared, 1, 1], 2), Plan([*shared, 2, 2], 2, arrival=4)]
    world = World(plans, 4, 40, 4, 16, has_prefix_cache=True)
    world.run()
    assert [request.num_cached for request in world.requests] == [0, 8]  # 2 whole blocks of 4
    assert (world.scheduler.prefix_queries, world.scheduler.prefix_hits) == (24, 8)


def test_a_preemption_amid_a_list_of_items_repeats_neither_scores_nor_counts():
    """An older answer grows and takes the blocks of a list that is half done."""
    num_amid = 0
    for num_blocks in range(7, 11):
        items = [(i, 2, 3) for i in range(1, 10)]
        plans = [
            Plan([1], 9),
            Plan([2] * 5, 0, arrival=1, items=items),
            Plan([2] * 5, 1, arrival=9),
        ]
        world = World(plans, 2, num_blocks, 3, 4, has_prefix_cache=True)
        preempt = world.scheduler._preempt

        def watched(request, preempt=preempt):
            nonlocal num_amid
            num_amid += request.num_items_done > 0
            preempt(request)

        world.scheduler._preempt = watched
        world.run()
    assert num_amid > 0


@pytest.mark.parametrize(("size", "max_drafts"), [(4, 0), (4, 3), (1, 3)])
def test_an_answer_is_kept_for_prompts_that_go_on_from_it(size, max_drafts):
    """All of its full blocks: those too that one step of several tokens has filled."""
    prompt = [3, 5, 7]
    answer = decode_alone(prompt, 14)
    plans = [Plan(prompt, 14), Plan([*prompt, *answer, 1, 1], 1, arrival=18)]
    world = World(plans, size, 40, 4, 16, has_prefix_cache=True, max_drafts=max_drafts)
    world.run()
    if max_drafts:
        assert world.runner.num_right > 0
    computed = len(prompt) + len(answer) - 1
    assert world.requests[1].num_cached == computed // size * size


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("window", [1, 3, 4, 9])
def test_a_window_group_for_one_step_of_all_serves_all_together(window, overlaps):
    """Blocks for a window of each sequence and two steps: all enter, and none gives way."""
    num_seqs, budget, size = 6, 24, 4
    plans = [Plan([i + 1] * 30, 20) for i in range(num_seqs)]
    one = 1 + len(range(0, window - 1, size))  # blocks with a window's tokens
    alone = 1 + len(range(0, window - 1 + budget - 1, size))
    more = num_seqs * one + 2 * (alone - one) - alone
    world = World(
        plans, size, 200, num_seqs, budget, overlaps=overlaps, window=window,
        more_window_blocks=more,
    )  # fmt: skip
    launch = world.runner.launch

    def watched(plan):
        if world.scheduler.waiting:
            assert plan.num_tokens == budget, "they wait for tokens of a step, not for blocks"
        return launch(plan)

    world.runner.launch = watched
    world.run()
    assert world.scheduler.num_preemptions == 0
    assert world.cache.groups[1].num_blocks == 1 + num_seqs * one + 2 * (alone - one)


def test_requests_that_come_together_compute_their_start_once():
    shared = list(range(1, 11)) * 2
    plans = [Plan([*shared, i, i, i, i], 3) for i in range(1, 6)]
    world = World(plans, 4, 60, 8, 64, has_prefix_cache=True)
    world.run()
    assert [request.num_cached for request in world.requests] == [0, 20, 20, 20, 20]


def test_a_follower_goes_on_when_its_leader_leaves():
    shared = [5] * 40
    plans = [Plan(shared, 3, abort=2), Plan(shared, 3), Plan(shared, 3)]
    world = World(plans, 4, 80, 8, 8, has_prefix_cache=True)
    world.run()
    assert [request.finish_reason for request in world.requests] != ["abort"] * 3


def test_a_prompt_that_differs_in_an_earlier_block_leads_nobody():
    """It computes a block of the same tokens right now, but after other ones."""
    first, shared = [[i] * 4 for i in (1, 2)], [3] * 20
    plans = [Plan([*start, 5, 5], 1) for start in first]
    plans += [Plan([*start, *shared], 1, arrival=5) for start in first]
    world = World(plans, 4, 40, 4, 64, has_prefix_cache=True)
    world.run()
    assert [request.num_cached for request in world.requests] == [0, 0, 4, 4]


def test_others_overtake_a_request_that_waits_for_its_start():
    plans = [Plan([5] * 40, 2), Plan([5] * 40, 2), Plan([6, 7], 2)]
    world = World(plans, 4, 80, 8, 10, has_prefix_cache=True)
    for request in world.requests:
        world.engine.submit(request)
    for _ in range(4):
        world.step()
    assert world.requests[1].status is Status.WAITING
    assert world.requests[2].status is Status.WAITING, "the leader's chunks fill the budget"
    world.step()
    world.step()
    assert world.requests[2].status is not Status.WAITING


@pytest.mark.parametrize(("length", "cached"), [(8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_prompt_that_is_cached_whole_computes_its_last_tokens(length, cached):
    plans = [Plan([3] * length, 5), Plan([3] * length, 1, arrival=7)]
    world = World(plans, 4, 40, 4, 16, has_prefix_cache=True)
    world.run()
    assert [request.num_cached for request in world.requests] == [0, cached]


def test_a_window_frees_its_old_blocks_and_hits_need_the_last_ones_only():
    shared = list(range(1, 12)) * 3
    plans = [Plan(shared, 2), Plan([*shared, 4, 4, 4], 2, arrival=12)]
    world = World(plans, 4, 60, 4, 64, has_prefix_cache=True, window=6)
    for request in world.requests[:1]:
        world.engine.submit(request)
    while world.engine.has_work:
        world.step()
        held = [r.block_ids[1] for r in world.requests if r.status is Status.RUNNING]
        for blocks in held:
            computed = world.requests[0].num_committed
            assert sum(block != NULL_BLOCK for block in blocks[: computed // 4]) <= 3
    world.engine.submit(world.requests[1])
    while world.engine.has_work:
        world.step()
    assert world.requests[1].num_cached == 32


@pytest.mark.parametrize("overlaps", [False, True])
def test_blocks_of_unsound_logits_are_not_kept(overlaps):
    plans = [Plan([3] * 8, 4, fails_at=0), Plan([3] * 8, 1, arrival=3)]
    world = World(plans, 4, 40, 4, 16, has_prefix_cache=True, overlaps=overlaps)
    world.run()
    assert world.requests[1].num_cached == 0


def crowd(**changes):
    """Eight requests of 10 + 12 tokens at once in a cache for two of them."""
    plans = [Plan([i + 1] * 10, 12) for i in range(8)]
    sizes = {"block_size": 4, "num_blocks": 13, "max_num_seqs": 5, "budget": 16}
    return World(plans, **(sizes | changes))


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_crowd_in_a_small_cache_is_preempted_and_answers_the_same(overlaps):
    world = crowd(overlaps=overlaps)
    world.run()
    assert world.scheduler.num_preemptions >= 2


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_long_prompt_is_cut_into_chunks_and_does_not_stall_the_others(overlaps):
    plans = [Plan([1] * 3, 20), Plan([2] * 40, 3, arrival=2)]
    world = World(plans, 4, 40, 4, 8, overlaps=overlaps)
    lengths = []
    step = world.step

    def watched():
        step()
        lengths.append(len(world.requests[0].output_token_ids))

    world.step = watched
    world.run()
    assert world.runner.num_chunks == 5  # of 7 tokens beside one decode step each: 40 = 5 * 7 + 5
    first, end = int(overlaps), lengths.index(max(lengths)) + 1
    assert lengths[first:end] == list(range(1, end + 1 - first)), "a token in every step"


def test_an_urgent_request_goes_first_and_gives_way_last():
    plans = [Plan([1] * 10, 12), Plan([2] * 10, 12), Plan([3] * 10, 12, priority=-1)]
    world = World(plans, 4, 13, 3, 32)
    for request in world.requests:
        world.engine.submit(request)
    world.step()
    assert world.scheduler.running[0] is world.requests[2]
    while world.engine.has_work:
        world.step()
    expected = [decode_alone(plan.prompt, 12) for plan in plans]
    assert [r.output_token_ids for r in world.requests] == expected


def test_a_request_that_needs_its_last_token_is_planned_with_nothing_in_flight():
    world = World([Plan([1, 2], 6, needs_last_token=True), Plan([1, 3], 6)], 4, 40, 4, 16)
    launch = world.runner.launch

    def watched(plan):
        for part in plan.scheduled:
            if part.request is world.requests[0]:
                assert part.request.num_in_flight == 1, "counted with this step"
        return launch(plan)

    world.runner.launch = watched
    world.run()


def put(scheduler, prompt, output, num_computed):
    """A request that runs already, in a state that only a change of policy would bring about."""
    request = Request("", prompt, SamplingParams(), 0, 0, STOP_IDS, 9, status=Status.RUNNING)
    request.arrival = len(scheduler.running)
    request.output_token_ids += output
    request.num_computed, request.row = num_computed, scheduler._free_rows.pop(0)
    request.block_ids = [[]]
    scheduler.cache.grow(request.block_ids, num_computed)
    scheduler.running.append(request)
    return request


def small_scheduler(num_blocks, max_num_seqs, budget):
    return Scheduler(
        CacheManager([GroupBlocks(num_blocks)], 4, budget),
        max_num_seqs,
        StepBudget(budget, is_timed=False),
    )


def test_decode_steps_go_before_an_older_prompt():
    scheduler = small_scheduler(20, 2, 5)
    older, younger = put(scheduler, [1] * 12, [], 4), put(scheduler, [2] * 4, [3], 4)
    rows = scheduler.schedule().scheduled
    assert [(row.request, row.start, row.num_query, row.samples) for row in rows] == [
        (younger, 4, 1, True),
        (older, 4, 4, False),
    ]


def test_a_planned_row_may_still_give_way_to_an_older_prompt():
    scheduler = small_scheduler(4, 2, 16)
    older, younger = put(scheduler, [1] * 12, [], 4), put(scheduler, [2] * 4, [3], 4)
    plan = scheduler.schedule()
    assert [(row.request, row.num_query) for row in plan.scheduled] == [(older, 8)]
    assert {row for row, _ in plan.new_blocks} == {older.row}
    assert list(scheduler.waiting) == [younger]
    assert (younger.num_computed, younger.block_ids, younger.row) == (0, [], -1)


def test_a_row_in_flight_sits_out_a_step_before_it_gives_way():
    scheduler = small_scheduler(4, 2, 16)
    older, younger = put(scheduler, [1] * 12, [], 4), put(scheduler, [2] * 4, [3], 3)
    younger.num_in_flight = 1
    assert scheduler.schedule() is None
    assert younger.status is Status.RUNNING
    younger.num_in_flight = 0
    assert [row.request for row in scheduler.schedule().scheduled] == [older]
    assert younger.status is Status.WAITING


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


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_request_may_be_ended_in_any_state(overlaps):
    world = crowd(overlaps=overlaps)
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
    world.check_ownership()
    for request in world.requests:
        engine.abort(request)
    assert not engine.has_work
    assert world.cache.allocators[0].num_free == world.num_blocks - 1


def test_a_stop_string_in_the_last_token_decides_over_the_length():
    world = World([Plan([3, 4], 1)], 4, 5, 2, 8, overlaps=False)
    request = world.requests[0]
    world.engine.submit(request)
    world.engine.step()
    assert request.finish_reason == "length"
    world.engine.stop(request, "END")
    assert (request.finish_reason, request.stop_reason) == ("stop", "END")
