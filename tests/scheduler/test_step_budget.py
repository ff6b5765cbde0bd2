"""Steps bounded in time, on simulated machines: no clock, no sleep."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.scheduler import step_budget
from tiercel.scheduler.step_budget import (
    ALONE_S,
    BESIDE_ANSWERS_S,
    CHUNK_TOKENS,
    FIRST_TOKENS,
    MOST_FIXED,
    MOST_GROWTH,
    Chunk,
    Rates,
    StepBudget,
)

MOST = 2048  # tokens of a step


@dataclass
class Machine:
    """Computes steps in so many seconds, some of them noise; `slowness` may change at any time."""

    fixed_s: float
    token_s: float
    pair_s: float
    noise: float = 0.0
    slowness: float = 1.0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def seconds(self, chunks):
        sums = sum(
            self.token_s * n + self.pair_s * sum(range(start + 1, start + n + 1))
            for start, n in chunks
        )
        return (self.fixed_s + sums) * self.slowness * math.exp(self.random.gauss(0, self.noise))


def warmed_up(machine, budget=None):
    """A budget that has seen what the warm-up runs."""
    budget = budget or StepBudget(MOST, is_timed=True)
    for length in (1, 1, 1, 1, 40, 1, 1, 1, 100, 1, 1, 1):
        chunks = [Chunk(0, length)] if length > 1 else []
        budget.learn(chunks, machine.seconds(chunks))
    return budget


def read_prompt(machine, budget, length, *, start=0, has_answers=True, after=lambda _: None):
    """Compute a prompt chunk by chunk: tokens and seconds of each step."""
    steps = []
    while start < length:
        count = min(length - start, budget.open(has_answers=has_answers).for_chunk(start))
        assert count > 0, "a step without progress"
        assert count <= budget.max_tokens
        chunks = [Chunk(start, count)]
        steps.append((count, machine.seconds(chunks)))
        budget.learn(chunks, steps[-1][1])
        start += count
        after(start)
    return steps


def power_of_ten(exponent):
    return 10.0**exponent


machines = st.builds(
    Machine,
    fixed_s=st.floats(-4, -1).map(power_of_ten),
    token_s=st.floats(-5, -2.4).map(power_of_ten),
    pair_s=st.floats(-9, -6).map(power_of_ten),
    noise=st.floats(0, 0.2),
    random=st.integers(0, 999).map(random.Random),
)


def assert_near(steps, bound_s, machine):
    """From the eighth step on; before, the sizes grow."""
    settled = steps[8:-1]
    smallest = [seconds for tokens, seconds in settled if tokens == CHUNK_TOKENS]
    bounded = [seconds for tokens, seconds in settled if CHUNK_TOKENS < tokens < MOST]
    if len(smallest) + len(bounded) < len(settled):
        return  # a machine so fast that the tokens bound its steps
    if bounded:
        # Noise of 20% passes a factor of two once in some thousand steps.
        assert max(bounded) < bound_s * (1.35 if machine.noise < 0.02 else 2.2)
    if len(bounded) > 10:
        assert mean(bounded) < 1.1 * bound_s
    if len(bounded) > 20 and not smallest and min(n for n, _ in settled) > 4 * CHUNK_TOKENS:
        assert mean(bounded) > 0.5 * bound_s


@settings(max_examples=80, deadline=None)
@given(machine=machines, has_answers=st.booleans())
def test_steps_keep_their_time_on_any_machine(machine, has_answers):
    steps = read_prompt(machine, warmed_up(machine), 6000, has_answers=has_answers)
    assert_near(steps, BESIDE_ANSWERS_S if has_answers else ALONE_S, machine)


@settings(max_examples=60, deadline=None)
@given(machine=machines, place=st.integers(0, 5000))
def test_a_machine_that_becomes_five_times_slower_exceeds_the_bound_for_few_steps(machine, place):
    budget, left = warmed_up(machine), []

    def after(start):
        if start > place:
            machine.slowness = 5.0
            left.append(len(left))

    steps = read_prompt(machine, budget, 6000, after=after)
    slow = steps[len(steps) - len(left) + 1 :]  # the first step that was slow is the second of them
    bound_s = max(BESIDE_ANSWERS_S, MOST_FIXED * 5 * machine.fixed_s)
    factor = 2.0 * math.exp(3 * machine.noise)
    for tokens, seconds in slow[3:]:
        assert tokens == CHUNK_TOKENS or seconds < factor * bound_s
    # And the other way: it may grow again.
    machine.slowness = 1.0
    read_prompt(machine, budget, 3000)
    assert_near(read_prompt(machine, budget, 6000), BESIDE_ANSWERS_S, machine)


@settings(max_examples=60, deadline=None)
@given(machine=machines)
def test_sizes_do_not_oscillate(machine):
    """Without noise they grow to their level and then shrink slowly with depth."""
    machine.noise = 0.0
    sizes = [count for count, _ in read_prompt(machine, warmed_up(machine), 12000)][:-1]
    settled = sizes[10:]
    turns = [b - a for a, b in itertools.pairwise(settled) if abs(b - a) > CHUNK_TOKENS]
    assert sum(a * b < 0 for a, b in itertools.pairwise(turns)) <= 1


def test_late_chunks_of_a_long_prompt_are_smaller():
    machine = Machine(0.005, 2e-4, 2e-7)
    steps = read_prompt(machine, warmed_up(machine), 6000)
    sizes = [count for count, _ in steps]
    assert max(sizes) > 3 * sizes[-2]
    assert median(seconds for _, seconds in steps[5:-1]) == pytest.approx(0.25, rel=0.2)


def test_a_prompt_that_is_found_in_the_cache_begins_deep():
    """What steps at all depths have taught holds for a first chunk after 5,000 cached tokens."""
    machine = Machine(0.005, 2e-4, 2e-7)
    budget = warmed_up(machine)
    read_prompt(machine, budget, 6000)
    (_, shallow), (deep_tokens, deep), *_ = (
        *read_prompt(machine, budget, 200), *read_prompt(machine, budget, 6000, start=5000)
    )  # fmt: skip
    assert deep_tokens < 300
    assert shallow < 0.3
    assert deep < 0.3


def test_on_a_slow_machine_half_of_a_step_goes_to_prompts():
    """Where an answer's token alone takes 0.5 s, a bound of 0.25 s would leave prompts nothing."""
    machine = Machine(0.5, 5e-3, 1e-8)
    steps = read_prompt(machine, warmed_up(machine), 1500)
    assert mean(seconds for _, seconds in steps[8:-1]) == pytest.approx(1.0, rel=0.15)
    assert min(count for count, _ in steps[8:-1]) >= 80


