"""`LLM.embed`: vectors instead of answers."""

import numpy as np
import pytest

from tests.gguf_files import tiny_model
from tests.llm.test_busy_batch import run_alone
from tests.tiny_llm import DATA, assert_idle, open_tiny
from tiercel.errors import UnsupportedModelError


def hidden_mean(llm, text):
    """The vector by another way: from the logits' own hidden states, one prompt at a time."""
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
    """Before its length becomes 1, which hides every scale."""
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
