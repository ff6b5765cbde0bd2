"""Steps on a GPU: graphs replay the bits of eager steps, nothing waits, and memory is shared."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.gguf_files import tiny_model
from tiercel.engine.graphs import buckets
from tiercel.llm import LLM
from tiercel.params import SamplingParams

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 250 for j in range(5 + 9 * i)]} for i in range(7)]
MIXED = [
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=30),
    SamplingParams(temperature=0, presence_penalty=1.0, max_tokens=30),
    SamplingParams(top_k=5, min_p=0.1, seed=2, max_tokens=30, logprobs=3),
    SamplingParams(logit_bias={5: 3.0}, min_tokens=5, seed=3, max_tokens=30),
    SamplingParams(
        allowed_token_ids=list(range(50)), repetition_penalty=1.2, max_tokens=30, seed=4
    ),
    SamplingParams(bad_words=["the"], temperature=0, max_tokens=30),
    SamplingParams(seed=9, max_tokens=30, prompt_logprobs=1),
]


def test_buckets_cover_every_size():
    sizes = buckets(256)
    assert sizes[:4] == [1, 2, 4, 8]
    assert sizes[-1] == 256
    assert all(b - a <= max(4, a // 3 + 8) for a, b in pairwise(sizes))
    assert buckets(1) == [1]
    assert buckets(5) == [1, 2, 4, 5]
    assert buckets(1000)[-1] == 256


@pytest.fixture
def path(tmp_path):
    return tiny_model(tmp_path / "m.gguf", metadata={"llama.context_length": 512})


def open_on_gpu(path, **options):
    return LLM(path, device="cuda", gpu_memory_utilization=0.2, max_num_seqs=32, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_replay_has_the_bits_of_an_eager_step(path, count):
    params = SamplingParams(temperature=0, max_tokens=70, logprobs=20, ignore_eos=True)

    def run(llm):
        outputs = llm.generate(PROMPTS[:count], params)
        return [output.outputs[0].logprobs for output in outputs]

    with open_on_gpu(path) as llm:
        steps = llm._engine.runner.decode_steps
        assert len(steps._graphs) == len(buckets(32))
        replayed = run(llm)
        steps._graphs = {}
        assert run(llm) == replayed


LONG = [{"prompt_token_ids": [(3 * i + j) % 250 for j in range(17 + 40 * i)]} for i in range(8)]


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", [slice(0, 1), slice(3, 4), slice(1, 5), slice(0, 8)], ids=str)
def test_a_replayed_prompt_has_the_bits_of_an_eager_one(path, chosen, monkeypatch):
    """Alone or some together, whole or in chunks, on blocks of their own or cached ones."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=20, ignore_eos=True)

    def run(llm):
        outputs = llm.generate(LONG[chosen], params) + llm.generate(LONG[chosen], params)
        assert not llm._engine.has_work
        return [output.outputs[0].logprobs for output in outputs]

    monkeypatch.setenv("TIERCEL_PROMPT_GRAPH", "1")
    results = []
    for graphs in ("1", "0"):
        monkeypatch.setenv("TIERCEL_CUDA_GRAPH", graphs)
        with open_on_gpu(path, max_num_batched_tokens=400) as llm:
            steps = llm._engine.runner.prompt_steps
            assert steps.sizes[-1] == 384
            assert len(steps._graphs) == (len(steps.sizes) if graphs == "1" else 0)
            results.append(run(llm))
    assert results[0] == results[1]


@pytest.mark.gpu
def test_a_padded_prompt_is_near_an_unpadded_one(path, monkeypatch):
    monkeypatch.setenv("TIERCEL_PROMPT_GRAPH", "1")
    with open_on_gpu(path) as llm:
        steps = llm._engine.runner.prompt_steps
        prompt = LONG[5]["prompt_token_ids"]
        padded = llm.logits(prompt)
        steps.sizes = []
        assert abs(llm.logits(prompt) - padded).max() < 0.02 * abs(padded).max()


