"""Where thinking past its bound is closed, and what is left for the answer: all small cases."""

import itertools

import pytest

from tests.serve.fake_client import fake_info, fake_tokenizer
from tests.serve.generation.test_answer_text import Marked
from tiercel.params import SamplingParams
from tiercel.request.inputs import InputProcessor
from tiercel.request.request import TokenUpdate
from tiercel.serve.api.openai.wire import said
from tiercel.serve.generation.answer import Answer, ThinkingBound
from tiercel.serve.generation.answer_text import AnswerText, Parsers

TOKENIZER = fake_tokenizer()
PROMPT = [97, 98, 99]
OPENING, LETTER = TOKENIZER.encode("<")[0], TOKENIZER.encode("a")[0]
INPUTS = InputProcessor(
    TOKENIZER, vocab_size=fake_info().vocab_size, max_position=512, max_model_len=256, seed=0
)


def make_answer(max_tokens, bound, closing_ids, **params):
    """Thinking in angle brackets; the closing marker may take any number of tokens."""
    request = INPUTS.request(PROMPT, SamplingParams(max_tokens=max_tokens, seed=5, **params), 2)
    text = AnswerText(request, TOKENIZER, Parsers(reasoning=Marked()))
    limit = None if bound is None else ThinkingBound(bound, ">", tuple(closing_ids), None)
    return Answer(1, request, text, limit)


def think(answer, num_tokens, *, group=1):
    """Thinking without an end, some tokens at a time; returns the pieces up to a cut."""
    ids = [OPENING, *[LETTER] * (num_tokens - 1)]
    pieces = []
    for start in range(0, num_tokens, group):
        new = ids[start : start + group]
        answer.request.output_token_ids += new
        is_last = start + group >= num_tokens
        pieces.append(answer.take(TokenUpdate(new, (), "length" if is_last else None, None)))
        if answer.is_cut:
            break
    return pieces


@pytest.mark.parametrize("group", [1, 3])
def test_thinking_is_closed_at_its_bound_if_a_token_is_left_for_the_answer(group):
    for max_tokens, bound, num_closing in itertools.product((4, 9, 10), range(1, 11), range(4)):
        closing = list(range(60, 60 + num_closing))
        answer = make_answer(max_tokens, bound, closing, min_tokens=min(3, max_tokens))
        pieces = think(answer, max_tokens, group=group)
        left = max_tokens - bound - num_closing
        events = [event for piece in pieces for event in piece.events]
        assert answer.is_cut == (left > 0)
        if left <= 0:
            assert answer.finish_reason == "length"
            assert answer.text.num_tokens == max_tokens
            continue
        assert answer.text.num_tokens == bound == answer.text.num_reasoning_tokens
        assert sum(len(piece.token_ids) for piece in pieces) == bound
        assert (said(events).reasoning, said(events).content) == ("a" * (bound - 1), "")
        assert not answer.text.is_thinking
        rest = answer.ask_for_rest(INPUTS)
        kept = [OPENING, *[LETTER] * (bound - 1)]
        assert rest.prompt_token_ids == [*PROMPT, *kept, *closing]
        assert rest.max_tokens == left
        assert rest.params.min_tokens == min(left, max(0, min(3, max_tokens) - bound))
        assert (rest.seed, rest.stream) == (answer.request.seed, answer.request.stream)
        assert (answer.running, answer.is_cut) == (rest, False)


def test_thinking_without_a_bound_is_never_cut():
    answer = make_answer(9, None, [])
    think(answer, 9)
    assert not answer.is_cut
    assert answer.finish_reason == "length"


def test_an_answer_that_does_not_think_is_never_cut():
    answer = make_answer(9, 2, [60])
    for _ in range(8):
        piece = answer.take(TokenUpdate([LETTER], (), None, None))
        assert not answer.is_cut
        assert piece.num_tokens == answer.text.num_tokens
    assert answer.text.num_reasoning_tokens == 0
