"""Which requests run as items after a shared start, and what becomes of them."""

import random
from dataclasses import replace

import pytest
import torch

from tests.serve.fake_client import fake_info, fake_tokenizer
from tiercel.params import SamplingParams
from tiercel.request.inputs import InputProcessor
from tiercel.request.prompt_families import MIN_SHARED_TOKENS, find_families
from tiercel.request.request import Request, TokenLogprobs
from tiercel.request.score_task import ScoreTask
from tiercel.request.shared_start import find_shared_starts
from tiercel.runner.sampler_output import TopLogprobs
from tiercel.runner.score_readback import ItemTokensReadback
from tiercel.seeds import mix_key

START = list(range(40))
ONE = SamplingParams(max_tokens=1, temperature=0, seed=9)
INFO = fake_info()
INPUTS = InputProcessor(
    fake_tokenizer(), vocab_size=INFO.vocab_size, max_position=512, max_model_len=512, seed=0
)


def requests_for(prompts, params=ONE):
    return [INPUTS.request(prompt, params, 0) for prompt in prompts]


def families(prompts, *, longest_item=100, params=ONE):
    """Of each shared start: its length and the numbers of its members."""
    requests = requests_for(prompts, params)
    found = find_shared_starts(INPUTS, requests, longest_item=longest_item)
    for shared in found:
        task, start = shared.carrier.score, shared.carrier.prompt_token_ids
        for member, item in zip(shared.members, task.items, strict=True):
            assert member.prompt_token_ids == [*start, *item]
    return sorted(
        (len(shared.carrier.prompt_token_ids), [requests.index(m) for m in shared.members])
        for shared in found
    )


def test_a_start_leaves_each_prompt_a_token():
    assert families([[*START, 5, 6], [*START, 7]]) == [(40, [0, 1])]
    assert families([START, [*START, 7]]) == [(39, [0, 1])]
    assert families([START] * 3) == [(39, [0, 1, 2])]


def test_a_short_start_is_not_worth_sharing():
    long, short = START[:MIN_SHARED_TOKENS], START[: MIN_SHARED_TOKENS - 1]
    assert families([[*long, 100], [*long, 101]]) == [(len(long), [0, 1])]
    assert families([[*short, 100], [*short, 101]]) == []
    assert families([START]) == families([]) == []


def test_families_have_starts_of_their_own():
    prompts = [[*START[:20], *[100 + n % 2] * 50, n] for n in range(6)]
    assert families(prompts) == [(70, [0, 2, 4]), (70, [1, 3, 5])]
    assert families([*prompts, [9, 9]]) == [(70, [0, 2, 4]), (70, [1, 3, 5])]
    # Documents that begin with the same word are no families.
    prompts = [[*START, 100 + n % 2, n, n + 1, n + 2] for n in range(6)]
    assert families(prompts) == [(40, [0, 1, 2, 3, 4, 5])]


def test_families_below_a_start_that_is_hardly_longer():
    """Queries that begin with the same word: the gain is two levels down."""
    queries = [[100, *[110 + query] * 60] for query in range(4)]
    prompts = [[*START[:20], *queries[n % 4], n] for n in range(12)]
    assert families(prompts) == [(81, [n, n + 4, n + 8]) for n in range(4)]


def test_families_of_random_lists_hold_what_they_say():
    rng = random.Random(0)
    for _ in range(200):
        prompts = [[rng.randrange(2)] * rng.randrange(1, 4) for _ in range(rng.randrange(12))]
        for _ in range(3):
            prompts = [p + [rng.randrange(2)] * rng.randrange(20) for p in prompts]
        seen = []
        for family in find_families(prompts):
            members = [prompts[n] for n in family.numbers]
            assert len(members) > 1
            assert min(map(len, members)) > family.num_shared >= MIN_SHARED_TOKENS
            assert len({tuple(member[: family.num_shared]) for member in members}) == 1
            assert list(family.numbers) == sorted(family.numbers)
            seen += family.numbers
        assert len(seen) == len(set(seen)), "a prompt is in two families"
        # What is in no family shares less than a start with every other such prompt.
        alone = [p for n, p in enumerate(prompts) if n not in seen]
        starts = [tuple(p[:MIN_SHARED_TOKENS]) for p in alone if len(p) > MIN_SHARED_TOKENS]
        assert len(starts) == len(set(starts))


