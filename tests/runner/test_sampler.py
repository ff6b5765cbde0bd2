"""Sampling against plain formulas: who may be chosen, how often, and that rows stay apart."""

import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tiercel.params import SamplingParams
from tiercel.request.request import Request, TokenLogprobs
from tiercel.runner.row_state import Rows
from tiercel.runner.sampler import LogitsLayout, Sampler, is_kept
from tiercel.runner.sampler_output import read_sampler_output, top_logprobs

NEG_INF = float("-inf")
GREEDY = SamplingParams(temperature=0)


def make_request(params=GREEDY, *, prompt=(1,), output=(), seed=0, stream=0, stop_ids=frozenset()):
    request = Request("r", list(prompt), params, seed, stream, stop_ids, 100)
    request.output_token_ids += output
    return request


@dataclass
class Drawn:
    """One token of each row."""

    token_ids: list[int]
    problems: list[str | None]
    logprobs: list[TokenLogprobs | None]

    @staticmethod
    def of(results):
        return Drawn(
            [token_id for result in results for token_id in result.token_ids],
            [result.problem for result in results],
            [result.logprobs[0] if result.logprobs else None for result in results],
        )


def sample(logits, requests, *, banned=(), words=None):
    """Run the sampler on a copy of rows of numbers, each request in an engine row of its own."""
    requests = [replace(request, row=i, num_ahead=1) for i, request in enumerate(requests)]
    longest = max(request.num_tokens for request in requests) + 1
    rows = Rows(len(requests), longest, 1, 1, torch.device("cpu"))
    sampler = Sampler(banned, len(logits[0]), rows, lambda word: (words or {})[word])
    for request in requests:
        rows.stage(rows.num_tokens, (request.row,), [request.num_tokens])
        sampler.enter(request)
    rows.apply()
    lines = torch.arange(len(requests), dtype=torch.int32)
    out = sampler(torch.tensor(logits, dtype=torch.float32), requests, lines)
    result = Drawn.of(read_sampler_output(out, requests))
    for request, token_id in zip(requests, result.token_ids, strict=True):
        assert rows.token_ids[request.row, request.num_tokens] == token_id
        assert rows.num_tokens[request.row] == request.num_tokens + 1
    return result


def greedy(logits, params=GREEDY, **options):
    """The greedy choice of one row, None if there is none."""
    keys = ("banned", "words")
    request = make_request(params, **{k: v for k, v in options.items() if k not in keys})
    out = sample([logits], [request], **{k: v for k, v in options.items() if k in keys})
    if out.problems == ["no_valid_token"]:
        return None
    assert out.problems == [None]
    return out.token_ids[0]


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 5), cols=st.integers(1, 70), data=st.data())
def test_greedy_takes_the_lowest_id_of_the_largest_logit(rows, cols, data):
    row = st.lists(st.integers(-3, 3), min_size=cols, max_size=cols)
    logits = data.draw(st.lists(row, min_size=rows, max_size=rows))
    out = sample(logits, [make_request()] * rows)
    assert out.token_ids == [row.index(max(row)) for row in logits]
    assert out.problems == [None] * rows
    assert out.logprobs == [None] * rows


@pytest.mark.parametrize("places", [(40_001, 3_000), (49_151, 49_150), (32_768, 65), (0, 49_151)])
def test_greedy_ties_in_a_long_row(places):
    logits = torch.zeros(2, 49_152)
    logits[1, list(places)] = 1.0
    out = sample(logits.tolist(), [make_request()] * 2)
    assert out.token_ids == [0, min(places)]


def test_temperatures_near_zero_are_greedy():
    params = SamplingParams(temperature=9e-6)
    for seed in range(20):
        assert sample([[0.0, 1e-7, 0.0]], [make_request(params, seed=seed)]).token_ids == [1]


