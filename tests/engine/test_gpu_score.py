"""Scoring on a GPU: each item as alone, through hits, chunks, overlap and decode steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gguf_files import tiny_model
from tests.tiny_llm import open_on_gpu
from tiercel.errors import ModelNotFoundError
from tiercel.loader.hub import resolve
from tiercel.params import SamplingParams

QUERY = [(7 * i) % 250 for i in range(150)]
ITEMS = [[(3 * i + 5 * j) % 250 for j in range(1 + 5 * i % 17)] for i in range(40)]
LABELS = [5, 9, 200]
# Nats, of logits up to 70 of a random model: float32 sums in another order, and 16-bit activations.
TOLERANCE = {"float32": 5e-3, "float16": 0.5}


@pytest.fixture(params=["llama", "gemma3"])
def path(tmp_path, request):
    """Heads of 64; the second with a window of 6 tokens in every other layer."""
    metadata = {f"{request.param}.context_length": 512}
    return tiny_model(
        tmp_path / "m.gguf", request.param, hidden=128, head_dim=64, heads=2, metadata=metadata
    )


def open_for_lists(path, **options):
    return open_on_gpu(path, max_num_seqs=16, **options)


def alone(llm):
    padding = [*llm.tokenizer.unused_ids]
    rows = []
    for item in ITEMS:
        logits = torch.from_numpy(llm.logits([*QUERY, *item])[-1]).double()
        logits[padding] = -torch.inf
        rows.append(logits.log_softmax(0)[LABELS])
    return torch.stack(rows).numpy()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_packed_items_equal_each_alone(path, dtype):
    with open_for_lists(path, dtype=dtype) as llm:
        outputs = [llm.score(QUERY, ITEMS, label_token_ids=LABELS) for _ in range(2)]
        assert [output.usage.cached_tokens for output in outputs] == [0, 128]
        expected = alone(llm)
        for output in outputs:
            assert np.abs(output.logprobs - expected).max() < TOLERANCE[dtype]
        among = llm.score(QUERY, ITEMS, label_token_ids=LABELS, normalize="labels")
        shares = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
        assert np.abs(np.diff(among.logprobs) - np.diff(np.log(shares))).max() < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", ["0", "1"])
def test_steps_with_items_wait_for_nothing_and_mix_with_decode(path, monkeypatch, overlap):
    """PyTorch raises where anything within a step waits; short steps cut the list."""
    monkeypatch.setenv("TIERCEL_SYNC_DEBUG", "1")
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with open_for_lists(path, dtype="float32", max_num_batched_tokens=96) as llm:
        expected = llm.score(QUERY, ITEMS, label_token_ids=LABELS).logprobs
        stream = llm.stream({"prompt_token_ids": QUERY[:70]}, greedy)
        ids = list(next(stream).token_ids)
        output = llm.score(QUERY, ITEMS, label_token_ids=LABELS)
        ids += [token_id for delta in stream for token_id in delta.token_ids]
        assert len(ids) == 30
        assert np.abs(output.logprobs - expected).max() < TOLERANCE["float32"]


@pytest.mark.gpu
def test_an_items_tokens_change_no_bit_of_another(path):
    with open_for_lists(path, dtype="float16") as llm:
        llm.score(QUERY, ITEMS, label_token_ids=LABELS)
        before = llm.score(QUERY, ITEMS, label_token_ids=LABELS).logprobs
        changed = [*ITEMS]
        changed[5] = [(token_id + 77) % 250 for token_id in ITEMS[5]]
        after = llm.score(QUERY, changed, label_token_ids=LABELS).logprobs
    kept = [i for i in range(len(ITEMS)) if i != 5]
    assert np.array_equal(before[kept], after[kept])
    assert np.abs(before[5] - after[5]).max() > 0


@pytest.mark.gpu
def test_graphs_serve_lists_of_any_layout(path):
    """Items, prompts and company differ; answers are those of eager steps without padding."""
    lists = [
        (
            [(5 * i + k) % 250 for i in range(130)],
            [[(i + j) % 250 for j in range(n)] for i in range(c)],
        )
        for k, n, c in ((0, 9, 30), (1, 9, 30), (2, 5, 50), (3, 1, 250), (4, 20, 14))
    ]

    def run(llm):
        outputs = []
        for query, items in lists * 2:
            outputs.append(llm.score(query, items, label_token_ids=LABELS).logprobs)
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        stream = llm.stream({"prompt_token_ids": QUERY[:70]}, greedy)
        ids = list(next(stream).token_ids)
        outputs.append(llm.score(*lists[0], label_token_ids=LABELS).logprobs)
        ids += [token_id for delta in stream for token_id in delta.token_ids]
        return outputs, ids

    with open_for_lists(path, dtype="float32") as llm:
        graphs, ids = run(llm)
    with open_for_lists(path, dtype="float32") as llm:
        llm._engine.runner.prompt_steps.largest = 0
        eager, expected_ids = run(llm)
    assert ids == expected_ids
    for own, expected in zip(graphs, eager, strict=True):
        assert np.abs(own - expected).max() < TOLERANCE["float32"]


@pytest.mark.gpu
def test_a_graphs_result_is_that_of_the_padded_step(path, monkeypatch):
    """Bit by bit, over a list that is scored again and again: cold, then after a hit."""

    def run():
        with open_for_lists(path, dtype="float16") as llm:
            return [llm.score(QUERY, ITEMS, label_token_ids=LABELS).logprobs for _ in range(4)]

    replayed = run()
    monkeypatch.setenv("TIERCEL_CUDA_GRAPH", "0")
    for output, expected in zip(replayed, run(), strict=True):
        assert np.array_equal(output, expected)
    for output in replayed[2:]:
        assert np.array_equal(output, replayed[1])
    assert np.abs(replayed[0] - replayed[1]).max() < TOLERANCE["float16"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packing_in_16_bits_is_no_worse_than_each_alone(path, dtype):
    """Against the logits of float32: half as much error again at most, and no bias to packing."""
    with open_for_lists(path, dtype="float32") as llm:
        truth = alone(llm)
    with open_for_lists(path, dtype=dtype) as llm:
        separate = np.abs(alone(llm) - truth)
        outputs = [llm.score(QUERY, ITEMS, label_token_ids=LABELS) for _ in range(4)]
    for output in outputs:
        packed = np.abs(output.logprobs - truth)
        assert packed.max() <= 1.5 * separate.max()
        assert packed.mean() <= 1.5 * separate.mean()


@pytest.mark.gpu
def test_the_class_of_16_bits_on_the_default_model():
    """A real model: 0.05 nats at most and 0.01 in the mean against each item alone."""
    try:
        default_model = resolve("smollm2", offline=True, report=None)
    except ModelNotFoundError:
        pytest.skip("the default model is not in the cache of this machine")
    query = "Is this a fruit? Answer Yes or No.\nWord: "
    items = ["apple", "a heavy hammer", "banana", "the moon", "two ripe cherries", "a", "wet stone"]
    labels = [" Yes", " No"]
    for dtype in ("float16", "bfloat16"):
        with open_for_lists(default_model, dtype=dtype, max_model_len=512) as llm:
            packed = [llm.score(query, items, labels, suffix="\nAnswer:") for _ in range(3)]
            alone_ = [llm.score(query, [item], labels, suffix="\nAnswer:") for item in items]
        expected = np.concatenate([output.logprobs for output in alone_])
        for output in packed:
            error = np.abs(output.logprobs - expected)
            assert error.max() < 0.05, dtype
            assert error.mean() < 0.01, dtype
            gap = np.abs(np.diff(expected, axis=1))[:, 0]
            same = output.logprobs.argmax(axis=1) == expected.argmax(axis=1)
            assert (same | (gap < 0.05)).all()
