"""Prefix hits on a GPU: exact products leave no trace of what was computed before."""

import pytest
import torch

from tests.tiny_llm import DATA, NAMES, greedy, open_on_gpu
from tiercel.scheduler.scheduler import LEAST_COMPUTED

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=NAMES)
def llm(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERCEL_EXACT", "1")
        with open_on_gpu(DATA / f"{request.param}.gguf", max_num_seqs=4) as llm:
            yield llm


@torch.inference_mode()
def begin_anew(llm):
    """Keep no prefix, nor what a run before left in the same blocks."""
    llm._engine.forget()
    for pool in llm._engine.runner.pools:
        for planes in pool.layers.values():
            for plane in planes.values():
                plane[1:] = 50.0  # all but the null block


@pytest.mark.parametrize("num_tokens", [193, 208, 600])
def test_a_cold_a_warm_and_a_partial_hit_give_the_same_bits(llm, num_tokens):
    ids = [(11 * i + i // 7) % 250 for i in range(num_tokens)]
    runs = {}
    for shared in (0, num_tokens, 70, 130):
        begin_anew(llm)
        if shared:
            llm.generate({"prompt_token_ids": [*ids[:shared], 1, 2, 3, 4]}, greedy(1))
        (output,) = llm.generate({"prompt_token_ids": ids}, greedy(6, logprobs=5))
        hit = output.metrics.num_cached_tokens
        assert hit == min(shared, num_tokens - LEAST_COMPUTED) // 64 * 64
        runs[shared] = [(e.token_id, e.logprob, e.top) for e in output.outputs[0].logprobs]
    assert runs[num_tokens] == runs[70] == runs[130] == runs[0]