def test_padding_ids_are_never_chosen():
    assert greedy([5.0, 9.0, 8.0, 7.0], banned=(1, 2)) == 3
    drawn = SamplingParams(temperature=2.0)
    requests = [make_request(drawn, seed=i) for i in range(200)]
    out = sample([[0.0, 50.0, 0.0, 0.0]] * 200, requests, banned=(1,))
    assert set(out.token_ids) == {0, 2, 3}


def test_allowed_token_ids():
    params = SamplingParams(temperature=0, allowed_token_ids=(3, 0, 3))
    assert greedy([1.0, 9.0, 8.0, 2.0], params) == 3
    assert greedy([1.0, 9.0, 8.0, 2.0], params, banned=(3,)) == 0
    assert greedy([1.0, 9.0, 8.0, 2.0], params, banned=(3, 0)) is None


def test_logit_bias_is_added_and_minus_100_bans():
    logits = [1.0, 2.0, 3.0, 4.0]
    assert greedy(logits, SamplingParams(temperature=0, logit_bias={0: 3.5})) == 0
    assert greedy(logits, SamplingParams(temperature=0, logit_bias={0: 2.5, 3: -0.5})) == 0
    assert greedy(logits, SamplingParams(temperature=0, logit_bias={3: -1.5})) == 2
    huge = [1e6, 0.0, -1e6, -1e6]
    assert greedy(huge, SamplingParams(temperature=0, logit_bias={0: -99.9})) == 0
    assert greedy(huge, SamplingParams(temperature=0, logit_bias={0: -100})) == 1
    assert greedy(huge, SamplingParams(temperature=0, logit_bias={0: -100.0, 1: -100})) == 2
    # A banned id stays banned, however much is added.
    assert greedy(huge, SamplingParams(temperature=0, logit_bias={0: 100}), banned=(0,)) == 1


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], {5}),
        ([1], {5}),
        ([1, 2], {3, 5}),
        ([2], {5}),  # the word has begun only if 1 came before
        ([1, 2, 0], {5}),
        ([0, 1, 2], {3, 5}),
        ([7], {5, 6}),
    ],
)
def test_bad_words_ban_the_token_that_completes_them(output, banned):
    words = {"abc": [[1, 2, 3], [7, 6]], "x": [[5]]}
    params = SamplingParams(temperature=0, bad_words=list(words))
    for token_id in range(8):
        logits = [0.0] * 8
        logits[token_id] = 1.0
        chosen = greedy(logits, params, output=output, words=words)
        assert (chosen == token_id) == (token_id not in banned)


def test_bad_words_look_at_the_answer_not_at_the_prompt():
    params = SamplingParams(temperature=0, bad_words=["ab"])
    words = {"ab": [[1, 2]]}
    assert greedy([0.0, 0.0, 1.0], params, prompt=[1], words=words) == 2
    assert greedy([0.0, 0.0, 1.0], params, prompt=[1], output=[1], words=words) == 0


@pytest.mark.parametrize(("num_output", "expected"), [(0, 0), (2, 0), (3, 1), (4, 1)])
def test_min_tokens_bans_every_stop_id_until_then(num_output, expected):
    params = SamplingParams(temperature=0, min_tokens=3)
    logits = [0.5, 3.0, 2.0]
    chosen = greedy(logits, params, output=[0] * num_output, stop_ids=frozenset({1, 2}))
    assert chosen == expected
    assert greedy(logits, params) == 1  # no stop ids at all


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_banned_is_a_problem_of_that_row_alone(temperature):
    free = SamplingParams(temperature=temperature)
    stuck = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(4), -100))
    cut_too = SamplingParams(
        temperature=temperature, allowed_token_ids=[1], logit_bias={1: -100}, top_p=0.5, top_k=2
    )
    requests = [make_request(free), make_request(stuck), make_request(cut_too), make_request(free)]
    out = sample([[0.0, 9.0, 0.0, 0.0]] * 4, requests)
    assert out.problems == [None, "no_valid_token", "no_valid_token", None]
    assert [out.token_ids[0], out.token_ids[3]] == [1, 1]


