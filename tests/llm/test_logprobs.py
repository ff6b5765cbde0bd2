"""Log-probabilities and logits of `LLM`, of answers and of prompts."""

import numpy as np
import pytest

from tests.parity import log_softmax
from tests.tiny_llm import DATA, NAMES, assert_idle, greedy, open_tiny
from tiercel.params import SamplingParams


def test_logprobs_are_those_of_the_logits(llm):
    params = SamplingParams(
        seed=2, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=2, temperature=0.8
    )
    (output,) = llm.generate("the thin man", params)
    answer, prompt = output.outputs[0], output.prompt_token_ids
    expected = log_softmax(llm.logits(prompt + answer.token_ids))
    assert output.prompt_logprobs[0] is None
    entries = output.prompt_logprobs[1:] + answer.logprobs
    for place, entry in enumerate(entries):
        assert entry.token_id == (prompt + answer.token_ids)[place + 1]
        assert entry.logprob == pytest.approx(expected[place, entry.token_id], abs=1e-4)
        assert len(entry.top) == (2 if place < len(prompt) - 1 else 3)
        values = [logprob for _, logprob in entry.top]
        assert values == sorted(values, reverse=True)
        assert values[0] == pytest.approx(expected[place].max(), abs=1e-4)
        for token_id, logprob in entry.top:
            assert logprob == pytest.approx(expected[place, token_id], abs=1e-4)
    assert answer.cumulative_logprob == pytest.approx(sum(e.logprob for e in answer.logprobs))


def test_logprobs_are_none_unless_asked_for(llm):
    (output,) = llm.generate("a", greedy(3))
    answer = output.outputs[0]
    assert (output.prompt_logprobs, answer.logprobs, answer.cumulative_logprob) == (None,) * 3
    (output,) = llm.generate("a", greedy(3, logprobs=0))
    assert [entry.top for entry in output.outputs[0].logprobs] == [()] * 3


@pytest.mark.parametrize("chunk", [1, 2, 5, 2048])
def test_prompt_logprobs_of_any_length_in_any_chunks(llm, chunk):
    ids = llm.encode("the thin man", add_special_tokens=True)
    (whole,) = llm.generate({"prompt_token_ids": ids}, greedy(2, prompt_logprobs=1))
    with open_tiny(max_num_batched_tokens=chunk) as other:
        for length in range(1, len(ids) + 1):
            prompt = {"prompt_token_ids": ids[:length]}
            (output,) = other.generate(prompt, greedy(2, prompt_logprobs=1))
            assert len(output.prompt_logprobs) == length
            pairs = zip(output.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=False)
            for mine, theirs in pairs:
                assert mine.token_id == theirs.token_id
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_logits_do_not_depend_on_chunks(name):
    ids = np.random.default_rng(3).integers(0, 256, 300).tolist()
    with open_tiny(DATA / f"{name}.gguf") as llm:
        whole = llm.logits(ids)
        assert (whole.shape, whole.dtype) == ((300, 272), np.float32)
        np.testing.assert_allclose(
            llm.logits(ids[:70]), whole[:70], atol=2e-4, rtol=1e-4, equal_nan=False
        )
    for chunk in (3, 64, 100):
        with open_tiny(DATA / f"{name}.gguf", max_num_batched_tokens=chunk) as llm:
            np.testing.assert_allclose(
                llm.logits(ids), whole, atol=2e-4, rtol=1e-4, equal_nan=False
            )
            assert_idle(llm)


def test_logits_of_a_whole_context_in_a_cache_for_one():
    with open_tiny(max_model_len=128, max_num_seqs=1) as llm:
        assert llm.logits([5] * 128).shape == (128, 272)
        assert_idle(llm)
