"""CUDA in float16 against the CPU in float32 and against recorded log-probabilities."""

import numpy as np
import pytest

from tests import parity
from tests.models.test_default_model import CASE
from tests.tiny_llm import open_on_gpu
from tiercel.llm import LLM
from tiercel.params import SamplingParams

pytestmark = pytest.mark.gpu
# 1, around a block of 64, and long; a chunk border at 512 lies inside the last two.
LENGTHS = (1, 2, 63, 64, 65, 500, 1000, 2000)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts():
    words = CASE["eval_text"]["ids"]
    return [[words[(7 * length + i) % len(words)] for i in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def cuda_llm(default_model):
    with open_on_gpu(default_model, gib=8, max_num_batched_tokens=512) as llm:
        yield llm


def assert_same_up_to_near_ties(actual, expected, margins, flip_margin):
    """Greedy ids agree until a step whose margin is below the profile's."""
    for step, (left, right) in enumerate(zip(actual, expected, strict=True)):
        if left != right:
            assert margins[step] < flip_margin, f"step {step}: {left} for {right}"
            return


def margins_of(logits):
    best = np.sort(logits, axis=-1)
    return best[:, -1] - best[:, -2]


def test_parity_with_recorded_logprobs(cuda_llm):
    parity.check(parity.measure(cuda_llm, CASE), parity.BITS16)


def test_prompts_of_every_length_match_the_cpu(cuda_llm, default_model, prompts):
    """Greedy ids and all log-probabilities of the answer, teacher-forced, within the profile."""
    outs = cuda_llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY)
    with LLM(default_model, device="cpu", dtype="float32") as exact:
        for ids, out in zip(prompts, outs, strict=True):
            answer = out.outputs[0].token_ids
            assert len(answer) == GREEDY.max_tokens
            places = slice(len(ids) - 1, len(ids) - 1 + len(answer))
            expected = exact.logits(ids + answer)[places]
            actual = cuda_llm.logits(ids + answer)[places]
            chosen = np.arange(len(answer)), np.array(answer)
            error = np.abs(
                parity.log_softmax(actual)[chosen] - parity.log_softmax(expected)[chosen]
            )
            assert np.median(error) <= parity.BITS16.greedy_median
            assert error.max() <= parity.BITS16.greedy_p99
            wrong = expected.argmax(axis=-1) != np.array(answer)
            assert (margins_of(expected)[wrong] < parity.BITS16.flip_margin).all()


def test_a_batch_of_mixed_lengths_equals_one_by_one(cuda_llm, prompts):
    batch = cuda_llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY)
    for ids, together in zip(prompts, batch, strict=True):
        alone = cuda_llm.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs[0].token_ids
        places = slice(len(ids) - 1, len(ids) - 1 + len(alone))
        margins = margins_of(cuda_llm.logits(ids + alone)[places])
        assert_same_up_to_near_ties(
            together.outputs[0].token_ids, alone, margins, parity.BITS16.flip_margin
        )


def test_mixed_sampling_parameters_run_together(cuda_llm):
    wanted = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=3, repetition_penalty=1.3),
        SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=7, max_tokens=12, n=2),
        SamplingParams(temperature=1.0, min_p=0.1, seed=7, max_tokens=12, logit_bias={2: -100.0}),
    ]
    text = ["The sea is", "Once upon a time", "Numbers: one, two,"]
    together = cuda_llm.generate(text, wanted)
    assert [len(out.outputs) for out in together] == [1, 2, 1]
    for prompt, params, out in zip(text, wanted, together, strict=True):
        alone = cuda_llm.generate(prompt, params)[0]
        assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in out.outputs]
    assert together[1].outputs[0].token_ids != together[1].outputs[1].token_ids
