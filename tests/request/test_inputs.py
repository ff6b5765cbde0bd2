"""What a request becomes of a prompt and its parameters, at every bound, without a model."""

import itertools

import pytest

from tests.tiny_llm import LLAMA
from tiercel.errors import ContextLengthError, InvalidRequestError
from tiercel.grammar.spec import GrammarSpec
from tiercel.models.source import open_source
from tiercel.params import LIMITS, SamplingParams
from tiercel.request.inputs import InputProcessor
from tiercel.seeds import mix_key

CONTEXT, VOCAB = 12, 272
OWN_STOPS = {269, 271}  # of the tiny model


@pytest.fixture(scope="module")
def tokenizer():
    return open_source(LLAMA).tokenizer(None)


@pytest.fixture
def inputs(tokenizer):
    return InputProcessor(
        tokenizer, vocab_size=VOCAB, max_position=50, max_model_len=CONTEXT, seed=9
    )


@pytest.mark.parametrize("asked", [None, 1, 5, 11, 12, 10**6])
def test_an_answer_gets_what_is_asked_or_what_is_left(inputs, asked):
    params = SamplingParams(max_tokens=asked)
    for length in range(1, CONTEXT + 3):
        if length >= CONTEXT:
            with pytest.raises(ContextLengthError, match=f"{length} tokens but .* {CONTEXT} "):
                inputs.request([1] * length, params, 0)
            continue
        left = CONTEXT - length
        expected = left if asked is None else min(asked, left)
        assert inputs.request([1] * length, params, 0).max_tokens == expected


def test_a_prompt_that_is_read_alone_may_fill_the_context(inputs):
    for length in (CONTEXT - 1, CONTEXT):
        request = inputs.request([1] * length, SamplingParams(), 0, max_tokens=0)
        assert request.max_tokens == 0
    with pytest.raises(ContextLengthError):
        inputs.request([1] * (CONTEXT + 1), SamplingParams(), 0, max_tokens=0)
    with pytest.raises(InvalidRequestError, match="empty"):
        inputs.request([], SamplingParams(), 0, max_tokens=0)


def test_a_text_is_refused_by_its_bytes_before_it_is_tokenized(inputs):
    most = CONTEXT * LIMITS.max_prompt_bytes_per_token
    for text in ("x" * most, "é" * (most // 2)):
        assert len(inputs.prompt_ids(text, parse_special=False)) > 1
        with pytest.raises(ContextLengthError, match=f"prompt has {most + 1} bytes"):
            inputs.prompt_ids(text + "x", parse_special=False)


@pytest.mark.parametrize("place", ["prompt", "logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_token_ids_end_with_the_vocabulary(inputs, place):
    def ask(token_id):
        if place == "prompt":
            return inputs.prompt_ids({"prompt_token_ids": [0, token_id]}, parse_special=False)
        value = {token_id: 1.0} if place == "logit_bias" else [token_id]
        return inputs.request([1], SamplingParams(**{place: value}), 0)

    for token_id in (0, VOCAB - 1):
        ask(token_id)
    with pytest.raises(InvalidRequestError, match=str(VOCAB)) as caught:
        ask(VOCAB)
    assert caught.value.param == ("prompt_token_ids" if place == "prompt" else place)
    assert caught.value.hint == f"Token ids are 0 to {VOCAB - 1}."


@pytest.mark.parametrize("own", [(), (5,), (5, 271)])
@pytest.mark.parametrize("has_grammar", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_what_ends_an_answer(inputs, own, has_grammar, ignore_eos):
    """Its own stop tokens always; the model's, unless they are ignored, and always with a form."""
    grammar = GrammarSpec('{"grammars": []}') if has_grammar else None
    params = SamplingParams(stop_token_ids=own, ignore_eos=ignore_eos)
    request = inputs.request([1], params, 0, grammar=grammar)
    expected = set(own) | (OWN_STOPS if has_grammar or not ignore_eos else set())
    assert request.stop_ids == expected
    assert request.grammar is grammar


def test_each_request_has_a_name_and_noise_of_its_own(inputs):
    made = [inputs.request([1], SamplingParams(seed=seed), stream, wants_logits=stream == 1)
            for seed, stream in itertools.product((None, 0, -7), (0, 1, 2))]  # fmt: skip
    assert len({request.request_id for request in made}) == len(made)
    assert [request.stream for request in made] == [0, 1, 2] * 3
    assert [request.wants_logits for request in made] == [False, True, False] * 3
    for number, request in enumerate(made):
        given = request.params.seed
        assert request.seed == (mix_key(9, 0, number) if given is None else given)
    keys = {mix_key(request.seed, request.stream) for request in made}
    assert len(keys) == len(made)
