"""Where thinking past its bound is closed, and what is left for the completion: all small cases."""

import itertools

import pytest

from tests.serve.fake_client import fake_info, fake_tokenizer
from tests.serve.generation.test_output_parser import Marked
from tiercel.params import SamplingParams
from tiercel.request.inputs import InputProcessor
from tiercel.request.request import TokenUpdate
from tiercel.serve.api.assembled_message import assemble_message
from tiercel.serve.generation.completion import Completion
from tiercel.serve.generation.output_parser import OutputParser, Parsers
from tiercel.serve.generation.thinking_budget import ThinkingBudget

TOKENIZER = fake_tokenizer()
PROMPT = [97, 98, 99]
OPENING, LETTER = TOKENIZER.encode("<")[0], TOKENIZER.encode("a")[0]
INPUTS = InputProcessor(
    TOKENIZER, vocab_size=fake_info().vocab_size, max_position=512, max_model_len=256, seed=0
)


def make_answer(max_tokens, bound, closing_ids, **params):
    """Thinking in angle brackets; the closing marker may take any number of tokens."""
    request = INPUTS.request(PROMPT, SamplingParams(max_tokens=max_tokens, seed=5, **params), 2)
    text = OutputParser(request, TOKENIZER, Parsers(reasoning=Marked()))
    limit = None if bound is None else ThinkingBudget(bound, ">", tuple(closing_ids), None)
    return Completion(1, request, text, limit)


def think(completion, num_tokens, *, group=1):
    """Thinking without an end, some tokens at a time; returns the deltas up to a cut."""
    ids = [OPENING, *[LETTER] * (num_tokens - 1)]
    deltas = []
    for start in range(0, num_tokens, group):
        new = ids[start : start + group]
        completion.request.output_token_ids += new
        is_last = start + group >= num_tokens
        deltas.append(completion.take(TokenUpdate(new, (), "length" if is_last else None, None)))
        if completion.needs_rest:
            break
    return deltas


@pytest.mark.parametrize("group", [1, 3])
def test_thinking_is_closed_at_its_bound_if_a_token_is_left_for_the_answer(group):
    for max_tokens, bound, num_closing in itertools.product((4, 9, 10), range(1, 11), range(4)):
        closing = list(range(60, 60 + num_closing))
        completion = make_answer(max_tokens, bound, closing, min_tokens=min(3, max_tokens))
        deltas = think(completion, max_tokens, group=group)
        left = max_tokens - bound - num_closing
        events = [event for delta in deltas for event in delta.events]
        assert completion.needs_rest == (left > 0)
        if left <= 0:
            assert completion.finish_reason == "length"
            assert completion.output.num_tokens == max_tokens
            continue
        assert completion.output.num_tokens == bound == completion.output.num_reasoning_tokens
        assert sum(len(delta.token_ids) for delta in deltas) == bound
        assert (assemble_message(events).reasoning, assemble_message(events).content) == (
            "a" * (bound - 1),
            "",
        )
        assert not completion.output.is_thinking
        rest = completion.make_rest(INPUTS)
        kept = [OPENING, *[LETTER] * (bound - 1)]
        assert rest.prompt_token_ids == [*PROMPT, *kept, *closing]
        assert rest.max_tokens == left
        assert rest.params.min_tokens == min(left, max(0, min(3, max_tokens) - bound))
        assert (rest.seed, rest.stream) == (completion.request.seed, completion.request.stream)
        assert (completion.running, completion.needs_rest) == (rest, False)


def test_thinking_without_a_bound_is_never_cut():
    completion = make_answer(9, None, [])
    think(completion, 9)
    assert not completion.needs_rest
    assert completion.finish_reason == "length"


def test_an_answer_that_does_not_think_is_never_cut():
    completion = make_answer(9, 2, [60])
    for _ in range(8):
        delta = completion.take(TokenUpdate([LETTER], (), None, None))
        assert not completion.needs_rest
        assert delta.num_tokens == completion.output.num_tokens
    assert completion.output.num_reasoning_tokens == 0
