"""All stages of the sampler together, in their documented order, against one formula in float64.

Bans, penalties and biases act on the logits; then the temperature, top-k, top-p and min-p cut.
"""

import itertools
import math
import random
from collections import Counter

import pytest
import torch

from tests.runner.test_sampler import make_request
from tiercel.params import SamplingParams
from tiercel.runner.row_state import Rows
from tiercel.runner.sampler import Sampler

VOCAB = 23
PADDING = 22
STOPS = frozenset({3, 8})
WORDS = {"ab": [[1, 2], [7]]}
TOLERANCE = 2e-6  # a few roundings of float32 in logits of up to 20


def is_banned(token_id, params, output):
    if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
        return True
    if token_id in STOPS and len(output) < params.min_tokens:
        return True
    for word in (word for name in params.bad_words for word in WORDS[name]):
        *start, last = word
        if token_id == last and [*output][len(output) - len(start) :] == start:
            return True
    return token_id == PADDING or params.logit_bias.get(token_id) == -100


def edited(value, token_id, params, prompt, output):
    """A logit after penalties and biases."""
    count = Counter(output)[token_id]
    if count or token_id in prompt:
        is_positive, penalty = value > 0, params.repetition_penalty
        value = value / penalty if is_positive else value * penalty
    if count:
        value -= params.presence_penalty + params.frequency_penalty * count
    return value + params.logit_bias.get(token_id, 0.0)


def cut(values, params):
    """The token ids that are left; None where it is too close to call."""
    order = sorted(values, key=lambda i: (-values[i], i))
    gaps = [values[a] - values[b] for a, b in itertools.pairwise(order)]
    if 0 < params.top_k < len(order):
        if gaps[params.top_k - 1] < 1e-4:
            return None
        order = order[: params.top_k]
    weights = [math.exp((values[i] - values[order[0]]) / params.temperature) for i in order]
    before, kept = 0.0, []
    for i, weight in zip(order, weights, strict=True):
        if min(abs(before - params.top_p), abs(weight - params.min_p) or 1.0) < 1e-4:
            return None
        if (before < params.top_p or params.top_p == 1.0) and weight >= params.min_p:
            kept.append(i)
        before += weight / sum(weights)
    return kept


def final_logits(logits, params, prompt, output):
    """By token id, of those that may be chosen; None where a cut is too close to call."""
    values = {
        i: edited(value, i, params, prompt, output)
        for i, value in enumerate(logits)
        if not is_banned(i, params, output)
    }
    kept = values if params.is_greedy or not values else cut(values, params)
    return None if kept is None else {i: values[i] for i in kept}


def some_params(draw):
    choice = draw.choice
    bias = {i: choice((-100, -99.5, -3.0, 2.5)) for i in draw.sample(range(VOCAB - 1), 4)}
    return SamplingParams(
        temperature=choice((0.0, 0.3, 1.0, 1.9)),
        top_k=choice((0, -1, 1, 2, 5, VOCAB, 99)),
        top_p=choice((1.0, 0.3, 0.7, 0.95)),
        min_p=choice((0.0, 0.0, 0.02, 0.3, 1.0)),
        presence_penalty=choice((0.0, 1.2, -0.7)),
        frequency_penalty=choice((0.0, 0.6, -0.4)),
        repetition_penalty=choice((1.0, 1.7, 0.6)),
        logit_bias=choice(({}, bias)),
        bad_words=choice(((), ("ab",))),
        min_tokens=choice((0, 0, 2, 4)),
        allowed_token_ids=choice((None, None, draw.sample(range(VOCAB), 12))),
    )


@pytest.mark.parametrize("seed", range(12))
def test_what_may_be_chosen_and_how_likely_it_is(seed):
    """Rows of every mixture of options, in engine rows of any order."""
    draw, count = random.Random(seed), 25
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(count, VOCAB, generator=generator)
    requests = []
    for row in draw.sample(range(count), count):
        output = [draw.randrange(8) for _ in range(draw.randrange(6))]
        prompt = [draw.randrange(VOCAB - 1) for _ in range(3)]
        request = make_request(
            some_params(draw), prompt=prompt, output=output, seed=row, stop_ids=STOPS
        )
        request.row, request.num_ahead = row, 1
        requests.append(request)
    rows = Rows(count, 20, 1, 1, torch.device("cpu"))
    sampler = Sampler((PADDING,), VOCAB, rows, WORDS.__getitem__)
    for request in requests:
        rows.stage(rows.num_tokens, (request.row,), [request.num_tokens])
        sampler.enter(request)
    rows.apply()
    processed = logits.clone()
    lines = torch.tensor([request.row for request in requests], dtype=torch.int32)
    out = sampler(processed, requests, lines)
    num_checked = 0
    for i, request in enumerate(requests):
        prompt, output = request.prompt_token_ids, request.output_token_ids
        expected = final_logits(logits[i].tolist(), request.params, prompt, output)
        if expected is None:
            continue
        num_checked += 1
        token_id, problem = out.token_ids[i].item(), out.problems[i].item()
        is_chosen = problem == 0
        assert is_chosen == bool(expected), (request.params, output)
        assert not is_chosen or token_id in expected, request.params
        allowed = {
            k for k in range(VOCAB - 1) if processed[i, k] > -math.inf
        }  # the draw leaves padding out by itself
        assert allowed == set(expected), request.params
        for k, value in expected.items():
            assert processed[i, k].item() == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE)
        if request.params.is_greedy and expected:
            assert expected[token_id] == pytest.approx(max(expected.values()), abs=TOLERANCE)
    assert num_checked > count // 3
