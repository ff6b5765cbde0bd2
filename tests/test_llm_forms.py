"""Structured outputs, and embeddings instead of answers, through `LLM`."""

import json
import re

import numpy as np
import pytest

from tests.gguf_files import tiny_model
from tests.test_llm_busy import run_alone
from tests.tiny_llm import DATA, assert_idle, open_tiny
from tiercel.errors import InvalidRequestError, UnsupportedModelError
from tiercel.params import SamplingParams, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "maximum": 99, "minimum": 0},
        "b": {"enum": ["x", "y"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


def constrained(seed, **form):
    return SamplingParams(seed=seed, max_tokens=60, structured_outputs=StructuredOutputs(**form))


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_forms_hold_beside_free_answers(monkeypatch, overlap):
    """A grammar's rows wait for their last token; other rows keep the pace."""
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    params = [
        constrained(1, json=SCHEMA),
        SamplingParams(seed=2, max_tokens=30),
        constrained(3, regex="[ab]{3,5}c"),
        constrained(4, choice=["yes", "no"]),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(5)]
    with open_tiny() as llm:
        together = [o.outputs[0] for o in llm.generate(prompts, params)]
        alone = [
            llm.generate(prompt, own)[0].outputs[0]
            for prompt, own in zip(prompts, params, strict=True)
        ]
        assert_idle(llm)
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    value = json.loads(together[0].text)
    assert set(value) == {"a", "b"}
    assert re.fullmatch("[ab]{3,5}c", together[2].text)
    assert together[3].text in ("yes", "no")
    assert [o.finish_reason for o in together][:1] == ["stop"]
    assert len(together[4].token_ids) == 30


def test_a_form_that_cannot_be_is_refused_and_leaves_nothing_behind():
    with open_tiny() as llm:
        with pytest.raises(InvalidRequestError):
            llm.generate("a", constrained(1, json={"type": "nonsense"}))
        assert_idle(llm)


def hidden_mean(llm, text):
    """The vector computed differently: from the logits' hidden states, one prompt at a time."""
    runner, ids = llm._engine.runner, llm._inputs.prompt_ids(text, parse_special=False)
    seen = []
    real = runner.model.hidden_states
    runner.model.hidden_states = lambda hidden, rows: seen.append(real(hidden, rows)) or seen[-1]
    llm.embed(text)
    runner.model.hidden_states = real
    states = np.concatenate([piece.numpy() for piece in seen])
    assert len(states) in (1, len(ids))
    vector = states.mean(axis=0, dtype=np.float64)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize(("kind", "chunk"), [(1, 2048), (1, 4), (3, 2048), (3, 4)])
def test_vectors_of_an_embedding_model(tmp_path, kind, chunk):
    path = tiny_model(tmp_path / "m.gguf", metadata={"llama.pooling_type": kind})
    texts = ["the thin man", "a", "they ran and ran and ran"]
    with open_tiny(path, max_num_batched_tokens=chunk) as llm:
        vectors = llm.embed(texts)
        alone = np.concatenate([llm.embed(text) for text in texts])
        expected = np.stack([hidden_mean(llm, text) for text in texts])
        assert_idle(llm)
    assert vectors.shape == (3, llm.source.config.hidden_size)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(vectors, alone, atol=1e-5)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize("chunk", [2048, 7])
def test_a_mean_is_one_over_all_tokens_and_the_last_state_that_of_the_last(tmp_path, chunk):
    """Before its length is normalised to 1, which hides every scale."""
    path = tiny_model(tmp_path / "m.gguf", metadata={"llama.pooling_type": 1})
    with open_tiny(path, max_num_batched_tokens=chunk) as llm:
        runner, seen = llm._engine.runner, []
        real = runner.model.hidden_states
        runner.model.hidden_states = lambda *args: seen.append(real(*args)) or seen[-1]
        request = llm._inputs.embedding_request("they ran and ran and ran", "mean")
        run_alone(llm, request)
        runner.model.hidden_states = real
        states = np.concatenate([piece.numpy() for piece in seen])
        last = llm._inputs.embedding_request("they ran and ran and ran", "last")
        run_alone(llm, last)
    assert len(states) == len(request.prompt_token_ids) > 7
    np.testing.assert_allclose(request.embedding, states.mean(axis=0, dtype=np.float64), atol=1e-5)
    np.testing.assert_allclose(last.embedding, states[-1], atol=1e-5)


def test_a_model_that_pools_nothing_has_no_vectors():
    with open_tiny(DATA / "qwen3-tiny.gguf") as llm, pytest.raises(UnsupportedModelError):
        llm.embed("a")
