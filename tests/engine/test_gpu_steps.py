"""Steps on a GPU: graphs replay the bits of eager steps, nothing waits, and memory is shared."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch

from tests.gguf_files import tiny_model
from tests.tiny_llm import open_on_gpu
from tiercel.params import SamplingParams
from tiercel.runner.decode_graphs import buckets

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


def open_for_many(path, **options):
    return open_on_gpu(path, max_num_seqs=32, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_replay_has_the_bits_of_an_eager_step(path, count):
    params = SamplingParams(temperature=0, max_tokens=70, logprobs=20, ignore_eos=True)

    def run(llm):
        outputs = llm.generate(PROMPTS[:count], params)
        return [output.outputs[0].logprobs for output in outputs]

    with open_for_many(path) as llm:
        steps = llm._engine.runner.decode_steps
        assert len(steps._graphs) == len(buckets(32))
        replayed = run(llm)
        steps._graphs = {}
        assert run(llm) == replayed


@pytest.mark.gpu
def test_graphs_can_be_switched_off(path, monkeypatch):
    monkeypatch.setenv("TIERCEL_CUDA_GRAPH", "0")
    with open_for_many(path) as llm:
        assert not llm._engine.runner.decode_steps._graphs
        (eager,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=20))
    monkeypatch.setenv("TIERCEL_CUDA_GRAPH", "1")
    with open_for_many(path) as llm:
        (replayed,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=20))
    assert eager.outputs[0].token_ids == replayed.outputs[0].token_ids


LENGTHS = (1, 3, 16, 17, 33, 64, 65, 100, 300, 511, 700, 1500)
READ = SamplingParams(temperature=0, max_tokens=4, logprobs=20, ignore_eos=True)


def ask_prompts(llm):
    """Alone, after prefix hits, and beside each other and answers."""
    prompts = [{"prompt_token_ids": [(11 * i + 3 * n) % 250 for i in range(n)]} for n in LENGTHS]
    outputs = [llm.generate(prompt, READ)[0] for prompt in prompts]
    longer = {"prompt_token_ids": [*prompts[-1]["prompt_token_ids"], 1, 2, 3]}
    outputs += llm.generate(longer, READ)
    outputs += llm.generate(PROMPTS + prompts[:-1], READ)
    assert outputs[len(LENGTHS)].metrics.num_cached_tokens == 1472
    return [output.outputs[0].logprobs for output in outputs]


@pytest.fixture(params=["llama", "gemma3"])
def long_path(tmp_path, request):
    """Heads of 64 or of 128, which another kernel attends; the second model with a window."""
    metadata = {f"{request.param}.context_length": 4096}
    head_dim = 128 if request.param == "llama" else 64
    sizes = {"hidden": 256, "head_dim": head_dim, "heads": 4}
    return tiny_model(tmp_path / "m.gguf", request.param, metadata=metadata, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_replayed_prompt_has_the_bits_of_a_padded_eager_step(long_path, monkeypatch, dtype):
    with open_for_many(long_path, dtype=dtype) as llm:
        steps = llm._engine.runner.prompt_steps
        assert all(padded.graph is not None for padded in steps._padded.values())
        assert len({size for size, _ in steps._padded}) == 30
        replayed = ask_prompts(llm)
        for pool in llm._engine.runner.pools:
            for planes in pool.layers.values():
                assert all(not plane[0].any() for plane in planes.values())  # the null block
        assert steps.largest == 4096
    monkeypatch.setenv("TIERCEL_CUDA_GRAPH", "0")
    with open_for_many(long_path, dtype=dtype) as llm:
        steps = llm._engine.runner.prompt_steps
        assert all(padded.graph is None for padded in steps._padded.values())
        assert ask_prompts(llm) == replayed


@pytest.mark.gpu
def test_padding_changes_a_prompt_by_rounding_alone(long_path):
    with open_for_many(long_path, dtype="float32") as llm:
        padded = ask_prompts(llm)
    with open_for_many(long_path, dtype="float32") as llm:
        llm._engine.runner.prompt_steps.largest = 0
        plain = ask_prompts(llm)
    for own, expected in zip(padded, plain, strict=True):
        for place, other in zip(own, expected, strict=True):
            assert place.logprob == pytest.approx(other.logprob, abs=5e-3)
            if place.token_id != other.token_id:
                break  # as likely: what follows is another text


@pytest.mark.gpu
def test_graphs_are_captured_beside_a_thread_that_uses_the_device(path):
    has_ended, failures = threading.Event(), []

    def use():
        try:
            while not has_ended.is_set():
                torch.ones(1 << 20, device="cuda").sum().item()
                torch.cuda.empty_cache()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    try:
        with open_for_many(path) as llm:
            llm.generate(PROMPTS[0], READ)
    finally:
        has_ended.set()
        thread.join()
    assert not failures


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", ["0", "1"])
def test_no_step_waits_for_the_device(path, monkeypatch, overlap):
    """PyTorch raises where anything within a step waits; mixed parameters take every stage."""
    monkeypatch.setenv("TIERCEL_SYNC_DEBUG", "1")
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    with open_for_many(path) as llm:
        outputs = llm.generate(PROMPTS, MIXED)
        llm.logits([1, 2, 3])
    assert all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs)


@pytest.mark.gpu
def test_sync_debug_finds_a_wait(path, monkeypatch):
    monkeypatch.setenv("TIERCEL_SYNC_DEBUG", "1")
    with open_for_many(path) as llm:
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
        with open_for_many(path) as llm:
            outputs = llm.generate(PROMPTS, MIXED)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.gpu
def test_two_engines_side_by_side(path):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with open_for_many(path) as first, open_for_many(path) as second:
        (a,), (b,) = first.generate(PROMPTS[2], params), second.generate(PROMPTS[2], params)
        assert a.outputs[0].token_ids == b.outputs[0].token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["prompt_steps", "logits"])
def test_a_step_without_memory_fails_its_newest_request_alone(path, place):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with open_for_many(path) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
        runner = llm._engine.runner
        owner = runner.model if place == "logits" else runner
        real, calls = getattr(owner, place), []

        def failing(*arguments):
            calls.append(1)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("injected")
            return real(*arguments)

        setattr(owner, place, failing)
        outputs = llm.generate(PROMPTS, params)
        setattr(owner, place, real)
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

    with open_for_many(path) as llm:
        monkeypatch.setattr("triton.runtime.jit.JITFunction._do_compile", refuse)
        monkeypatch.setattr("tiercel.kernels.runtime.rtc.compile_cubin", refuse)
        greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        for length in (1, 2, 7, 16, 17, 63, 64, 65, 129, 300, 1000, 2049, 4000):
            llm.generate({"prompt_token_ids": [i % 250 for i in range(length)]}, greedy)
        llm.generate(PROMPTS, MIXED)
        llm.generate([PROMPTS[i % 7] for i in range(40)], greedy)
