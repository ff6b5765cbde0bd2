"""Drafts of real traffic are those of the oracle, whoever had the row before."""

import pytest

from tests.llm.test_speculation import some_prompts
from tests.tiny_llm import DATA, open_on_gpu, open_tiny
from tiercel.config import SpecConfig
from tiercel.params import SamplingParams
from tiercel.reference.ngram_index import FirstOccurrences


def oracle_draft(prompt, answer, count, config):
    """Up to `count` tokens that followed the answer's end where it first stood."""
    index = FirstOccurrences(config.min_ngram, config.max_ngram)
    for token in prompt:
        index.append(0, token)
    for token in answer:
        index.append(1, token)
    hit = index.search(answer)
    return () if hit is None else tuple(hit.tokens[hit.start : hit.start + count])


def check_traffic(llm):
    """Run requests in few rows, one after the other in each, and look at every draft."""
    engine, answers, seen = llm._engine, {}, []
    engine.runner.sampler._theta.zero_()  # draft however often they are wrong
    config: SpecConfig = llm.config.spec
    collect = engine.runner.collect

    def watched(launch):
        results = collect(launch)
        for draws in launch.sampled:
            for request in draws.requests:
                answer = answers.setdefault(request, [])
                answer += results[request].token_ids
                left = request.max_tokens - len(answer) - 1
                count = max(0, min(request.draft_limit, left))
                prompt = request.prompt_token_ids
                expected = oracle_draft(prompt, answer, count, config)
                assert results[request].next_drafts == expected
                seen.append(len(expected))
        return results

    engine.runner.collect = watched
    prompts = [*some_prompts(), *some_prompts()[::-1]]
    params = [
        SamplingParams(temperature=0.5, seed=i, max_tokens=50, ignore_eos=True, num_spec_tokens=k)
        for i, k in enumerate([None, 3] * 6)
    ]
    llm.generate(prompts, params)
    assert sum(map(bool, seen)) > 50


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_drafts_are_those_of_the_oracle(monkeypatch, overlap):
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    with open_tiny(DATA / "qwen3-tiny.gguf", spec="ngram", max_num_seqs=3) as llm:
        check_traffic(llm)


@pytest.mark.gpu
def test_drafts_are_those_of_the_oracle_on_a_gpu():
    sizes = {"max_num_seqs": 3, "dtype": "float32"}
    with open_on_gpu(DATA / "qwen3-tiny.gguf", spec="ngram", **sizes) as llm:
        check_traffic(llm)