def test_the_first_chunks_are_small_while_nothing_is_known():
    budget = StepBudget(MOST, is_timed=True)
    sizes = []
    for _ in range(6):
        sizes.append(budget.open(has_answers=True).for_chunk(0))
        budget.learn([Chunk(0, sizes[-1])], 1e-6)
    assert sizes == [FIRST_TOKENS * MOST_GROWTH**i for i in range(6)]


def test_one_long_pause_is_no_new_speed():
    """A laptop that slept for an hour within a step goes on with small steps for a while only."""
    machine = Machine(0.005, 2e-4, 1e-9)
    budget = warmed_up(machine)
    before = read_prompt(machine, budget, 6000)[-2][0]
    budget.learn([Chunk(0, before)], 3600.0)
    assert before / 20 < budget.open(has_answers=True).for_chunk(0) < before / 4
    assert read_prompt(machine, budget, 12000)[-2][0] > 0.8 * before


def test_a_step_is_shared_by_all_its_chunks():
    budget = warmed_up(Machine(0.0, 1e-3, 1e-12))
    read_prompt(Machine(0.0, 1e-3, 1e-12), budget, 3000)
    room = budget.open(has_answers=True)
    whole = room.for_chunk(0)
    room.num_tokens -= 1
    assert (room.for_chunk(0), room.num_tokens) == (whole, MOST - 1)
    room.take_chunk(Chunk(0, 100))
    assert abs(room.for_chunk(0) - (whole - 100)) <= CHUNK_TOKENS
    room.take_chunk(Chunk(0, room.for_chunk(0)))
    assert room.for_chunk(0) == 0
    assert room.num_tokens > 0


def test_a_large_item_has_a_step_for_itself():
    budget = warmed_up(Machine(0.0, 1e-2, 1e-12))
    room = budget.open(has_answers=True)
    assert room.for_chunk(10) < 200
    assert room.has_room_for(200, 10)
    assert not room.has_room_for(MOST + 1, 10)
    room.take_chunk(Chunk(0, CHUNK_TOKENS))
    assert not room.has_room_for(200, 10)


def test_tokens_alone_bound_a_step_without_time():
    budget = StepBudget(100, is_timed=False)
    for _ in range(3):
        room = budget.open(has_answers=True)
        assert room.for_chunk(5000) == 100
        room.take_chunk(Chunk(0, 37))
        assert room.for_chunk(5000) == 63
        assert room.has_room_for(63, 0)
        assert not room.has_room_for(64, 0)
        budget.learn([Chunk(0, 100)], 100.0)


@given(
    token_s=st.floats(1e-7, 1e-1), pair_s=st.floats(0, 1e-4),
    seconds=st.floats(0, 10), start=st.integers(0, 10**6),
)  # fmt: skip
def test_tokens_within_is_the_inverse_of_seconds(token_s, pair_s, seconds, start):
    rates = Rates(token_s, pair_s)
    count = rates.tokens_within(seconds, start)
    assert rates.seconds(Chunk(start, count)) <= seconds * (1 + 1e-9)
    assert rates.seconds(Chunk(start, count + 1)) >= seconds * (1 - 1e-9)


def test_pairs_are_keys_that_tokens_attend_to():
    assert Chunk(3, 4).num_pairs == 4 + 5 + 6 + 7
    assert step_budget.FIRST_PAIRS_PER_TOKEN > 0
