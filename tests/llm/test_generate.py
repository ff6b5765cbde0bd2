"""Answers of `LLM.generate` on tiny models: tokens, ends, alone and together."""

import numpy as np
import pytest
import torch

from tests.gguf_files import NUM_TOKENS, tiny_model
from tests.tiny_llm import BOS, DATA, EOS, NAMES, PROMPTS, assert_idle, greedy, ids_of, open_tiny
from tiercel.params import SamplingParams
from tiercel.runner import prompt_readback as reads_module

RANDOM = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}


def test_answers_of_one_prompt(llm):
    params = SamplingParams(n=4, seed=3, **RANDOM)
    (output,) = llm.generate("the thin man", params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    answers = ids_of([output])[0]
    assert len({tuple(answer) for answer in answers}) == 4
    assert ids_of(llm.generate("the thin man", params)) == [answers]
    fewer = SamplingParams(n=2, seed=3, **RANDOM)
    assert ids_of(llm.generate("the thin man", fewer)) == [answers[:2]]
    others = llm.generate("the thin man", SamplingParams(n=4, seed=4, **RANDOM))
    assert all(a != b for a, b in zip(ids_of(others)[0], answers, strict=True))


def test_alone_is_as_in_a_batch(llm):
    params = [SamplingParams(n=1 + i % 3, seed=i, **RANDOM) for i in range(len(PROMPTS))]
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate(p, own)[0] for p, own in zip(PROMPTS, params, strict=True)]
    assert ids_of(together) == ids_of(alone)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_mixed_lengths_equals_one_by_one(name):
    prompts = [{"prompt_token_ids": [5 + i] * length} for i, length in enumerate((1, 3, 64, 65, 9))]
    params = [greedy(length) for length in (20, 1, 7, 70, 12)]
    with open_tiny(DATA / f"{name}.gguf") as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate(p, own)[0] for p, own in zip(prompts, params, strict=True)]
    assert ids_of(together) == ids_of(alone)
    with open_tiny(DATA / f"{name}.gguf", max_num_batched_tokens=5, max_num_seqs=2) as llm:
        assert ids_of(llm.generate(prompts, params)) == ids_of(alone)
        assert_idle(llm)


def test_all_banned_is_an_error_of_that_answer(llm):
    stuck = greedy(allowed_token_ids=[7], logit_bias={7: -100})
    bad, good = llm.generate(["a", "a"], [stuck, greedy()])
    answer = bad.outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("error", "no_valid_token")
    assert (answer.token_ids, answer.text) == ([], "")
    assert ids_of([good]) == ids_of(llm.generate("a", greedy()))


def test_ids_that_stand_for_nothing_are_never_generated():
    with open_tiny(DATA / "gemma3-tiny.gguf") as llm:
        unused = llm.tokenizer.unused_ids
        assert unused
        params = SamplingParams(n=8, max_tokens=20, logit_bias=dict.fromkeys(unused, 50.0))
        (output,) = llm.generate("the", params)
    assert not set(unused) & {i for answer in output.outputs for i in answer.token_ids}


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory):
    """A model whose embedding of token 7 is NaN."""
    embedding = np.random.default_rng(0).normal(size=(NUM_TOKENS, 64))
    embedding[7] = np.nan
    path = tmp_path_factory.mktemp("broken") / "m.gguf"
    return tiny_model(path, tensors={"token_embd.weight": embedding})


@pytest.mark.reliability
def test_nan_weights_end_as_errors_and_touch_no_neighbour(broken_model):
    with open_tiny(broken_model) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in ([5, 6], [5, 7, 6], [8, 9, 10])]
        params = greedy(6, logprobs=1, prompt_logprobs=0)
        good, bad, other = llm.generate(prompts, params)
        answer = bad.outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("error", "nonfinite_logits")
        assert (answer.token_ids, answer.text, answer.logprobs) == ([], "", [])
        assert bad.prompt_logprobs is None
        assert ids_of([good, other]) == ids_of(llm.generate(prompts[::2], params))
        (delta,) = llm.stream(prompts[1], params)
        assert (delta.finish_reason, delta.stop_reason) == ("error", "nonfinite_logits")
        assert (delta.token_ids, delta.text, delta.logprobs) == ([], "", None)
        # NaN is also met in the middle of an answer.
        (later,) = llm.generate(prompts[0], greedy(6, allowed_token_ids=[7]))
        assert (later.outputs[0].token_ids, later.outputs[0].finish_reason) == ([7], "error")
        assert_idle(llm)


@pytest.mark.reliability
def test_nonfinite_logits_inside_the_prompt_are_an_error(llm, monkeypatch):
    def broken(logits, token_ids, count):
        logits[1:2] = float("inf")  # of one position; the last position is finite
        return right(logits, token_ids, count)

    right = reads_module.top_logprobs
    monkeypatch.setattr(reads_module, "top_logprobs", broken)
    (output,) = llm.generate("the thin man", greedy(3, prompt_logprobs=1))
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].stop_reason == "nonfinite_logits"
    assert output.prompt_logprobs is None


def test_defaults_are_16_tokens_and_a_stream_for_each_request():
    answers = []
    for seed in (0, 0, 7):
        with open_tiny(seed=seed) as llm:
            outputs = llm.generate(["the thin man"] * 2)
        for output in outputs:
            length = len(output.outputs[0].token_ids)
            assert 1 <= length <= 16
            assert output.outputs[0].finish_reason == ("length" if length == 16 else "stop")
        answers.append(ids_of(outputs))
    assert answers[0][0] != answers[0][1], "equal prompts without a seed sample differently"
    assert answers[0] == answers[1], "the same calls of the same engine seed repeat"
    assert answers[0] != answers[2]


@pytest.mark.parametrize("text", ["", "the thin man", "naïve 你好 😀", "<|im_end|>\0 x"])
def test_encode_and_decode(llm, text):
    ids = llm.encode(text)
    assert llm.decode(ids) == text
    assert BOS not in ids
    assert llm.encode(text, add_special_tokens=True) == [BOS, *ids]
    assert (EOS in llm.encode(text, parse_special=True)) == ("<|im_end|>" in text)


def test_metrics_count_tokens_and_seconds(llm):
    (output,) = llm.generate("the thin man", greedy(12, n=3))
    metrics = output.metrics
    assert metrics.num_prompt_tokens == len(output.prompt_token_ids)
    assert metrics.num_output_tokens == 36
    assert 0 < metrics.first_token_s < metrics.finished_s < 60


def test_request_ids_are_unique(llm):
    outputs = llm.generate(["a", "b"], greedy(1)) + llm.generate("a", greedy(1))
    assert len({output.request_id for output in outputs}) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_gradients_are_kept(dtype):
    with open_tiny(dtype=dtype) as llm:
        llm.generate("a", greedy(2))
        assert torch.is_grad_enabled()
        assert llm._engine.runner.config.dtype == getattr(torch, dtype)
