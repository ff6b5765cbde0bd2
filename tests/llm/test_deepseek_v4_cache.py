"""DeepSeek-V4 in the engine: chunks, prefix hits, evicted states and preemption change no answer.

Every block is NaN when a request gets it. Answers are judged by the text computed in one step.
"""

import numpy as np
import pytest
import torch

from tests.dsv4_engine import (
    BLOCK,
    TOLERANCE,
    assert_true,
    open_v4,
    poison_new_blocks,
    random_ids,
    tiny_model,
    whole_logits,
    with_blocks,
)
from tests.tiny_llm import assert_idle, greedy, ids_of
from tiercel.scheduler.scheduler import LEAST_COMPUTED

SHARED = random_ids(400, seed=1)
OTHER_COUNTS = (127, 129, 144, 145, 146, 255, 256, 272, 273, 384, 400)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def prompt(count, *tail):
    return {"prompt_token_ids": [*SHARED[:count], *tail]}


def open_poisoned(**options):
    llm = open_v4(**options)
    poison_new_blocks(llm)
    return llm


def cached(outputs):
    return [output.metrics.num_cached_tokens for output in outputs]


def hit_of(num_shared, num_tokens):
    """Tokens found of a prompt of which so many were computed before."""
    return min(num_shared, num_tokens - LEAST_COMPUTED) // BLOCK * BLOCK


# ---- chunks


@pytest.mark.parametrize("most", [131, slow(64), slow(300)])
def test_logits_of_prompts_in_chunks(most):
    ids = SHARED[:330]
    with open_poisoned(max_num_batched_tokens=most, max_num_seqs=4) as llm:
        logits = llm.logits(ids)
        assert_idle(llm)
    np.testing.assert_allclose(logits, whole_logits(tiny_model(), ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("most", [9, slow(5), slow(33)])
def test_prompts_of_all_lengths_together_in_small_steps(most):
    """Chunks of one and of a few tokens, beside answers that grow."""
    prompts = [prompt(count, 5) for count in (0, 1, 2, 3, 8, 30, 126, 127, 128)]
    with open_poisoned(max_num_batched_tokens=most, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, greedy(6, logprobs=3))
        assert_idle(llm)
    assert_true(outputs)


# ---- prefix hits


@pytest.mark.parametrize("count", [128, 257, *map(slow, OTHER_COUNTS)])
def test_a_hit_gives_the_answer_of_a_computed_prompt(count):
    """The same text again, one that goes on otherwise, and one that ends before."""
    with open_poisoned(max_num_batched_tokens=150, max_num_seqs=4) as llm:
        (first,) = llm.generate(prompt(count), greedy(5, logprobs=3))
        again = llm.generate([prompt(count), prompt(count, 7, 8, 9)], greedy(5, logprobs=3))
        (longer,) = llm.generate(prompt(count, *random_ids(40, seed=count)), greedy(5, logprobs=3))
        assert_idle(llm)
    assert cached([first, *again, longer]) == [
        0,
        hit_of(count + 4, count),
        hit_of(count, count + 3),
        hit_of(count, count + 40),
    ]
    assert_true([first, *again, longer])


def test_hits_at_every_multiple_of_a_block():
    stops = range(BLOCK, len(SHARED), BLOCK)
    tails = {stop: random_ids(60, seed=stop) for stop in stops}
    with open_poisoned() as llm:
        (whole,) = llm.generate(prompt(len(SHARED)), greedy(1))
        outputs = [
            llm.generate(prompt(stop, *tails[stop]), greedy(4, logprobs=3))[0] for stop in stops
        ]
    assert cached([whole, *outputs]) == [0, *stops]
    assert_true(outputs)


def test_two_hits_of_other_rows_give_the_same_bits():
    """What a hit reads does not depend on who computed it, nor on the blocks it is in."""
    runs = []
    for others in ([], [random_ids(200, seed=9), random_ids(300, seed=10)]):
        with open_poisoned(max_num_seqs=4) as llm:
            for other in others:
                llm.generate({"prompt_token_ids": other}, greedy(3))
            llm.generate(prompt(300), greedy(1))
            (output,) = llm.generate(prompt(256, *random_ids(50, seed=4)), greedy(6, logprobs=5))
        assert output.metrics.num_cached_tokens == 256
        runs.append([(e.token_id, e.logprob, e.top) for e in output.outputs[0].logprobs])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("count", [300, slow(200), slow(257)])
def test_a_cold_and_a_warm_prompt_of_equal_steps_give_the_same_bits(count):
    """Steps of a block each: a hit leaves out the first of them and changes none of the others."""
    runs = {}
    for shared in (0, 140, 400):
        with open_poisoned(max_num_batched_tokens=BLOCK, max_num_seqs=1) as llm:
            if shared:
                llm.generate(prompt(min(shared, count), 3, 4), greedy(1))
            (output,) = llm.generate(prompt(count), greedy(6, logprobs=5))
        assert output.metrics.num_cached_tokens == hit_of(min(shared, count), count)
        runs[shared] = [(e.token_id, e.logprob, e.top) for e in output.outputs[0].logprobs]
    assert runs[140] == runs[0]
    assert runs[400] == runs[0]


def test_a_conversation_computes_only_its_new_part():
    """Blocks of an answer are found too, though it was computed token by token."""
    with open_poisoned() as llm:
        (first,) = llm.generate(prompt(120), greedy(20))
        told = [*SHARED[:120], *first.outputs[0].token_ids, *random_ids(30, seed=2)]
        (second,) = llm.generate({"prompt_token_ids": told}, greedy(5, logprobs=3))
    assert second.metrics.num_cached_tokens == BLOCK
    assert_true([first, second])


# ---- evicted states


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 8))]
)
def test_evicted_states_change_no_answer(monkeypatch, seed):
    """Sliding groups lose their blocks before others: hits are shorter, or there are none."""
    with_blocks(monkeypatch, full=30, sliding=6)
    generator = torch.Generator().manual_seed(seed)
    texts = [random_ids(count, seed=20 + count) for count in (400, 300, 150)]
    found = []
    with open_poisoned(max_num_batched_tokens=200, max_num_seqs=2) as llm:
        for _ in range(16):
            number, cut = torch.randint(0, 3, (2,), generator=generator).tolist()
            own = texts[number][: (400, 300, 150)[cut]]
            ids = [*own, *random_ids(20, seed=len(found))]
            (output,) = llm.generate({"prompt_token_ids": ids}, greedy(3, logprobs=3))
            assert_true([output])
            found.append(output.metrics.num_cached_tokens)
        assert_idle(llm)
    assert {0, BLOCK} <= set(found)
    assert seed or 2 * BLOCK in found  # not every seed asks for a long text soon enough


