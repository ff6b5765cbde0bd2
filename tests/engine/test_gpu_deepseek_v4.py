"""DeepSeek-V4 on a GPU: the tiny checkpoint's answers, from graphs and eager, with drafts."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.dsv4_files import DATA, TINY
from tests.llm.test_speculation import counted
from tests.tiny_llm import open_on_gpu
from tiercel.llm import LLM
from tiercel.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=2)
ECHO = [{"prompt_token_ids": [(5 * i + j) % (7 + i) + 3 for j in range(30 + 40 * i)]}
        for i in range(6)]  # fmt: skip
EXACT = {"dtype": "float32", "kv_dtype": "float32"}


@pytest.fixture(scope="module")
def expected():
    return load_file(DATA / "expected.safetensors")


def prompts(expected):
    return [{"prompt_token_ids": expected[f"p{i}.tokens"].tolist()} for i in range(3)]


def ids_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.gpu
def test_logits_and_greedy_ids_are_the_references(expected):
    with open_on_gpu(TINY, **EXACT) as llm:
        for i, prompt in enumerate(prompts(expected)):
            logits = torch.from_numpy(llm.logits(prompt["prompt_token_ids"]))
            torch.testing.assert_close(logits, expected[f"p{i}.logits"], rtol=0, atol=2e-4)
        found = ids_of(llm.generate(prompts(expected), GREEDY))
    assert found == [expected[f"p{i}.greedy"].tolist() for i in range(3)]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_equals_eager_for_64_steps(expected, dtype, kv_dtype, monkeypatch):
    options = {"dtype": dtype, "kv_dtype": kv_dtype}
    with open_on_gpu(TINY, **options) as llm:
        replayed = llm.generate(prompts(expected), LONG)
    monkeypatch.setenv("TIERCEL_CUDA_GRAPH", "0")
    with open_on_gpu(TINY, **options) as llm:
        eager = llm.generate(prompts(expected), LONG)
    assert ids_of(replayed) == ids_of(eager)
    for left, right in zip(replayed, eager, strict=True):
        assert left.outputs[0].logprobs == right.outputs[0].logprobs


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["fp8", "float32"])
def test_the_cache_rests_as_on_a_cpu(expected, kv_dtype):
    """Encoded entries are the same numbers on both devices, and so nearly are the logits."""
    ids = expected["p1.tokens"].tolist()
    with open_on_gpu(TINY, dtype="float32", kv_dtype=kv_dtype) as llm:
        found = llm.logits(ids)
    with LLM(TINY, device="cpu", dtype="float32", kv_dtype=kv_dtype) as llm:
        right = llm.logits(ids)
    cosine = (found * right).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(right, axis=1)
    assert np.isfinite(found).all()
    assert cosine.min() > (0.9999 if kv_dtype == "float32" else 0.98)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ngram", "mtp", "hybrid"])
@pytest.mark.parametrize("count", [1, 6])
def test_drafts_change_no_answer(count, method):
    with open_on_gpu(TINY, max_num_seqs=8, **EXACT) as llm:
        plain = ids_of(llm.generate(ECHO[:count], LONG))
    options = EXACT | {"spec": method, "num_spec_tokens": 3, "max_num_seqs": 8}
    with open_on_gpu(TINY, **options) as llm:
        if llm._engine.scheduler.policy is not None:
            llm._engine.scheduler.policy.costs = ()
        counts = counted(llm)
        drafted = ids_of(llm.generate(ECHO[:count], LONG))
    assert drafted == plain
    assert counts["drafts"], "no draft was verified"
