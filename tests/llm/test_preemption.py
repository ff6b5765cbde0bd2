"""Requests that give way to older ones change no answer."""

import numpy as np
import pytest

from tests.tiny_llm import assert_idle, greedy, ids_of, open_tiny
from tiercel.engine import build as engine_module
from tiercel.errors import OutOfMemoryError
from tiercel.models.decoder import Decoder
from tiercel.params import SamplingParams


def with_few_blocks(monkeypatch, num_blocks, **options):
    monkeypatch.setattr(Decoder, "block_size", 8)
    monkeypatch.setattr(engine_module, "cache_blocks", lambda groups, **sizes: [num_blocks])
    llm = open_tiny(max_model_len=64, **options)
    preempt, counted = llm._engine.scheduler._preempt, []
    llm._engine.scheduler._preempt = lambda request: (counted.append(1), preempt(request))
    return llm, counted


def test_preemption_changes_no_answer(monkeypatch):
    params = SamplingParams(
        temperature=1.0, seed=1, n=2, max_tokens=30, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    prompts = [{"prompt_token_ids": list(range(i, i + 12))} for i in range(4)]
    outputs = {}
    for num_blocks in (100, 9):
        llm, counted = with_few_blocks(monkeypatch, num_blocks, max_num_batched_tokens=16)
        outputs[num_blocks] = llm.generate(prompts, params)
        assert bool(counted) == (num_blocks == 9)
        assert_idle(llm)
    for ample, tight in zip(outputs[100], outputs[9], strict=True):
        assert ids_of([ample]) == ids_of([tight])
        assert len(tight.prompt_logprobs) == len(ample.prompt_logprobs) == 12
        for mine, theirs in zip(tight.prompt_logprobs[1:], ample.prompt_logprobs[1:], strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        for mine, theirs in zip(tight.outputs, ample.outputs, strict=True):
            assert [entry.token_id for entry in mine.logprobs] == mine.token_ids
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)


def test_preemption_changes_no_logits(monkeypatch):
    llm, counted = with_few_blocks(monkeypatch, 9, max_num_batched_tokens=5)
    ids = list(range(40))
    expected = llm.logits(ids)
    assert not counted
    for i, _ in enumerate(llm.stream({"prompt_token_ids": [5] * 8}, greedy(50))):
        if i == 10:  # the stream is older: the prompt is preempted half done
            logits = llm.logits(ids)
    assert counted
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=1e-4, equal_nan=False)


def test_a_request_that_can_never_fit_leaves_nothing_behind(monkeypatch):
    llm, _ = with_few_blocks(monkeypatch, 5)
    with pytest.raises(OutOfMemoryError, match="need 44 tokens of cache but it holds 32"):
        llm.generate([{"prompt_token_ids": [1] * 4}, {"prompt_token_ids": [1] * 40}], greedy(4))
    assert_idle(llm)
    assert len(llm.generate("a", greedy(4))[0].outputs[0].token_ids) == 4
