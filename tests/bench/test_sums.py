"""Figures of a measurement over random samples, compared with plain sums; floors with a loop."""

import random
import statistics

import pytest

from tiercel.bench.completions import Sample
from tiercel.bench.drafts import DraftFigures
from tiercel.bench.floor import ModelCost, floor_seconds
from tiercel.bench.speed import Trial
from tiercel.bench.statistics import Bounds, spread, summarise
from tiercel.profiling.device_timing import Ceilings


def percentile(values, share):
    """The percentile between the two nearest values, as the docstring says."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def check_spread(found, values):
    if not values:
        assert found is None
        return
    assert found.mean == pytest.approx(statistics.fmean(values))
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert getattr(found, name) == pytest.approx(percentile(values, share))


def random_sample(rng, index):
    count = rng.randint(0, 6)
    pieces = sorted(rng.uniform(0.01, 2) for _ in range(count))
    first = pieces[0] if pieces else rng.choice([None, rng.uniform(0.01, 1)])
    return Sample(
        index,
        start_s=rng.uniform(0, 3),
        output_len=rng.randint(1, 8),
        due_s=rng.choice([None, rng.uniform(-1, 3)]),
        first_s=first,
        latency_s=None if first is None else max([first, *pieces]) + rng.choice([0, 0.3]),
        piece_s=pieces,
        prompt_tokens=rng.randint(1, 50),
        completion_tokens=rng.randint(0, 8),
        cached_tokens=rng.randint(0, 20),
        error=rng.choice([None, None, None, "timeout", "http_429"]),
    )


@pytest.mark.parametrize("seed", range(25))
def test_a_summary_is_what_its_samples_add_up_to(seed):
    rng = random.Random(seed)
    samples = [random_sample(rng, index) for index in range(rng.randint(1, 30))]
    bounds = Bounds(first_token_ms=rng.choice([None, 700]), inter_token_ms=rng.choice([None, 150]),
                    latency_ms=rng.choice([None, 1500]))  # fmt: skip
    duration = rng.uniform(1, 9)
    drafts = rng.choice([None, DraftFigures(3, 9, [2, 1]), DraftFigures(0, 0, [])])
    found = summarise(
        samples, duration, bounds=bounds, unfinished=2, client_s=duration / 4, drafts=drafts
    )
    ok = [sample for sample in samples if sample.error is None]
    per_token, num_good = [], 0
    for sample in ok:
        rate = None
        if sample.completion_tokens > 1 and sample.first_s is not None and len(sample.piece_s) != 1:
            rate = (sample.latency_s - sample.first_s) / (sample.completion_tokens - 1)
            per_token.append(rate)
        kept = [(bounds.first_token_ms, sample.first_s), (bounds.inter_token_ms, rate),
                (bounds.latency_ms, sample.latency_s)]  # fmt: skip
        num_good += all(b is None or s is None or s * 1000 <= b for b, s in kept)
    assert (found.requests, found.ok, found.unfinished) == (len(samples), len(ok), 2)
    assert sum(found.errors.values()) == len(samples) - len(ok)
    assert found.prompt_tokens == sum(s.prompt_tokens for s in ok)
    assert found.completion_tokens == sum(s.completion_tokens for s in ok)
    assert found.cached_tokens == sum(s.cached_tokens for s in ok)
    assert found.short == len([s for s in ok if s.completion_tokens < s.output_len])
    assert found.request_rate == pytest.approx(len(ok) / duration)
    assert found.completion_rate == pytest.approx(found.completion_tokens / duration)
    both = found.prompt_tokens + found.completion_tokens
    assert found.total_rate == pytest.approx(both / duration)
    assert found.client_load == pytest.approx(0.25)
    is_bounded = any(value is not None for value in
                     (bounds.first_token_ms, bounds.inter_token_ms, bounds.latency_ms))  # fmt: skip
    assert found.goodput == (pytest.approx(num_good / duration) if is_bounded else None)
    check_spread(found.first_token, [s.first_s for s in ok if s.first_s is not None])
    check_spread(found.latency, [s.latency_s for s in ok if s.latency_s is not None])
    check_spread(found.inter_token, per_token)
    check_spread(
        found.gap, [b - a for s in ok for a, b in zip(s.piece_s, s.piece_s[1:], strict=False)]
    )
    check_spread(found.late, [s.start_s - s.due_s for s in samples if s.due_s is not None])
    assert found.drafts == (drafts if drafts and drafts.num_draft_tokens else None)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 11, 100, 101])
def test_percentiles_of_every_length(count):
    rng = random.Random(count)
    values = [rng.uniform(0, 9) for _ in range(count)]
    check_spread(spread([*values, None]), values)


def least_seconds(cost, ceilings, batch, prompt_tokens, steps):
    """The floor, computed over every token of every step."""
    num_bytes = flops = 0
    for step in range(steps or 1):
        num_bytes += cost.weight_bytes
        for _ in range(batch):
            first = prompt_tokens + step if steps else 0
            last = first + 1 if steps else prompt_tokens
            for position in range(first, last):
                flops += 2 * cost.layer_weights
                for window, layers in cost.windows.items():
                    keys = position + 1 if not window else min(window, position + 1)
                    flops += 4 * keys * layers * cost.attention_width
                    num_bytes += keys * layers * cost.key_bytes if steps else 0
            flops += 2 * cost.head_weights
    return max(num_bytes / (ceilings.read_gbps * 1e9), flops / (ceilings.tflops * 1e12))


@pytest.mark.parametrize("seed", range(20))
def test_floors_equal_a_walk_over_all_tokens(seed):
    rng = random.Random(seed)
    cost = ModelCost(
        weight_bytes=rng.randint(1, 999), layer_weights=rng.randint(1, 99),
        head_weights=rng.randint(1, 99), key_bytes=rng.randint(1, 9),
        attention_width=rng.randint(1, 9), windows={0: rng.randint(1, 3), 3: rng.randint(0, 3)},
    )  # fmt: skip
    for prompt_tokens, steps in ((1, 0), (7, 0), (0, 4), (5, 1), (6, 9)):
        for batch in (1, 3):
            for ceilings in (Ceilings(1e-6, 1e9), Ceilings(1e9, 1e-9)):
                shape = (batch, prompt_tokens, steps)
                expected = least_seconds(cost, ceilings, *shape)
                assert floor_seconds(cost, ceilings, *shape) == pytest.approx(expected), shape


@pytest.mark.parametrize("seed", range(10))
def test_drafts_of_a_level_are_the_difference_of_its_ends(seed):
    rng = random.Random(seed)
    first = [rng.randint(0, 9) for _ in range(rng.randint(0, 4))]
    more = [rng.randint(0, 9) for _ in range(rng.randint(len(first), 5))]
    both = [a + (first[i] if i < len(first) else 0) for i, a in enumerate(more)]
    before, after = DraftFigures(4, 11, first), DraftFigures(9, 31, both)
    added = after.since(before)
    assert added == DraftFigures(5, 20, more)
    assert added.acceptance == pytest.approx(sum(more) / 20)
    assert added.place_rates() == [pytest.approx(count / 5) for count in more]


@pytest.mark.parametrize(
    ("shape", "num_tokens", "context", "name"),
    [
        ((1, 40, 0), 40, 40, "pp40"),
        ((3, 40, 0), 120, 40, "pp40"),
        ((1, 0, 6), 6, 7, "tg6 @ d0"),
        ((1, 1, 6), 6, 7, "tg6 @ d1"),
        ((3, 20, 5), 15, 25, "tg5 @ d20 b3"),
    ],
)
def test_tokens_of_a_trial(shape, num_tokens, context, name):
    """Of all sequences: the tokens of the prompt, or of the steps only."""
    trial = Trial(*shape)
    assert (trial.num_tokens, trial.context, trial.name) == (num_tokens, context, name)
