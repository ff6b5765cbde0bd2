"""Limits, lengths and places of scoring requests as they are made, against plain sums.

No model runs here: the requests of a job are filled with values that tell where they belong.
"""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.tiny_llm import LLAMA
from tiercel.errors import ArgumentError, ContextLengthError
from tiercel.models.source import open_source
from tiercel.params import LIMITS
from tiercel.request.inputs import InputProcessor
from tiercel.request.score_inputs import ScoreInputs
from tiercel.request.score_params import ScoreParams

CONTEXT = 60
IDS = (5, 9, 200)


@pytest.fixture(scope="module")
def tokenizer():
    return open_source(LLAMA).tokenizer(None)


@pytest.fixture
def make_inputs(tokenizer):
    def make(step=40, num_seqs=8, **limits):
        inputs = InputProcessor(
            tokenizer, vocab_size=272, max_position=CONTEXT, max_model_len=CONTEXT, seed=0
        )
        return ScoreInputs(
            inputs, tokenizer, max_model_len=CONTEXT, max_step_tokens=step, max_num_seqs=num_seqs,
            limits=replace(LIMITS, **limits),
        )  # fmt: skip

    return make


def test_limits_of_items_and_tokens_are_allowed_and_no_more(make_inputs):
    params = ScoreParams(label_token_ids=IDS)
    items = [[1, 2]] * 5
    job = make_inputs(max_score_items=5, max_score_tokens=13).job([3, 4, 6], items, params)
    assert (job.num_items, job.num_labels, job.prompt_tokens) == (5, 3, 13)
    with pytest.raises(ArgumentError, match="5 items; the limit is 4"):
        make_inputs(max_score_items=4).job([3, 4, 6], items, params)
    with pytest.raises(ArgumentError, match="13 tokens; the limit is 12"):
        make_inputs(max_score_tokens=12).job([3, 4, 6], items, params)
    first = replace(params, item_first=True)  # each item has a query of its own
    assert make_inputs(max_score_tokens=25).job([3, 4, 6], items, first).prompt_tokens == 25
    with pytest.raises(ArgumentError, match="25 tokens; the limit is 24"):
        make_inputs(max_score_tokens=24).job([3, 4, 6], items, first)


@pytest.mark.parametrize("suffix", [(), (7, 7)])
@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("long_items", ["refuse", "skip", "cut"])
def test_query_item_suffix_and_label_share_the_context(make_inputs, suffix, item_first, long_items):
    """The last token of a label is never computed: it is only looked up."""
    query = [3] * 30
    most = CONTEXT - len(query) - len(suffix)
    params = ScoreParams(
        label_token_ids=IDS, suffix=suffix, item_first=item_first, long_items=long_items
    )
    inputs = make_inputs(step=200)
    assert not inputs.job(query, [[1] * most], params).errors
    too_long = [[2], [1] * (most + 1)]
    if long_items == "refuse":
        with pytest.raises(ContextLengthError, match=rf"items\[1\] has {most + 1} tokens"):
            inputs.job(query, too_long, params)
        return
    job = inputs.job(query, too_long, params)
    assert list(job.errors) == ([1] if long_items == "skip" else [])
    assert job.numbers == ((0,) if long_items == "skip" else (0, 1))
    lengths = [
        len(request.prompt_token_ids) + max(map(len, request.score.items), default=0)
        for request in job.requests
    ]
    assert max(lengths) == (CONTEXT if long_items == "cut" else len(query) + len(suffix) + 1)


def test_a_query_without_room_for_an_item_is_refused(make_inputs):
    params = ScoreParams(label_token_ids=IDS)
    make_inputs().job([3] * (CONTEXT - 1), [[1]], params)
    with pytest.raises(ContextLengthError, match=f"query has {CONTEXT} tokens"):
        make_inputs().job([3] * CONTEXT, [[1]], params)


