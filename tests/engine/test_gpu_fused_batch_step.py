"""Steps of a few requests as one kernel, in an engine."""

from __future__ import annotations

import pytest

from tests.engine.test_gpu_fused_layer_tail import NMSE, PROMPTS, answers, logits_behind, open_llm
from tests.engine.wide_model import write_wide_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_wide_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(autouse=True)
def _switches(monkeypatch):
    """A lone token goes this way too; a prompt found in the cache has keys of other products."""
    monkeypatch.setenv("TIERCEL_MEGAKERNEL", "0")
    monkeypatch.setenv("TIERCEL_PREFIX_CACHE", "0")


def test_logits_are_close_to_those_of_the_layer_tail(path, monkeypatch):
    prompts = [PROMPTS[2]] * 3
    with open_llm(path) as llm:
        assert llm._engine.runner.model.fused_layer_tail.step is None
        expected = logits_behind(llm, prompts)
    monkeypatch.setenv("TIERCEL_BATCH_STEP", "1")
    with open_llm(path) as llm:
        assert llm._engine.runner.model.fused_layer_tail.step is not None
        found = logits_behind(llm, prompts)
    nmse = (found - expected).square().sum(1) / expected.square().sum(1)
    assert 0 < nmse.max().item() <= NMSE


def test_replays_eager_steps_and_batches_of_any_size_have_the_same_bits(path, monkeypatch):
    monkeypatch.setenv("TIERCEL_BATCH_STEP", "1")
    with open_llm(path) as llm:
        replayed = answers(llm, PROMPTS)
        (alone,) = answers(llm, [PROMPTS[1]])
        together = answers(llm, [PROMPTS[1]] * 3)
        assert [a.logprobs for a in together] == [alone.logprobs] * 3
        monkeypatch.setattr(llm._engine.runner.decode_steps, "_graphs", {})
        eager = answers(llm, PROMPTS)
    assert [a.token_ids for a in eager] == [a.token_ids for a in replayed]
    assert [a.logprobs for a in eager] == [a.logprobs for a in replayed]
