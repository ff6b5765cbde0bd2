"""Steps of two tokens through one kernel, in an engine: each request answers as it does alone."""

from __future__ import annotations

import pytest

from tests.engine.wide_model import open_wide, write_wide_model
from tiercel.layers.fused_decode_step import FusedDecodeStep
from tiercel.params import SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [[(37 * i + 11 * j) % 500 for j in range(length)] for i, length in enumerate((5, 200))]
GREEDY = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=20)
TOKENS = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_wide_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(autouse=True)
def _pairs(monkeypatch):
    """A prompt found in the cache has keys from other products: other bits."""
    monkeypatch.setenv("TIERCEL_PREFIX_CACHE", "0")
    monkeypatch.setenv("TIERCEL_MEGAKERNEL_PAIRS", "1")


@pytest.fixture
def sizes(monkeypatch):
    """The tokens of each step that the kernel takes while it is captured or runs eagerly."""
    seen, real = [], FusedDecodeStep.__call__

    def spy(self, x, batch):
        seen.append((batch.num_tokens, batch.num_reqs))
        return real(self, x, batch)

    monkeypatch.setattr(FusedDecodeStep, "__call__", spy)
    return seen


def answers(llm, prompts, params):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize("graphs", ["0", "1"])
def test_a_request_has_its_bits_beside_another(path, sizes, graphs, monkeypatch):
    """Its tokens and their logprobs do not change when the other arrives, nor when it ends."""
    monkeypatch.setenv("TIERCEL_CUDA_GRAPH", graphs)
    with open_wide(path, max_num_seqs=4) as llm:
        alone = [answers(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]
        assert answers(llm, PROMPTS, GREEDY) == alone
        shorter = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=20)
        tokens, logprobs = alone[0]
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], [shorter, GREEDY]
        )
        first, second = (output.outputs[0] for output in outputs)
        assert (first.token_ids, first.logprobs) == (tokens[:20], logprobs[:20])
        assert (second.token_ids, second.logprobs) == alone[1]
    assert (2, 2) in sizes


def test_a_draft_is_verified_with_the_bits_of_single_steps(path, sizes):
    """One draft a step: the answer is that of a model that drafts nothing."""
    with open_wide(path, max_num_seqs=4) as llm:
        plain = [answers(llm, [prompt], TOKENS)[0] for prompt in PROMPTS]
    with open_wide(path, max_num_seqs=4, spec="ngram", num_spec_tokens=1) as llm:
        assert [answers(llm, [prompt], TOKENS)[0] for prompt in PROMPTS] == plain
        assert llm.draft_counts.num_draft_tokens > 0
    assert (2, 1) in sizes
