"""Prefix hits on a GPU: exact products leave no trace of what was computed before."""

import pytest

from tests.tiny_llm import DATA, greedy, open_on_gpu
from tiercel.engine.scheduler import LEAST_COMPUTED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_tokens", [193, 208, 600])
@pytest.mark.parametrize("name", ["qwen3-tiny", "llama-tiny", "gemma3-tiny"])
def test_a_cold_a_warm_and_a_partial_hit_give_the_same_bits(monkeypatch, name, num_tokens):
    monkeypatch.setenv("TIERCEL_EXACT", "1")
    ids = [(11 * i + i // 7) % 250 for i in range(num_tokens)]
    runs = {}
    for shared in (0, num_tokens, 70, 130):
        with open_on_gpu(DATA / f"{name}.gguf") as llm:
            if shared:
                llm.generate({"prompt_token_ids": [*ids[:shared], 1, 2, 3, 4]}, greedy(1))
            (output,) = llm.generate({"prompt_token_ids": ids}, greedy(6, logprobs=5))
        hit = output.metrics.num_cached_tokens
        assert hit == min(shared, num_tokens - LEAST_COMPUTED) // 64 * 64
        runs[shared] = [(e.token_id, e.logprob, e.top) for e in output.outputs[0].logprobs]
    assert runs[num_tokens] == runs[70] == runs[130] == runs[0]
