"""`LLM` on the tiny models of tests/data/gguf, and helpers of tests for it."""

from pathlib import Path

import torch

from tiercel.engine.memory import GIB
from tiercel.llm import LLM
from tiercel.params import SamplingParams

DATA = Path(__file__).parent / "data/gguf"
LLAMA = DATA / "llama-tiny.gguf"  # adds a BOS, 269; 269 and 271 end an answer
BOS, EOS = 269, 271
NAMES = ("qwen3-tiny", "llama-tiny", "gemma3-tiny")
PROMPTS = ["the thin man", "a", " in 2024 they ran and ran on", "é😀", "x" * 70]


def open_tiny(path=LLAMA, **options):
    return LLM(path, device="cpu", **({"dtype": "float32"} | options))


def gpu_share(gib=4):
    """The value of `gpu_memory_utilization` for a tiny model, since other tests use the GPU too.

    The same number of bytes on every GPU, since the forms of the weights depend on it.
    """
    return min(0.9, gib * GIB / torch.cuda.get_device_properties(0).total_memory)


def open_on_gpu(path, *, gib=4, **options):
    share = gpu_share(gib)
    return LLM(path, **({"device": "cuda"} | options), gpu_memory_utilization=share)


def assert_idle(llm):
    scheduler = llm._engine.scheduler
    assert not scheduler.has_work
    for allocator in scheduler.cache.allocators:
        assert allocator.num_free == allocator.num_blocks - 1
    assert len(scheduler._free_rows) == llm.config.max_num_seqs
    assert not llm._takers


def greedy(max_tokens=12, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def joined(deltas, name):
    return [entry for delta in deltas for entry in getattr(delta, name)]


def ids_of(outputs):
    return [[answer.token_ids for answer in output.outputs] for output in outputs]
