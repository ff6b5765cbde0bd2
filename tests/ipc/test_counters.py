"""Counters of an engine against sums over what its steps reported."""

import random
from types import SimpleNamespace

import pytest

from tiercel.engine.engine import RequestUpdate
from tiercel.engine.loop import StepResult
from tiercel.ipc.counters import Counters
from tiercel.params import SamplingParams
from tiercel.request.request import Request
from tiercel.request.score_task import ScoreRead, ScoreTask
from tiercel.spec.counts import DraftCounts


def make_engine(has_prefix_cache):
    return SimpleNamespace(
        config=SimpleNamespace(prefix_cache=has_prefix_cache),
        scheduler=SimpleNamespace(cache_usage=0.25),
        draft_counts=DraftCounts(num_drafts=3, num_draft_tokens=11, accepted_per_pos=[4, 1]),
    )


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_totals_are_sums_over_the_steps(has_prefix_cache):
    draw = random.Random(5)
    counters = Counters(make_engine(has_prefix_cache))
    live, told, sums = [], [], dict.fromkeys(("prompt", "new", "queries", "hits", "bad"), 0)
    seconds = preempted = 0
    for step in range(200):
        entered, updates, in_step = [], [], 0
        for _ in range(draw.randrange(3)):
            task = None
            if draw.random() < 0.3:
                task = ScoreTask(((1, 2), (3,)), ((ScoreRead(0, (1,)),),))
            params = SamplingParams(prompt_logprobs=draw.choice((None, None, 0)))
            request = Request(
                f"{step}", [1] * draw.randrange(1, 9), params, 0, 0, frozenset(), 9, score=task
            )
            request.num_cached = draw.randrange(3)
            entered.append(request)
            live.append(request)
            if has_prefix_cache and params.prompt_logprobs is None:
                sums["queries"] += len(request.prompt_token_ids)
                sums["hits"] += request.num_cached
        for request in draw.sample(live, min(len(live), 3)):
            is_first = not request.output_token_ids
            new = () if request.score else tuple(range(draw.randrange(1, 4)))
            if draw.random() < 0.1:
                request.finish_reason, request.stop_reason = "error", "nonfinite_logits"
                sums["bad"] += 1
                new = ()
            elif is_first:
                in_step += len(request.prompt_token_ids) + (3 if request.score else 0)
            request.output_token_ids += new
            in_step += len(new)
            sums["new"] += len(new)
            if request.finish_reason or request.score:
                live.remove(request)
            updates.append(RequestUpdate(request, new))
        told.append(in_step)
        sums["prompt"] += in_step - sum(len(update.new_token_ids) for update in updates)
        result = StepResult(float(step), draw.randrange(1, 9) / 8, tuple(entered),
                            draw.randrange(2), updates)  # fmt: skip
        seconds, preempted = seconds + result.seconds, preempted + result.num_preempted
        counters.add(result)
        if step % 67 == 66:
            stats = counters.take(4, 6)
            assert stats.iteration_tokens == tuple(told), "of the steps since the last message"
            told.clear()
    stats = counters.take(4, 6)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (4, 6, 0.25)
    assert (stats.num_steps, stats.step_seconds, stats.num_preemptions) == (200, seconds, preempted)
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (sums["prompt"], sums["new"])
    assert (stats.prefix_queries, stats.prefix_hits) == (sums["queries"], sums["hits"])
    assert stats.num_nonfinite == sums["bad"] > 0
    assert (stats.num_drafts, stats.num_draft_tokens, stats.accepted_per_pos) == (3, 11, (4, 1))
