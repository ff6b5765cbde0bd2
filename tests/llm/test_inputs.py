"""Prompts and parameters of `LLM` on tiny models: which are taken, which are refused."""

import numpy as np
import pytest

from tests.tiny_llm import BOS, DATA, assert_idle, greedy, ids_of, open_tiny
from tiercel.errors import ArgumentError, ContextLengthError, InvalidRequestError
from tiercel.params import SamplingParams
from tiercel.request.output import RequestOutput


def test_a_string_a_list_and_ids_mean_the_same(llm):
    (single,) = llm.generate("the thin man", greedy())
    ids = llm.encode("the thin man", add_special_tokens=True)
    assert isinstance(single, RequestOutput)
    assert (single.prompt, single.prompt_token_ids, single.finished) == ("the thin man", ids, True)
    assert ids[0] == BOS
    (from_ids,) = llm.generate({"prompt_token_ids": ids}, greedy())
    assert (from_ids.prompt, from_ids.prompt_token_ids) == (None, ids)
    several = llm.generate(["the thin man", {"prompt_token_ids": ids}, "a"], greedy())
    assert ids_of([single]) == ids_of([from_ids]) == ids_of(several[:1]) == ids_of(several[1:2])
    assert [output.prompt for output in several] == ["the thin man", None, "a"]
    assert llm.generate([]) == []


def test_ids_of_numpy_are_integers_afterwards(llm):
    array = np.array([5, 6, 7], dtype=np.int64)
    (output,) = llm.generate({"prompt_token_ids": array}, greedy(1))
    assert output.prompt_token_ids == [5, 6, 7]
    assert {type(i) for i in output.prompt_token_ids} == {int}


def test_one_parameter_set_each(llm):
    params = [greedy(3), SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True), greedy(1)]
    outputs = llm.generate(["a", "b", "c"], params)
    lengths = [[len(answer.token_ids) for answer in output.outputs] for output in outputs]
    assert lengths == [[3], [5, 5], [1]]
    for prompt, own, output in zip(["a", "b", "c"], params, outputs, strict=True):
        assert ids_of(llm.generate(prompt, own)) == ids_of([output])


def test_a_length_mismatch_is_refused(llm):
    with pytest.raises(ArgumentError, match="2 prompts but 3 sampling parameters"):
        llm.generate(["a", "b"], [greedy()] * 3)


@pytest.mark.parametrize("params", [3, [3], ["x"], {"n": 1}])
def test_what_is_no_parameter_set_is_refused(llm, params):
    with pytest.raises(ArgumentError, match="SamplingParams"):
        llm.generate(["a"], params)
    with pytest.raises(ArgumentError, match="SamplingParams"):
        llm.stream("a", params)


@pytest.mark.parametrize(
    "prompt", [5, None, b"a", ["a"], {}, {"prompt": "a"}, {"prompt_token_ids": None}]
)
def test_what_is_no_prompt_is_refused(llm, prompt):
    with pytest.raises(ArgumentError, match="cannot be read"):
        llm.generate(["a", prompt])


@pytest.mark.parametrize("prompts", [5, None, 1.5])
def test_what_is_no_list_of_prompts_is_refused(llm, prompts):
    with pytest.raises(ArgumentError, match="cannot be read"):
        llm.generate(prompts)


@pytest.mark.parametrize(
    "wrong", [-1, 272, 2**31, 10**5000, 1.0, "5", None, True, [5]], ids=range(9)
)
@pytest.mark.parametrize("call", ["generate", "stream", "logits"])
def test_ids_out_of_range_are_refused(llm, call, wrong):
    prompt = [5, wrong] if call == "logits" else {"prompt_token_ids": [5, wrong]}
    with pytest.raises(InvalidRequestError, match="prompt_token_ids holds") as caught:
        getattr(llm, call)(prompt)
    assert caught.value.param == "prompt_token_ids"
    assert "0 to 271" in caught.value.hint


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop_token_ids", [272]), ("allowed_token_ids", [1, 300]), ("logit_bias", {1000: 1.0})],
)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_ids_of_parameters_out_of_range_are_refused_at_the_call(llm, call, field, value):
    with pytest.raises(InvalidRequestError, match=f"{field} holds"):
        getattr(llm, call)("a", SamplingParams(**{field: value}))


def test_an_empty_prompt_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        llm.generate({"prompt_token_ids": []})
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        llm.logits([])
    (output,) = llm.generate("", greedy(2))  # this model adds a BOS
    assert output.prompt_token_ids == [BOS]
    with open_tiny(DATA / "qwen3-tiny.gguf") as other:
        with pytest.raises(InvalidRequestError, match="prompt is empty"):
            other.generate("")
        assert_idle(other)


def test_nothing_runs_if_one_prompt_is_wrong(llm, monkeypatch):
    monkeypatch.setattr(llm._engine.runner, "launch", lambda plan: pytest.fail("a step ran"))
    for prompts in (["a", {"prompt_token_ids": [999]}], ["a", "\ud800"]):
        with pytest.raises(InvalidRequestError):
            llm.generate(prompts)
        assert_idle(llm)


@pytest.mark.parametrize("max_tokens", [None, 30, 31, 10**6])
def test_max_tokens_is_clamped_to_the_context(max_tokens):
    with open_tiny(max_model_len=40) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5] * 10}, greedy(max_tokens))
        assert len(output.outputs[0].token_ids) == 30
        assert output.outputs[0].finish_reason == "length"


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers():
    with open_tiny(max_model_len=40) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5] * 39}, greedy(None))
        assert len(output.outputs[0].token_ids) == 1
        for call in (llm.generate, llm.stream):
            with pytest.raises(ContextLengthError) as caught:
                call({"prompt_token_ids": [5] * 40})
            assert "prompt has 40 tokens but the context holds 40" in str(caught.value)
            assert "max_model_len up to 2048" in caught.value.hint
            assert caught.value.param == "prompt"
        with pytest.raises(ContextLengthError, match=r"100000 bytes .* 40 tokens"):
            llm.generate("x" * 100_000)
        assert llm.logits([5] * 40).shape == (40, 272)
        with pytest.raises(ContextLengthError, match="41 tokens"):
            llm.logits([5] * 41)
        assert_idle(llm)


def test_at_the_models_own_limit_the_hint_offers_no_more(llm):
    with pytest.raises(ContextLengthError) as caught:
        llm.generate({"prompt_token_ids": [5] * 2048})
    assert caught.value.hint == "Shorten the prompt."