def test_every_prompt_longer_by_one():
    assert families([[*START, *[5] * n] for n in range(30)]) == [(39, list(range(30)))]


def test_an_item_longer_than_a_step_runs_alone():
    prompts = [[*START, 1], [*START, *[2] * 9], [*START, 3]]
    assert families(prompts, longest_item=9) == [(40, [0, 1, 2])]
    assert families(prompts, longest_item=8) == [(40, [0, 2])]
    assert families(prompts[:2], longest_item=8) == []


NOT_SHARED = [
    {"max_tokens": 2},
    {"prompt_logprobs": 0},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.1},
    {"logit_bias": {5: 1.0}},
    {"bad_words": ["a"]},
    {"allowed_token_ids": [5, 6]},
    {"min_tokens": 1},
]


@pytest.mark.parametrize("fields", NOT_SHARED, ids=lambda fields: next(iter(fields)))
def test_what_an_item_cannot_do(fields):
    assert families([[*START, 1], [*START, 2]], params=replace(ONE, **fields)) == []


def test_requests_of_different_kinds_are_not_shared():
    requests = requests_for([[*START, 1], [*START, 2]])
    requests[1].params = replace(ONE, temperature=1.0)
    assert find_shared_starts(INPUTS, requests, longest_item=100) == []


def test_the_carrier_samples_as_its_members():
    params = replace(ONE, temperature=1.0, logprobs=3)
    requests = requests_for([[*START, 1], [*START, 2]], params)
    requests[0].priority = requests[1].priority = 4
    (shared,) = find_shared_starts(INPUTS, requests, longest_item=100)
    carrier = shared.carrier
    assert (carrier.params, carrier.priority, carrier.max_tokens) == (params, 4, 0)
    assert carrier.request_id == requests[0].request_id
    assert carrier.score.sample_keys == (mix_key(9, 0),) * 2


@pytest.mark.parametrize("logprobs", [None, 1])
def test_members_get_their_tokens_and_ends(logprobs):
    params = replace(ONE, logprobs=logprobs, stop_token_ids=[7])
    requests = requests_for([[*START, 1], [*START, 2], [*START, 3]], params)
    (shared,) = find_shared_starts(INPUTS, requests, longest_item=100)
    entries = [TokenLogprobs(token_id, -0.5, ((7, -0.5),)) for token_id in (6, 7, 8)]
    shared.carrier.item_tokens = entries
    shared.carrier.num_cached = 16
    updates = shared.updates()
    assert [update.new_token_ids for update in updates] == [(6,), (7,), (8,)]
    assert [u.finish_reason for u in updates] == ["length", "stop", "length"]
    assert [u.stop_reason for u in updates] == [None, 7, None]
    assert [u.logprobs for u in updates] == [() if logprobs is None else (e,) for e in entries]
    assert shared.num_cached == [16, 40, 40]


def test_tokens_of_a_repeated_step_replace_those_of_the_interrupted_one():
    task = ScoreTask(((2,), (3,), (4,)), (), sample_keys=(0, 0, 0))
    request = Request("", [1], SamplingParams(logprobs=1), 0, 0, frozenset(), 0, score=task)

    def deliver(first, ids, problem=0):
        count = len(ids)
        read = TopLogprobs(
            torch.tensor(ids),
            torch.full((count,), -0.5),
            torch.tensor(ids).unsqueeze(1),
            torch.full((count, 1), -0.5),
        )
        problems = torch.full((count,), problem, dtype=torch.uint8)
        ItemTokensReadback(request, first, problems, read).deliver()

    deliver(0, [5])
    deliver(1, [6, 7])
    deliver(1, [8, 9])
    assert [entry.token_id for entry in request.item_tokens] == [5, 8, 9]
    assert request.item_tokens[0].top == ((5, -0.5),)
    assert not request.is_unsound
    deliver(1, [8, 9], problem=1)
    assert request.is_unsound
