"""Draws follow their distribution, and rows stay apart."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runner.test_sampler import make_request, sample
from tiercel.params import SamplingParams

NUM_DRAWS = 16_000
LIMIT = 42.0  # chi-square of 7 degrees of freedom: passed once in 2,000,000 seeds


def chi_square(token_ids, probs):
    """Of counts against probabilities; infinite where something impossible was drawn."""
    counts = Counter(token_ids)
    total = 0.0
    for token_id, prob in enumerate(probs):
        expected = prob * len(token_ids)
        if expected == 0.0:
            if counts[token_id]:
                return math.inf
        else:
            total += (counts[token_id] - expected) ** 2 / expected
    return total


def softmax(logits, temperature=1.0):
    weights = [math.exp(value / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


def restricted(probs, ids):
    total = sum(probs[i] for i in ids)
    return [prob / total if i in ids else 0.0 for i, prob in enumerate(probs)]


LOGITS = [0.3, -1.0, 1.2, 0.3, -2.5, 0.9, 0.0, -0.4]  # order: 2 5 0 3 6 7 1 4


CASES = [
    ({}, softmax(LOGITS)),
    ({"temperature": 0.6}, softmax(LOGITS, 0.6)),
    ({"temperature": 2.0}, softmax(LOGITS, 2.0)),
    ({"top_k": 3}, restricted(softmax(LOGITS), {2, 5, 0})),
    ({"top_p": 0.6}, restricted(softmax(LOGITS), {2, 5, 0})),
    ({"min_p": 0.4}, restricted(softmax(LOGITS), {2, 5, 0, 3})),
    (
        {"temperature": 0.5, "top_k": 4, "top_p": 0.9},
        restricted(softmax(LOGITS, 0.5), {2, 5, 0}),
    ),
]


def check_draws(requests, expected, temperature):
    """The counts fit what is expected, and do not fit a temperature a quarter higher."""
    token_ids = sample([LOGITS] * len(requests), requests).token_ids
    assert chi_square(token_ids, expected) < LIMIT
    allowed = {i for i, prob in enumerate(expected) if prob}
    wrong = restricted(softmax(LOGITS, 1.25 * temperature), allowed)
    assert chi_square(token_ids, wrong) > LIMIT, "it can tell them apart"


# By default without and with all of it, a temperature and a bound: `test_sampler.py` has each cut.
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param(*case, id=str(case[0]), marks=[pytest.mark.slow] * (number in (2, 4, 5)))
        for number, case in enumerate(CASES)
    ],
)
def test_draws_follow_the_distribution(fields, expected):
    params = SamplingParams(**fields)
    requests = [make_request(params, seed=i // 16, stream=i % 16) for i in range(NUM_DRAWS)]
    check_draws(requests, expected, params.temperature)


def test_draws_of_one_seed_along_an_answer_follow_the_distribution():
    prompts = [[1] * num_tokens for num_tokens in range(1, 201)]
    params = SamplingParams()
    requests = [
        make_request(params, prompt=prompts[i % 200], seed=-(i // 200)) for i in range(NUM_DRAWS)
    ]
    check_draws(requests, softmax(LOGITS), 1.0)


def test_successive_draws_of_a_request_are_independent():
    params = SamplingParams()
    pairs = []
    for seed in range(4_000):
        first, second = (make_request(params, prompt=[1] * n, seed=seed) for n in (1, 2))
        pairs += [first, second]
    token_ids = sample([[0.0] * 4] * len(pairs), pairs).token_ids
    joint = [4 * a + b for a, b in zip(token_ids[::2], token_ids[1::2], strict=True)]
    assert chi_square(joint, [1 / 16] * 16) < 60.0  # 15 degrees: once in 4,000,000


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(8)), count=st.integers(1, 8))
def test_a_row_does_not_depend_on_its_neighbours_or_its_place(order, count):
    generator = torch.Generator().manual_seed(5)
    logits = (2 * torch.randn(8, 300, generator=generator)).tolist()
    fields = [
        {},
        {"temperature": 0},
        {"top_p": 0.3},
        {"top_k": 5, "temperature": 1.7},
        {"min_p": 0.05},
        {"presence_penalty": 1.5, "logit_bias": {3: 5.0}},
        {"repetition_penalty": 1.2, "top_p": 0.95, "top_k": 50, "min_p": 0.01},
        {"allowed_token_ids": [9, 8, 7], "logprobs": 2},
    ]
    requests = [
        make_request(SamplingParams(**f), seed=i, output=[i, i, 3]) for i, f in enumerate(fields)
    ]
    alone = [sample([logits[i]], [requests[i]]) for i in range(8)]
    picked = list(order)[:count]
    together = sample([logits[i] for i in picked], [requests[i] for i in picked])
    assert together.token_ids == [alone[i].token_ids[0] for i in picked]
    assert together.logprobs == [alone[i].logprobs[0] for i in picked]


def test_answers_of_one_prompt_differ_and_repeat():
    params = SamplingParams(seed=5)
    requests = [make_request(params, seed=5, stream=i) for i in range(16)]
    first = sample([[0.0] * 1000] * 16, requests).token_ids
    assert sample([[0.0] * 1000] * 16, requests).token_ids == first
    assert len(set(first)) > 12