# ---- preemption


@pytest.mark.parametrize("spec", ["mtp", slow("off")])
def test_preemption_changes_no_answer(monkeypatch, spec):
    prompts = [prompt(count, 40 + count % 7) for count in (250, 120, 126, 60)]
    with_blocks(monkeypatch, full=6, sliding=6)
    with open_poisoned(max_num_batched_tokens=150, max_num_seqs=4, spec=spec) as llm:
        llm._engine.runner.sampler._theta.zero_()
        outputs = llm.generate(prompts, greedy(24, logprobs=2))
        assert llm._engine.scheduler.num_preemptions > 0
        assert_idle(llm)
    assert_true(outputs)


def test_preemption_of_a_prompt_half_done_changes_no_logits(monkeypatch):
    ids = SHARED[:300]
    with_blocks(monkeypatch, full=4, sliding=6)
    with open_poisoned(max_num_batched_tokens=40, max_num_seqs=2) as llm:
        for i, _ in enumerate(llm.stream(prompt(120), greedy(30))):
            if i == 3:  # the stream is older: it needs a second block before the prompt is done
                logits = llm.logits(ids)
        assert llm._engine.scheduler.num_preemptions > 0
        assert_idle(llm)
    np.testing.assert_allclose(logits, whole_logits(tiny_model(), ids), atol=TOLERANCE, rtol=0)


def test_answers_without_a_prefix_cache_are_the_same(monkeypatch):
    prompts = [prompt(300), prompt(300), prompt(260, 9, 9)]
    with open_poisoned() as llm:
        warm = [llm.generate(each, greedy(8))[0] for each in prompts]
    monkeypatch.setenv("TIERCEL_PREFIX_CACHE", "0")
    with open_poisoned() as llm:
        cold = [llm.generate(each, greedy(8))[0] for each in prompts]
    assert cached(warm) == [0, 256, 128]
    assert cached(cold) == [0, 0, 0]
    assert ids_of(warm) == ids_of(cold)