@pytest.mark.reliability
@pytest.mark.parametrize("bad", [math.nan, math.inf, NEG_INF])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_nonfinite_logits_are_a_problem_of_that_row_alone(bad, place):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 7, generator=generator).tolist()
    params = [
        GREEDY,
        SamplingParams(top_p=0.8),
        SamplingParams(logprobs=3),
        SamplingParams(temperature=0.7, top_k=3, repetition_penalty=1.3),
        SamplingParams(min_p=0.1),
    ]
    requests = [make_request(p, seed=i) for i, p in enumerate(params)]
    expected = sample(logits, requests)
    for row in range(5):
        broken = [list(values) for values in logits]
        broken[row][place] = bad
        out = sample(broken, requests, banned=())
        assert out.problems == ["nonfinite_logits" if i == row else None for i in range(5)]
        others = [i for i in range(5) if i != row]
        assert [out.token_ids[i] for i in others] == [expected.token_ids[i] for i in others]
        assert [out.logprobs[i] for i in others] == [expected.logprobs[i] for i in others]


@pytest.mark.reliability
def test_a_nonfinite_logit_is_seen_where_nothing_may_be_chosen():
    banned = SamplingParams(temperature=0, allowed_token_ids=[0])
    out = sample([[1.0, math.nan, 0.0]], [make_request(banned)], banned=(1,))
    assert out.problems == ["nonfinite_logits"]


