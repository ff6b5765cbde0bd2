"""Steps of a few tokens through the kernel between attentions, in an engine."""

from __future__ import annotations

import pytest
import torch

from tests.engine.wide_model import open_wide, write_wide_model
from tiercel.params import SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [
    {"prompt_token_ids": [(37 * i + 11 * j) % 500 for j in range(length)]}
    for i, length in enumerate((1, 5, 200, 17, 64))
]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=20)
NMSE = 1e-4  # of two ways that each round inputs to float16, over four layers


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_wide_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module", autouse=True)
def _switches():
    """A lone token goes this way too; a prompt found in the cache has keys of other products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERCEL_DECODE_CHAIN", "1")
        patch.setenv("TIERCEL_MEGAKERNEL", "0")
        patch.setenv("TIERCEL_PREFIX_CACHE", "0")
        yield


def open_llm(path, **options):
    return open_wide(path, max_num_seqs=8, **options)


@pytest.fixture(scope="module")
def llm(path, _switches):
    with open_llm(path) as llm:
        yield llm


def answers(llm, prompts):
    return [output.outputs[0] for output in llm.generate(prompts, GREEDY)]


def logits_behind(llm, prompts):
    """Logits of the first step of single tokens after some prompts."""
    steps, rows = llm._engine.runner.decode_steps, []
    real = steps.__class__.__call__

    def spy(self, *arguments):
        result = real(self, *arguments)
        rows.append(result[1][: len(prompts)].clone())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.__class__, "__call__", spy)
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    return next(found for found in rows if found.shape[0] == len(prompts))


def test_logits_are_close_to_those_of_single_kernels(llm, path, monkeypatch):
    prompts = [PROMPTS[2]] * 3
    assert llm._engine.runner.model.fused_layer_tail is not None
    found = logits_behind(llm, prompts)
    monkeypatch.setenv("TIERCEL_DECODE_CHAIN", "0")
    with open_llm(path) as other:
        assert other._engine.runner.model.fused_layer_tail is None
        expected = logits_behind(other, prompts)
    assert not torch.equal(found, expected)
    nmse = (found - expected).square().sum(1) / expected.square().sum(1)
    assert nmse.max().item() <= NMSE


def test_a_replay_has_the_bits_of_an_eager_step(llm, monkeypatch):
    replayed = answers(llm, PROMPTS)
    monkeypatch.setattr(llm._engine.runner.decode_steps, "_graphs", {})
    eager = answers(llm, PROMPTS)
    assert [a.token_ids for a in eager] == [a.token_ids for a in replayed]
    assert [a.logprobs for a in eager] == [a.logprobs for a in replayed]


def test_a_lone_token_has_the_bits_that_it_has_in_a_batch(llm):
    """Prompts of so few tokens that they go the same way, alone and together."""
    (alone,) = answers(llm, [PROMPTS[1]])
    together = answers(llm, [PROMPTS[1]] * 3)
    assert [a.logprobs for a in together] == [alone.logprobs] * 3


def test_verified_drafts_give_the_text_of_plain_decoding(llm, path):
    """Two rows of five places: as many tokens as the kernel takes, or fewer."""
    tokens = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    plain = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:2], tokens)]
    with open_llm(path, spec="ngram", num_spec_tokens=4) as drafted:
        assert [o.outputs[0].token_ids for o in drafted.generate(PROMPTS[:2], tokens)] == plain


def test_exact_leaves_it_out(path, monkeypatch):
    monkeypatch.setenv("TIERCEL_EXACT", "1")
    with open_llm(path) as other:
        assert other._engine.runner.model.fused_layer_tail is None


def test_two_engines_side_by_side(llm, path):
    """Their kernels want all processors at once, on two streams."""
    (expected,) = answers(llm, PROMPTS[2:3])
    with open_llm(path) as second:
        engines, requests = (llm._engine, second._engine), []
        for engine in engines:
            requests.append(llm._inputs.request(PROMPTS[2]["prompt_token_ids"], GREEDY, 0))
            engine.submit(requests[-1])
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        while any(engine.has_work for engine in engines):
            for engine, stream in zip(engines, streams, strict=True):
                with torch.cuda.stream(stream):
                    engine.step()
    assert [r.output_token_ids for r in requests] == [list(expected.token_ids)] * 2