@pytest.mark.gpu
def test_graphs_can_be_switched_off(path, monkeypatch):
    monkeypatch.setenv("TIERCEL_CUDA_GRAPH", "0")
    with open_on_gpu(path) as llm:
        assert not llm._engine.runner.decode_steps._graphs
        (eager,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=20))
    monkeypatch.setenv("TIERCEL_CUDA_GRAPH", "1")
    with open_on_gpu(path) as llm:
        (replayed,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=20))
    assert eager.outputs[0].token_ids == replayed.outputs[0].token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", ["0", "1"])
def test_no_step_waits_for_the_device(path, monkeypatch, overlap):
    """PyTorch raises where anything within a step waits; mixed parameters take every stage."""
    monkeypatch.setenv("TIERCEL_SYNC_DEBUG", "1")
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    with open_on_gpu(path) as llm:
        outputs = llm.generate(PROMPTS, MIXED)
        llm.logits([1, 2, 3])
    assert all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs)


@pytest.mark.gpu
def test_sync_debug_finds_a_wait(path, monkeypatch):
    monkeypatch.setenv("TIERCEL_SYNC_DEBUG", "1")
    with open_on_gpu(path) as llm:
        sampler = llm._engine.runner.sampler
        apply = sampler._process
        sampler._process = lambda logits, *rest: (logits.sum().item(), apply(logits, *rest))
        with pytest.raises(RuntimeError, match="synchronizing"):
            llm.generate(PROMPTS[0], SamplingParams(top_k=5, seed=1))


@pytest.mark.gpu
def test_overlap_changes_no_answer(path, monkeypatch):
    answers = []
    for overlap in ("0", "1"):
        monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
        with open_on_gpu(path) as llm:
            outputs = llm.generate(PROMPTS, MIXED)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.gpu
def test_two_engines_side_by_side(path):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with open_on_gpu(path) as first, open_on_gpu(path) as second:
        (a,), (b,) = first.generate(PROMPTS[2], params), second.generate(PROMPTS[2], params)
        assert a.outputs[0].token_ids == b.outputs[0].token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["forward", "logits"])
def test_a_step_without_memory_fails_its_newest_request_alone(path, place):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with open_on_gpu(path) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
        model = llm._engine.runner.model
        real, calls = getattr(model, place), []

        def failing(*arguments):
            calls.append(1)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("injected")
            return real(*arguments)

        setattr(model, place, failing)
        outputs = llm.generate(PROMPTS, params)
        setattr(model, place, real)
        reasons = [o.outputs[0].stop_reason for o in outputs]
        assert reasons == [None] * 6 + ["out_of_memory"]
        assert [o.outputs[0].token_ids for o in outputs][:6] == expected[:6]
        for allocator in llm._engine.scheduler.cache.allocators:
            assert allocator.num_free == allocator.num_blocks - 1


@pytest.mark.gpu
def test_nothing_compiles_once_the_model_is_loaded(tmp_path, monkeypatch):
    """Neither Triton nor NVRTC: not for any length, any option, nor a prefix hit."""
    path = tiny_model(tmp_path / "m.gguf", metadata={"llama.context_length": 4096})

    def refuse(*_arguments, **_options):
        raise AssertionError("compiled after loading")

    with open_on_gpu(path) as llm:
        monkeypatch.setattr("triton.runtime.jit.JITFunction._do_compile", refuse)
        monkeypatch.setattr("tiercel.kernels.rtc.compile_cubin", refuse)
        greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        for length in (1, 2, 7, 16, 17, 63, 64, 65, 129, 300, 1000, 2049, 4000):
            llm.generate({"prompt_token_ids": [i % 250 for i in range(length)]}, greedy)
        llm.generate(PROMPTS, MIXED)
        llm.generate([PROMPTS[i % 7] for i in range(40)], greedy)
