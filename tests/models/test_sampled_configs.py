"""Models of sampled configs against transformers: as folders and as GGUF files, in float32."""

import random

import numpy as np
import pytest
import torch

from tests.hf_models import (
    CLASSES,
    logits_of,
    make_model,
    own_tensors,
    sample_config,
    write_as_gguf,
    write_folder,
)
from tests.tiny_llm import greedy, open_tiny

# Past windows and original contexts, in chunks that end inside of blocks and windows.
PROMPT_LEN, ANSWER_LEN, CHUNK = 150, 6, 47
# Of the largest logit. Float32 sums in another order; transformers' angles are float32 as well,
# 1e-5 off at position 150.
TOLERANCE = 5e-5
DECIDES = 20 * TOLERANCE
NUM_BYTES = 256  # tokens of every tokenizer here
NUM_DEFAULT, NUM_SLOW, MOST_TRIES = 3, 60, 30
CASES = [
    pytest.param(family, seed, marks=[pytest.mark.slow] * (seed >= NUM_DEFAULT))
    for family in CLASSES
    for seed in range(NUM_SLOW)
]


def worst(actual, expected):
    """The largest difference, of the largest logit."""
    return np.abs(actual - expected).max() / np.abs(expected).max()


def decisive_case(family, seed, *, for_gguf):
    """A sample, its model and a prompt, in which a change of any field changes the logits.

    Without that, a field that is read wrongly could leave the logits as they are.
    """
    rng = random.Random(f"{family} {seed}")
    for _ in range(MOST_TRIES):
        sample = sample_config(rng, family, seed, for_gguf=for_gguf)
        model = make_model(sample.values)
        ids = rng.choices(range(sample.values["vocab_size"]), k=PROMPT_LEN)
        expected, state = logits_of(model, ids), model.state_dict()
        changed = (logits_of(make_model(v, state), ids) for v in sample.changes.values())
        if all(worst(logits, expected) > DECIDES for logits in changed):
            return sample, model, ids
    raise AssertionError(f"no sample of {family} decides")


def check_logits(path, model, ids):
    """Prompts in chunks, and steps of one token after them."""
    expected = logits_of(model, ids)
    with open_tiny(path, max_num_batched_tokens=CHUNK) as llm:
        actual = llm.logits(ids)
        (output,) = llm.generate({"prompt_token_ids": ids}, greedy(ANSWER_LEN, logprobs=0))
    assert worst(actual, expected) < TOLERANCE
    check_answer(model, ids, output.outputs[0])


def check_answer(model, ids, answer):
    """Each token is the best one, with its log-probability."""
    following = torch.from_numpy(logits_of(model, ids + answer.token_ids))[len(ids) - 1 : -1]
    logprobs = following.log_softmax(dim=1)
    largest = float(following.abs().max())
    for row, token, entry in zip(logprobs, answer.token_ids, answer.logprobs, strict=True):
        # The softmax's sum moves by as much again. Rows beyond the tokenizer's are never chosen.
        assert row[token] >= row[:NUM_BYTES].max() - 2 * TOLERANCE * largest
        assert abs(entry.logprob - row[token]) <= 2 * TOLERANCE * largest


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_folders_equal_transformers(tmp_path, family, seed):
    sample, model, ids = decisive_case(family, seed, for_gguf=False)
    tensors = own_tensors(model)
    # A head beside a tied embedding is not read.
    tensors.setdefault("lm_head.weight", torch.randn(model.lm_head.weight.shape))
    check_logits(write_folder(tmp_path, sample.values, tensors), model, ids)


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_gguf_files_equal_transformers(tmp_path, family, seed):
    sample, model, ids = decisive_case(family, seed, for_gguf=True)
    check_logits(write_as_gguf(tmp_path / "model.gguf", sample, model), model, ids)


def test_blocks_of_a_window_are_used_again(tmp_path):
    """So full and sliding layers come to have their keys in different slots."""
    sample, model, ids = decisive_case("gemma3", 0, for_gguf=False)
    path = write_folder(tmp_path, sample.values, own_tensors(model))
    prompts = [ids, ids[:70], ids[7:138]]
    with open_tiny(path, max_num_batched_tokens=CHUNK) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], greedy(70, logprobs=0)
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        check_answer(model, prompt, output.outputs[0])
