"""Prompts with a common prefix compute it once, and the answers do not change."""

import numpy as np
import pytest

from tests.tiny_llm import DATA, assert_idle, greedy, open_tiny
from tiercel.scheduler.scheduler import LEAST_COMPUTED

SHARED = [(7 * i) % 250 for i in range(220)]
PROMPTS = [{"prompt_token_ids": [*SHARED, *tail]} for tail in ([1, 2, 3], [4], [1, 2, 9, 9])]


def answers(llm):
    outputs = [llm.generate(prompt, greedy(8, logprobs=5))[0] for prompt in PROMPTS]
    cached = [output.metrics.num_cached_tokens for output in outputs]
    logprobs = [[e.logprob for e in output.outputs[0].logprobs] for output in outputs]
    return cached, [output.outputs[0].token_ids for output in outputs], np.array(logprobs)


@pytest.mark.parametrize("name", ["qwen3-tiny", "llama-tiny", "gemma3-tiny"])
def test_a_hit_gives_the_answer_of_a_computed_prompt(monkeypatch, name):
    with open_tiny(DATA / f"{name}.gguf") as llm:
        cached, ids, logprobs = answers(llm)
        assert_idle(llm)
    assert cached == [0, 192, 192]  # whole blocks of 64
    monkeypatch.setenv("TIERCEL_PREFIX_CACHE", "0")
    with open_tiny(DATA / f"{name}.gguf") as llm:
        cold_cached, cold_ids, cold_logprobs = answers(llm)
    assert cold_cached == [0, 0, 0]
    assert ids == cold_ids
    np.testing.assert_allclose(logprobs, cold_logprobs, atol=1e-4, equal_nan=False)


def test_a_hit_on_another_engine_row_reads_the_shared_blocks():
    """The row of the second prompt had another request's blocks before."""
    other = {"prompt_token_ids": [(5 * i + 1) % 250 for i in range(200)]}
    with open_tiny() as llm:
        (expected,) = llm.generate(PROMPTS[0], greedy(8))
    with open_tiny() as llm:
        llm.generate([{"prompt_token_ids": SHARED}, other], greedy(1))
        (hit,) = llm.generate(PROMPTS[0], greedy(8))
    assert hit.metrics.num_cached_tokens == 192
    assert hit.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_conversation_computes_only_its_new_part():
    with open_tiny() as llm:
        (first,) = llm.generate({"prompt_token_ids": SHARED}, greedy(60))
        told = [*SHARED, *first.outputs[0].token_ids, 5, 6, 7]
        (second,) = llm.generate({"prompt_token_ids": told}, greedy(2))
    assert second.metrics.num_cached_tokens == 256  # 200 + 59 computed: the answer's blocks too


def test_a_prompt_whose_places_are_read_is_computed_whole():
    with open_tiny() as llm:
        llm.generate({"prompt_token_ids": SHARED}, greedy(1))
        logits = llm.logits(SHARED)
        (read,) = llm.generate({"prompt_token_ids": SHARED}, greedy(1, prompt_logprobs=0))
    assert len(logits) == len(SHARED)
    assert read.metrics.num_cached_tokens == 0
    assert len(read.prompt_logprobs) == len(SHARED)


ALL_LENGTHS = [("llama-tiny", count) for count in (193, 207, 208, 209, 210, 600)]


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [*ALL_LENGTHS, ("qwen3-tiny", 193), ("qwen3-tiny", 600), ("gemma3-tiny", 210),
     ("gemma3-tiny", 600)],
)  # fmt: skip
def test_a_cold_a_warm_and_a_partial_hit_give_the_same_bits(name, num_tokens):
    """Sums end at fixed positions of the sequence, whatever was computed before."""
    ids = [(11 * i + i // 7) % 250 for i in range(num_tokens)]
    runs = {}
    for shared in (0, num_tokens, 70, 130):
        with open_tiny(DATA / f"{name}.gguf") as llm:
            if shared:
                llm.generate({"prompt_token_ids": [*ids[:shared], 1, 2, 3, 4]}, greedy(1))
            (output,) = llm.generate({"prompt_token_ids": ids}, greedy(6, logprobs=5))
        hit = output.metrics.num_cached_tokens
        assert hit == min(shared, num_tokens - LEAST_COMPUTED) // 64 * 64
        runs[shared] = [(e.token_id, e.logprob, e.top) for e in output.outputs[0].logprobs]
    assert runs[num_tokens] == runs[70] == runs[130] == runs[0]