def penalised(logits, params, prompt, output):
    """The formulas, one token at a time."""
    counts = Counter(output)
    row = []
    for token_id, value in enumerate(logits):
        if token_id in prompt or token_id in output:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value -= params.frequency_penalty * counts[token_id]
        value -= params.presence_penalty * (counts[token_id] > 0)
        row.append(value)
    return row


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=16), min_size=6, max_size=6),
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    output=st.lists(st.integers(0, 5), max_size=8),
    presence=st.sampled_from([-2.0, 0.0, 0.75]),
    frequency=st.sampled_from([-1.5, 0.0, 0.25]),
    repetition=st.sampled_from([0.5, 1.0, 1.75]),
)
def test_penalties_follow_their_formulas(logits, prompt, output, presence, frequency, repetition):
    params = SamplingParams(
        temperature=0,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    expected = penalised(logits, params, prompt, output)
    ranked = sorted(expected, reverse=True)
    assume(ranked[0] - ranked[1] > 1e-4)
    chosen = greedy(logits, params, prompt=prompt, output=output)
    assert chosen == expected.index(ranked[0])


def test_penalties_leave_bans_alone():
    params = SamplingParams(temperature=0, repetition_penalty=0.5, presence_penalty=-2.0)
    assert greedy([1.0, 9.0, 0.5], params, output=[1, 1], banned=(1,)) == 0


@pytest.mark.parametrize("temperature", [0.0, 2e-5, 1.0])
@pytest.mark.parametrize("cut", [{}, {"top_p": 5e-324}, {"top_p": 0.5}, {"min_p": 1.0}])
@pytest.mark.parametrize("repetition", [5e-324, 1e-45, 1e-38, 1e-20])
def test_the_smallest_numbers_are_more_than_nothing(repetition, cut, temperature):
    """They are above 0, so they hold: a token that was said before goes first, a ban stays one."""
    fields = {"temperature": temperature, "repetition_penalty": repetition} | cut
    params = SamplingParams(allowed_token_ids=(0, 1, 3), **fields)
    request = make_request(params, prompt=(2, 3), output=(2,))
    assert sample([[9.0, 9.0, 9.0, 1.0]], [request]).token_ids == [3]


def kept_by_oracle(logits, top_k, top_p, min_p):
    """Ids that the three cuts leave, in float64; None if a bound is too close to call."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    total, before, kept = sum(weights), 0.0, set()
    for token_id, weight in zip(order, weights, strict=True):
        if before and abs(before / total - top_p) < 1e-5:
            return None
        if abs(weight - min_p) < 1e-5 and weight != 1.0:
            return None
        if (before / total < top_p or top_p == 1.0) and weight >= min_p:
            kept.add(token_id)
        before += weight
    return kept


def kept(logits, top_k, top_p, min_p):
    column = torch.tensor([[float(top_k)], [float(top_k)]])
    rows = torch.tensor([logits, logits[::-1]], dtype=torch.float32)
    out = is_kept(rows, column, torch.full((2, 1), top_p), torch.full((2, 1), min_p))[0]
    out &= rows[0] > NEG_INF  # what was banned before is not brought back
    return set(out.nonzero().flatten().tolist())


@settings(max_examples=250, deadline=None)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=2, max_size=40),
    top_k=st.integers(1, 45),
    top_p=st.just(1.0) | st.floats(0.001, 0.999),
    min_p=st.sampled_from([0.0, 1.0]) | st.floats(0.001, 0.999),
)
def test_cuts_match_the_oracle(logits, top_k, top_p, min_p):
    expected = kept_by_oracle(logits, top_k, top_p, min_p)
    assume(expected is not None)
    assert kept(logits, top_k, top_p, min_p) == expected
    assert min(range(len(logits)), key=lambda i: (-logits[i], i)) in expected


@pytest.mark.parametrize(
    ("logits", "top_k", "top_p", "min_p", "expected"),
    [
        ([0.0] * 4, 4, 0.5, 0.0, {0, 1}),  # exactly half: the third begins at 0.5
        ([0.0] * 4, 4, 0.51, 0.0, {0, 1, 2}),
        ([0.0] * 4, 2, 1.0, 0.0, {0, 1}),  # ties by id
        ([0.0, 1.0, 1.0, 1.0], 2, 1.0, 0.0, {1, 2}),
        ([0.0] * 4, 2, 0.5, 0.0, {0}),  # of the top-k set: a half each
        ([0.0] * 4, 4, 1.0, 1.0, {0, 1, 2, 3}),
        ([1.0, 2.0, 2.0], 3, 1.0, 1.0, {1, 2}),
        ([1.0, 2.0, 3.0], 3, 1e-9, 0.0, {2}),
        ([1.0, 2.0, 3.0], 1, 1.0, 0.0, {2}),
        ([1e30, -1e30, 0.0], 3, 0.999, 0.0, {0}),
        ([1e30, -1e30, 0.0], 3, 1.0, 0.0, {0, 1, 2}),
        ([NEG_INF, 0.0, NEG_INF, 0.0], 3, 0.9, 0.0, {1, 3}),
        ([NEG_INF, 0.0, NEG_INF, 0.0], 4, 1.0, 0.5, {1, 3}),
        ([NEG_INF] * 3, 2, 0.5, 0.5, set()),
        ([0.0, -200.0], 2, 1.0, 0.0, {0, 1}),
        ([0.0, -200.0], 2, 1.0, 1e-30, {0}),
    ],
)
def test_cut_at_ties_and_extremes(logits, top_k, top_p, min_p, expected):
    assert kept(logits, top_k, top_p, min_p) == expected


def test_top_p_1_cuts_nothing_where_the_rounded_sum_reaches_1_early():
    logits = torch.cat([torch.full((40_000,), 1.0), torch.full((10_000,), -12.0)])
    sums = logits.softmax(dim=0).cumsum(dim=0)
    assert (sums[:-1] >= 1.0).any(), "the case that this test is about"
    rows = torch.stack([logits, logits])
    all_ids = torch.full((2, 1), 50_000.0)
    out = is_kept(rows, all_ids, torch.tensor([[1.0], [0.5]]), torch.zeros(2, 1))
    assert out[0].all()
    assert out[1].sum() < 40_000


def test_logprobs_are_of_the_raw_distribution():
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(4, 50, generator=generator)
    expected = logits.double().log_softmax(dim=1)
    params = [
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0.2, logprobs=1, top_k=4),
        SamplingParams(temperature=1.0, logprobs=5, logit_bias={7: 50.0}, presence_penalty=1.0),
        SamplingParams(temperature=0, logprobs=20, allowed_token_ids=[11]),
    ]
    requests = [make_request(p, output=[3, 4]) for p in params]
    out = sample(logits.tolist(), requests, banned=(int(logits[0].argmax()),))
    assert out.token_ids[2] == 7
    assert out.token_ids[3] == 11
    for i, (entry, param) in enumerate(zip(out.logprobs, params, strict=True)):
        assert entry.token_id == out.token_ids[i]
        assert entry.logprob == pytest.approx(expected[i, entry.token_id].item(), abs=1e-5)
        order = expected[i].argsort(descending=True)[: param.logprobs].tolist()
        assert [token_id for token_id, _ in entry.top] == order
        for token_id, logprob in entry.top:
            assert logprob == pytest.approx(expected[i, token_id].item(), abs=1e-5)


def test_top_list_of_a_small_vocabulary_is_the_whole_of_it():
    (entry,) = top_logprobs(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]), 20).entries([20])
    assert [token_id for token_id, _ in entry.top] == [1, 2, 0]
    assert sum(math.exp(logprob) for _, logprob in entry.top) == pytest.approx(1.0)


def test_no_rows():
    assert top_logprobs(torch.empty(0, 5), torch.empty(0), 3).entries([]) == []


def test_penalties_count_what_is_drawn_on_the_device():
    """Three steps of one row, with nothing told to the host in between."""
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    request = make_request(params)
    request.row, request.num_ahead = 0, 1
    rows = Rows(1, 9, 1, 1, torch.device("cpu"))
    sampler = Sampler((), 3, rows, lambda word: [])
    rows.stage(rows.num_tokens, (0,), [1])
    sampler.enter(request)
    rows.apply()
    drawn = []
    for _ in range(4):
        logits = torch.tensor([[0.0, 2.5, 1.0]])
        out = sampler(logits, [request], torch.zeros(1, dtype=torch.int32))
        drawn.append(int(out.token_ids[0]))
    assert drawn == [1, 1, 2, 1]  # 2.5, 1.5, then 1.0 against 0.5, then 0.5 against 0.0


def test_lines_of_scratch_are_dropped():
    rows = Rows(2, 9, 1, 1, torch.device("cpu"))
    sampler = Sampler((), 3, rows, lambda word: [])
    request = replace(make_request(), row=1, num_ahead=1)
    rows.stage(rows.num_tokens, (1,), [1])
    sampler.enter(request)
    rows.apply()
    out = sampler(torch.eye(3), [request], torch.tensor([1, 2, 2], dtype=torch.int32))
    assert [result.token_ids for result in read_sampler_output(out, [request])] == [(0,)]
    assert rows.num_tokens.tolist() == [0, 2, 0]


EVERY_OPTION = [
    GREEDY,
    SamplingParams(temperature=0.8, logprobs=3),
    SamplingParams(temperature=1.3, top_k=4, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0, min_tokens=6, logprobs=0),
    SamplingParams(temperature=1.0, min_tokens=2, logit_bias={1: 2.0, 3: -100}),
    SamplingParams(temperature=0, allowed_token_ids=[0, 2, 4, 6]),
    SamplingParams(temperature=0, frequency_penalty=1.5, presence_penalty=-0.5),
    SamplingParams(temperature=0.7, repetition_penalty=1.6, logprobs=2, top_k=5),
    SamplingParams(temperature=0.5, bad_words=["a", "bc"]),
]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_option_holds_at_each_draft(data):
    """Drafts of any kind give the tokens and log-probabilities of one step after the other."""
    vocab, most, num_before = 8, 4, data.draw(st.integers(0, 3))
    picked = data.draw(st.lists(st.sampled_from(EVERY_OPTION), min_size=1, max_size=5))
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    lines = (torch.randn(len(picked), 1 + most, vocab) * 2).round(decimals=2)
    before = [data.draw(st.lists(st.integers(0, 7), min_size=num_before, max_size=num_before))
              for _ in picked]  # fmt: skip
    stops = frozenset({5, 7})

    def run(steps):
        requests = [
            replace(make_request(p, output=out, seed=i, stop_ids=stops), row=i, num_ahead=1)
            for i, (p, out) in enumerate(zip(picked, before, strict=True))
        ]
        rows = Rows(len(requests), 20, 1, 1, torch.device("cpu"), most)
        words = {"a": [[1, 2], [4]], "bc": [[3, 3, 0]]}
        sampler = Sampler((6,), vocab, rows, words.__getitem__)
        for request in requests:
            rows.stage(rows.num_tokens, (request.row,), [request.num_tokens])
            sampler.enter(request)
        rows.apply()
        return steps(requests, rows, sampler)

    def one_by_one(requests, rows, sampler):
        ids = torch.arange(len(requests), dtype=torch.int32)
        every = []
        for i in range(1 + most):
            out = read_sampler_output(sampler(lines[:, i].clone(), requests, ids), requests)
            for request, result in zip(requests, out, strict=True):
                request.output_token_ids += result.token_ids
            every.append(out)
        return every

    plain = run(one_by_one)
    guesses = [
        [plain[i][r].token_ids[0] if data.draw(st.integers(0, 3)) else data.draw(st.integers(0, 7))
         for i in range(data.draw(st.integers(0, most)))]
        for r in range(len(picked))
    ]  # fmt: skip
    is_padded = data.draw(st.booleans())

    def all_at_once(requests, rows, sampler):
        for row, guess in enumerate(guesses):
            requests[row].next_drafts = tuple(guess)
            rows.drafts.draft_ids[row, 1 : 1 + len(guess)] = torch.tensor(guess, dtype=torch.int32)
        widths = [1 + most if is_padded else 1 + len(guess) for guess in guesses]
        logits = torch.cat([line[:width] for line, width in zip(lines, widths, strict=True)])
        layout = LogitsLayout(
            torch.tensor([0, *widths]).cumsum(0).int(),
            torch.tensor([len(guess) for guess in guesses], dtype=torch.int32),
            tuple(widths),
            tuple(len(guess) for guess in guesses),
        )
        ids = torch.arange(len(requests), dtype=torch.int32)
        output = sampler(logits.clone(), requests, ids, layout)
        made = rows.drafts.draft_ids[: len(requests)]
        output = replace(output, table=torch.cat((output.table, made), 1))
        return read_sampler_output(output, requests, widths)

    for r, result in enumerate(run(all_at_once)):
        check_verified(result, [step[r] for step in plain], guesses[r])


def check_verified(result, plain, guess):
    """A row that verified `guess` against what it gives one step after the other."""
    expected = [step.token_ids[0] for step in plain]
    count, right = len(result.token_ids), 0
    while right < len(guess) and guess[right] == expected[right] and plain[right].problem is None:
        right += 1
    assert list(result.token_ids) == expected[:count]
    # A place where no token is left is told when it is the row's next one.
    assert count == right + (right == 0 or plain[right].problem is None)
    assert result.problem == (plain[0].problem if right == 0 else None)
    assert len(result.logprobs) == (count if plain[0].logprobs else 0)
    for entry, step in zip(result.logprobs, plain, strict=False):
        (alone,) = step.logprobs
        assert entry.token_id == alone.token_id
        assert entry.logprob == pytest.approx(alone.logprob, abs=1e-6)
        assert [token for token, _ in entry.top] == [token for token, _ in alone.top]