@pytest.mark.parametrize(
    ("labels", "is_open"),
    [(("a", "b"), False), (("ab", "a"), True), (("abc", "ab"), True), (("a", "abc"), True),
     (("abc", "abd"), False), (("bc", "abc"), False)],
)  # fmt: skip
def test_strict_labels_are_those_of_which_none_begins_another(
    make_inputs, tokenizer, labels, is_open
):
    ids = [tuple(tokenizer.encode_inner(label)) for label in labels]
    begins = any(a == b[: len(a)] for a, b in itertools.permutations(ids, 2))
    assert begins is is_open, "letters are tokens here"
    params = ScoreParams(labels=labels, strict_labels=True)
    if is_open:
        with pytest.raises(ArgumentError, match="begin label"):
            make_inputs().job("q", ["i"], params)
    else:
        make_inputs().job("q", ["i"], params)


def value_of(sequence, token_id):
    """A number that tells the place and the token apart from all others."""
    return -((sum(sequence) * 7 + len(sequence) * 13 + token_id) % 97) / 16 - 1 / 16


def fill(request):
    """Give a request the values of its reads, in their order, and end it."""
    task, values = request.score, []
    for number, item in enumerate(task.items or ((),)):
        sequence = [*request.prompt_token_ids, *item]
        assert task.num_values(number) == len(values)
        for read in task.reads[number % len(task.reads)]:
            seen = sequence[: len(sequence) - read.back]
            values += [value_of(seen, token_id) for token_id in read.token_ids]
    assert task.num_values(len(task.items) or 1) == len(values)
    request.scores = np.array(values, np.float32)
    request.finish_reason = "length"


@pytest.mark.parametrize("seed", range(15))
def test_values_find_their_item_and_label(make_inputs, tokenizer, seed):
    """Items of every length, packed and apart, labels of one token and of several, normalised."""
    draw = random.Random(seed)
    step, num_seqs = draw.choice(((14, 8), (9, 2), (40, 8)))
    query = "".join(draw.choice("xyz") for _ in range(draw.randrange(1, 9)))
    items = ["".join(draw.choice("pqrs") for _ in range(draw.randrange(12))) for _ in range(9)]
    labels = draw.choice((("a", "b"), ("ab", "cd", "cef"), ("ab", "abc", "d", "abd")))
    params = ScoreParams(
        labels=labels,
        suffix=draw.choice(("", "uv")),
        normalize=draw.choice(("vocab", "labels")),
        label_normalization=draw.choice(("sum", "mean")),
        item_first=draw.random() < 0.2,
    )
    inputs = make_inputs(step=step, num_seqs=num_seqs)
    job = inputs.job(query, items, params)
    for request in job.requests:
        # An item gets its turn though every other request takes a token of a step.
        assert all(len(item) <= step - num_seqs for item in request.score.items)
        fill(request)
    output = job.output()
    own_labels = [tokenizer.encode_inner(label) for label in labels]
    expected = np.zeros((len(items), len(labels)))
    for number, item in enumerate(items):
        if params.item_first:
            before = [*tokenizer.with_bos(tokenizer.encode(item)), *tokenizer.encode_inner(query)]
        else:
            before = [*tokenizer.with_bos(tokenizer.encode(query)), *tokenizer.encode_inner(item)]
        before += tokenizer.encode(params.suffix)
        for place, label in enumerate(own_labels):
            told = [value_of([*before, *label[:i]], token) for i, token in enumerate(label)]
            expected[number, place] = sum(told)
    mass = np.exp(expected).sum(axis=1)
    if params.label_normalization == "mean":
        expected /= [len(label) for label in own_labels]
    if params.normalize == "labels":
        expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
    # float32 of sums of up to three values
    np.testing.assert_allclose(output.logprobs, expected, atol=1e-5, equal_nan=False)
    np.testing.assert_allclose(output.probs, np.exp(expected), atol=1e-5, equal_nan=False)
    if output.label_mass is not None:
        np.testing.assert_allclose(output.label_mass, mass, rtol=1e-5, equal_nan=False)
    is_relative = params.normalize == "labels" and max(map(len, own_labels)) == 1
    assert (output.label_mass is None) == is_relative
    assert output.usage.mode == ("separate" if params.item_first else "packed")
