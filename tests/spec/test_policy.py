"""When a step verifies: if what it may win is worth what it costs, and now and then to see."""

import random

import pytest

from tiercel.config import MAX_DRAFTS, RETRY_STEPS, num_head_drafts, resolve_spec
from tiercel.errors import ArgumentError
from tiercel.reference import verify_accept as oracle
from tiercel.spec.counts import DraftCounts
from tiercel.spec.policy import TRIAL_SHARE, DraftPolicy, update_acceptance

COSTS = [(1, 0.1), (4, 0.2), (16, 0.5)]


def test_without_costs_any_draft_is_verified():
    policy = DraftPolicy()
    assert not policy.is_worth_verifying([], 5)
    assert policy.is_worth_verifying([(1, 0.01)], 5)


@pytest.mark.parametrize(
    ("drafts", "num_rows", "expected"),
    [
        ([(1, 0.11)], 1, True),
        ([(1, 0.09)], 1, False),
        ([(3, 0.09)], 1, False),  # 0.09 + 0.0081 + 0.0007
        ([(4, 0.5)], 4, True),  # 0.94 tokens for 4 * 0.2
        ([(2, 0.5)], 4, False),
        ([(2, 0.5)], 3, True),  # in the same bucket, for 3 * 0.2
        ([(5, 0.9)] * 8, 16, True),
        ([(5, 0.9)], 16, False),
        ([(5, 0.99)] * 17, 17, False),  # larger steps do not verify
    ],
)
def test_what_is_won_is_held_against_the_cost(drafts, num_rows, expected):
    assert DraftPolicy(COSTS).is_worth_verifying(drafts, num_rows) is expected


def test_what_does_not_pay_is_tried_now_and_then():
    policy = DraftPolicy(COSTS)
    tried = [policy.is_worth_verifying([(1, 0.01)], 1) for _ in range(4 * RETRY_STEPS)]
    assert [i for i, is_tried in enumerate(tried) if is_tried] == [
        RETRY_STEPS * k - 1 for k in (1, 2, 3, 4)
    ]
    assert not any(policy.is_worth_verifying([(5, 0.99)] * 17, 17) for _ in range(3 * RETRY_STEPS))
    slow = DraftPolicy([(1, 100 * RETRY_STEPS * TRIAL_SHARE)])
    assert not any(slow.is_worth_verifying([(1, 0.01)], 1) for _ in range(100 * RETRY_STEPS - 1))
    assert slow.is_worth_verifying([(1, 0.01)], 1)


def test_new_rows_are_tried_at_once_after_steps_that_paid():
    policy = DraftPolicy(COSTS)
    assert all(policy.is_worth_verifying([(5, 0.9)], 1) for _ in range(RETRY_STEPS))
    assert [policy.is_worth_verifying([(1, 0.01)], 1) for _ in range(RETRY_STEPS)] == [
        True,
        *[False] * (RETRY_STEPS - 1),
    ]


def test_every_decision_is_that_of_the_rule():
    """What is won beyond a token a row, against its cost; a trial rests as long as it costs."""
    draw, seen = random.Random(0), {True: 0, False: 0}
    for _ in range(60):
        costs = [(size, draw.choice((0.0, 0.1, 0.3, 1.0, 5.0))) for size in (1, 3, 8)]
        costs = costs[: draw.randrange(4)]
        policy, rest = DraftPolicy(costs), 0
        for _ in range(150):
            num_rows = draw.randrange(1, 11)
            count = draw.randrange(num_rows + 1)
            chances = (0.0, 0.01, 0.3, 0.5, 0.9)
            drafts = [(draw.randrange(1, 5), draw.choice(chances)) for _ in range(count)]
            rest += 1
            gain = sum(chance**j for most, chance in drafts for j in range(1, most + 1))
            large = [cost for size, cost in costs if size >= num_rows]
            if not drafts or (costs and not large):
                expected = False
            else:
                cost = large[0] if costs else 0.0
                expected = gain > cost * num_rows
                if not expected and rest >= max(RETRY_STEPS, cost / TRIAL_SHARE):
                    expected, rest = True, 0
            assert policy.is_worth_verifying(drafts, num_rows) is expected
            seen[expected] += 1
    assert min(seen.values()) > 500


def test_counts_are_sums_over_steps():
    draw = random.Random(1)
    for _ in range(30):
        counts, steps = DraftCounts(), []
        for _ in range(draw.randrange(20)):
            num_drafts = draw.choice((0, 0, 1, 2, 5))
            steps.append((num_drafts, draw.randrange(num_drafts + 1), draw.randrange(3)))
            counts.add(*steps[-1])
        verified = [step for step in steps if step[0]]
        assert counts.num_steps == len(steps)
        assert counts.num_drafts == len(verified)
        assert counts.num_draft_tokens == sum(step[0] for step in steps)
        assert counts.num_accepted_tokens == sum(step[1] for step in steps)
        assert counts.num_trimmed_tokens == sum(step[2] for step in steps)
        most = max((step[0] for step in steps), default=0)
        right = [sum(step[1] > place for step in steps) for place in range(most)]
        assert counts.accepted_per_pos == right


@pytest.mark.parametrize(("num_drafts", "num_right"), [(1, 0), (1, 1), (5, 2), (5, 5), (3, 0)])
def test_host_and_device_learn_the_same(num_drafts, num_right):
    expected = oracle.learned(0.6, num_drafts, num_right)
    assert update_acceptance(0.6, num_drafts, num_right) == pytest.approx(expected)


def test_options():
    assert resolve_spec("off", 7).method == "off"
    assert resolve_spec("ngram", 0).method == "off"
    assert resolve_spec("ngram", None).max_drafts == 5
    assert resolve_spec("hybrid", MAX_DRAFTS).max_drafts == MAX_DRAFTS
    assert [num_head_drafts(resolve_spec(m, 4)) for m in ("ngram", "mtp", "hybrid")] == [0, 4, 1]


@pytest.mark.parametrize(
    ("method", "count"), [("x", 1), (None, 1), ("ngram", True), ("ngram", 1.5), ("ngram", 16)]
)
def test_wrong_options(method, count):
    with pytest.raises(ArgumentError, match=r"spec=|num_spec_tokens="):
        resolve_spec(method, count)
