"""Requests with a grammar get a matcher; the others cost nothing."""

from dataclasses import replace

import pytest

from tests.tiny_llm import LLAMA
from tiercel.errors import InvalidRequestError
from tiercel.grammar.matchers import Matchers
from tiercel.grammar.spec import GrammarSpec
from tiercel.models.source import open_source
from tiercel.params import SamplingParams, StructuredOutputs
from tiercel.request.inputs import InputProcessor
from tiercel.text.tokenizer import Tokenizer

SOURCE = open_source(LLAMA)
VOCAB = SOURCE.config.vocab_size


def make_request(tokenizer, params):
    inputs = InputProcessor(tokenizer, vocab_size=VOCAB, max_position=64, max_model_len=64, seed=0)
    return inputs.request([5], params, 0)


def test_a_request_with_a_grammar_gets_a_matcher():
    tokenizer = SOURCE.tokenizer()
    matchers = Matchers(tokenizer, VOCAB)
    free = make_request(tokenizer, SamplingParams())
    assert matchers.make(free.grammar, free.stop_ids) is None
    assert matchers._vocabulary is None, "nobody has asked for it"
    bound = [
        make_request(tokenizer, SamplingParams(structured_outputs=StructuredOutputs(regex=regex)))
        for regex in ("a|b", "c")
    ]
    made = [matchers.make(request.grammar, request.stop_ids) for request in bound]
    (a,), (c,) = tokenizer.encode("a"), tokenizer.encode("c")
    assert [matcher.num_valid([a]) for matcher in made] == [1, 0]
    assert [matcher.num_valid([c]) for matcher in made] == [0, 1]


def test_a_grammar_that_cannot_be_enforced_is_refused():
    tokenizer = SOURCE.tokenizer()
    request = make_request(tokenizer, SamplingParams())
    request.grammar = GrammarSpec("{}")
    with pytest.raises(InvalidRequestError):
        Matchers(tokenizer, VOCAB).make(request.grammar, request.stop_ids)


def test_a_model_that_never_ends_an_answer_takes_no_grammar():
    data = SOURCE.tokenizer_data
    without = replace(data, eos_id=None, eot_id=None, tokens=tuple(f"{t}." for t in data.tokens))
    tokenizer = Tokenizer.from_gguf(replace(without, merges=(), token_types=(1,) * VOCAB))
    assert tokenizer.stop_ids == ()
    request = make_request(tokenizer, SamplingParams())
    request.grammar = GrammarSpec("{}")
    with pytest.raises(InvalidRequestError, match="ends an answer"):
        Matchers(tokenizer, VOCAB).make(request.grammar, request.stop_ids)
