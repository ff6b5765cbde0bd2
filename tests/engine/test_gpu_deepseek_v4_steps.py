"""DeepSeek-V4 on a GPU over many steps: replays, streams, waits, the memory of a long context."""

import threading
from typing import cast

import pytest
import torch

from benchmarks.deepseek_v4_layers import (
    FLASH,
    RandomWeights,
    Slice,
    Step,
    make_pools,
    measure_workspace,
)
from tests.small_v4 import SMALL, text_ids, text_prompts
from tests.tiny_llm import greedy, ids_of, open_on_gpu
from tiercel.cache.spec import group_specs
from tiercel.config import ModelOptions
from tiercel.kernels.attention.sparse_attention import num_splits
from tiercel.kernels.runtime import rtc
from tiercel.kernels.runtime.triton_launch import TritonLaunch
from tiercel.models.deepseek_v4_model import DeepseekV4
from tiercel.models.weights import WeightReader
from tiercel.ops.indexer_topk_torch import WORKSPACE_BYTES
from tiercel.params import SamplingParams
from tiercel.runner.step_inputs import make_timing_batch

pytestmark = pytest.mark.gpu
PROMPTS = text_prompts(4, 150)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=40)


def test_a_thousand_replays_have_the_bits_of_eager_steps(monkeypatch):
    """Each step has other tokens, lengths and blocks; entries of every kind complete on the way."""
    params = greedy(1000, logprobs=2)
    with open_on_gpu(SMALL, max_num_seqs=2) as llm:
        replayed = llm.generate(PROMPTS[:2], params)
    monkeypatch.setenv("TIERCEL_CUDA_GRAPH", "0")
    with open_on_gpu(SMALL, max_num_seqs=2) as llm:
        eager = llm.generate(PROMPTS[:2], params)
    for left, right in zip(replayed, eager, strict=True):
        assert len(left.outputs[0].token_ids) == 1000
        assert left.outputs[0].logprobs == right.outputs[0].logprobs


def test_two_engines_on_two_streams_at_once(monkeypatch):
    monkeypatch.setenv("TIERCEL_PREFIX_CACHE", "0")  # a prompt after a hit is other products
    params = greedy(400)
    with open_on_gpu(SMALL, max_num_seqs=2) as first, open_on_gpu(SMALL, max_num_seqs=2) as second:
        pairs = ((first, PROMPTS[:2]), (second, PROMPTS[2:]))
        alone = [ids_of(llm.generate(prompts, params)) for llm, prompts in pairs]
        found: dict[int, list[object]] = {}

        def run(number: int) -> None:
            llm, prompts = pairs[number]
            with torch.cuda.stream(torch.cuda.Stream()):
                found[number] = ids_of(llm.generate(prompts, params))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[0], found[1]] == alone


@pytest.mark.parametrize("spec", ["off", "mtp", "hybrid"])
def test_no_step_waits_for_the_device(monkeypatch, spec):
    monkeypatch.setenv("TIERCEL_SYNC_DEBUG", "1")
    with open_on_gpu(SMALL, max_num_seqs=4, spec=spec) as llm:
        outputs = llm.generate(PROMPTS, greedy(200)) + llm.generate(PROMPTS, SAMPLED)
    assert all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs)


@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_nothing_compiles_once_the_model_is_loaded(monkeypatch, spec):
    """Neither Triton nor NVRTC: not for any length, nor for mixed steps, nor after a hit."""

    def refuse(*arguments, **options):
        raise AssertionError(f"compiled after loading: {arguments}")

    with open_on_gpu(SMALL, max_num_seqs=8, spec=spec) as llm:
        monkeypatch.setattr(TritonLaunch, "_compile", refuse)
        monkeypatch.setattr(rtc, "load_cubin", refuse)
        ids = text_ids()
        for length in (1, 2, 3, 5, 7, 9, 15, 16, 17, 33, 64, 65, 129, 300, 1000):
            llm.generate({"prompt_token_ids": list(ids[:length])}, greedy(3))
        llm.generate([*PROMPTS, *text_prompts(4, 29)], greedy(20))
        llm.generate(PROMPTS, SAMPLED)


@pytest.fixture(scope="module")
def narrow():
    """A layer of each kind, a sixteenth of Flash wide, for a context of a million tokens."""
    device = torch.device("cuda")
    part = Slice("layers of each kind", FLASH, [0, 4, 128])
    config = part.config(torch.device("cpu"))
    weights = cast("WeightReader", RandomWeights(config, device, part.experts))
    return DeepseekV4(config, weights, torch.bfloat16, 1 << 20, ModelOptions(kv_dtype="fp8"))


@pytest.mark.parametrize("num_tokens", [1, 16, 256])
@torch.inference_mode()
def test_a_step_takes_no_more_memory_with_a_longer_context(narrow, num_tokens):
    """But for the scores of the indexer and the parts of a token's attention, which are bounded."""
    groups, sizes = group_specs(narrow.cache_specs()), {}
    for context in (1 << 10, 1 << 15, 1 << 20):
        pools, tables = make_pools(groups, Step(1, num_tokens, context), torch.device("cuda"))
        narrow.bind_cache(pools)
        _, sizes[context] = measure_workspace(
            narrow, make_timing_batch(1, num_tokens, context, tables)
        )
    parts = num_splits(num_tokens, (1 << 20,)) if num_tokens <= 64 else 0
    rest = 4 * parts * num_tokens * narrow.config.num_heads * (narrow.config.head_dim + 2) + (
        1 << 20
    )
    most = {c: sizes[1 << 10] + min(WORKSPACE_BYTES, num_tokens * c) + rest for c in sizes}
    assert all(size <= most[context] for context, size in sizes.items()), sizes
