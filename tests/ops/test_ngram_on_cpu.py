"""The CUDA sources of the n-gram drafters, lane by lane on a processor.

The ops run as on a GPU, up to the launch. CTAs come in any order, so any may be the last one, which
divides the budget; tiles are so small that short texts have several, and blocks of threads so small
that a scan over rows carries over.
"""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.launches_on_cpu import QUICK_TO_RUN
from tests.ngram_batches import POISON, grow_batch, make_batch, pack_batches
from tests.ngram_brute_force import (
    check_cases,
    every_budget,
    expected,
    long_texts,
    many_drafts,
    many_rows,
    one_window,
    random_cases,
)
from tiercel.kernels.runtime import rtc
from tiercel.kernels.speculation import hybrid_mtp_ngram, ngram_index, ngram_match
from tiercel.kernels.speculation.ngram_index import EMPTY_SLOT
from tiercel.kernels.speculation.ngram_launch import NgramConfig
from tiercel.ops.ngram_index import NgramTexts, extend_ngram_index, make_ngram_index
from tiercel.ops.ngram_index import ngram_index as draft_from_index
from tiercel.ops.ngram_match import make_ngram_workspace

LEVEL = QUICK_TO_RUN
CPU = torch.device("cpu")
OPS = ("ngram_match", "hybrid_mtp_ngram")
# Tokens and lengths; each takes a compiler a second.
DTYPES = {
    "ngram_match": ((torch.int32, torch.int64), (torch.int64, torch.int32)),
    "hybrid_mtp_ngram": ((torch.int32, torch.int32), (torch.int64, torch.int64)),
}


@pytest.fixture(autouse=True)
def _on_cpu(on_processor, monkeypatch):
    """Launches of all kinds: sizes of tiles, whether rows are looked at first, processors."""
    draw = random.Random(0)

    def choose(*_, **__):
        on_processor.seed += 1
        return NgramConfig(64, 2, 1, draw.choice((3, 3, 4, 6, 9)), draw.random() < 0.7)

    for module in (ngram_match, hybrid_mtp_ngram):
        monkeypatch.setattr(module, "select_ngram", choose)
    monkeypatch.setattr(ngram_index, "select_ngram_index", choose)
    monkeypatch.setattr(rtc, "has_dependent_launch", lambda device: False)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=draw.choice((1, 2, 5, 17))),
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("op", OPS)
def test_random_batches(op, kind):
    assert check_cases(random_cases(op, kind), DTYPES[op][kind]) > 500


@pytest.mark.parametrize("op", OPS)
def test_long_texts_in_many_tiles(op):
    assert check_cases(list(long_texts(op)), DTYPES[op][0]) > 100


@pytest.mark.parametrize("op", OPS)
def test_many_drafts_of_a_row(op):
    assert check_cases(list(many_drafts(op)), DTYPES[op][1]) > 1000


@pytest.mark.parametrize("dtypes", DTYPES["ngram_match"], ids=str)
@pytest.mark.parametrize("kind", [0, 1], ids=["prompt", "generated"])
def test_one_window_at_each_place(kind, dtypes):
    """The first and last positions of tiles and loads too."""
    cases = list(one_window(kind)) * 2  # under launches of their own
    assert check_cases(cases, dtypes) > 42 * 45


@pytest.mark.parametrize("op", OPS)
def test_every_budget(op):
    assert check_cases(list(every_budget(op)), DTYPES[op][0]) > 100


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("op", OPS)
def test_many_rows(op, kind):
    """The budget of a block of rows begins where that of the one before has ended."""
    check_cases(list(many_rows(op)), DTYPES[op][kind])


def follow(run, dtypes, draw, *, capacity=0):
    """One index along a run of batches; returns how many tokens were drafted."""
    first, drafted = run[0][0], 0
    rows = len(first.arrays["input_ids"])
    room = sum(first.arrays[name].shape[1] for name in ("input_ids", "token_ids_all"))
    sizes = {name: getattr(first, name) for name in ("max_ngram_size", "min_ngram_size")}
    index = make_ngram_index(rows, room, CPU, **sizes)
    shape = (*index.slots.shape[:2], capacity or index.slots.shape[2])
    guarded = torch.full((math.prod(shape) + 64,), EMPTY_SLOT, dtype=torch.int32)
    index = replace(index, slots=guarded[:-64].view(shape))
    workspace = make_ngram_workspace(rows, CPU)
    for case, fresh in run:
        _, (tensors,) = pack_batches([case], CPU, *dtypes)
        texts = NgramTexts(**tensors)
        for row in fresh:
            index.clear(int(row))
        if draw.random() < 0.4:
            results = texts.draft_tokens.clone(), texts.seq_lens_this_time.clone()
            extend_ngram_index(index, texts, workspace=workspace)
            assert torch.equal(results[0], texts.draft_tokens)
            assert torch.equal(results[1], texts.seq_lens_this_time)
            assert workspace.tolist() == [0] + [-1] * rows
        threshold = torch.tensor([case.threshold], dtype=torch.int32)
        options = {"threshold": threshold, "convention": case.convention}
        drafts, lens = draft_from_index(index, texts, workspace=workspace, **options)
        assert (drafts.tolist(), lens.tolist()) == expected(case)
        assert workspace.tolist() == [0] + [-1] * rows
        check_tables(index, case)
        assert bool((guarded[-64:] == EMPTY_SLOT).all())
        drafted += int(lens.sum()) - int((lens > 0).sum())
    return drafted


def check_tables(index, case):
    """The table of a row and a size has the first place of each window, once."""
    is_active = (case.arrays["seq_lens_encoder"] > 0) | (case.arrays["seq_lens_decoder"] > 0)
    for row in np.flatnonzero(is_active):
        start = int(case.arrays["prompt_lens"][row, 0])
        prompt = case.arrays["input_ids"][row, : int(case.arrays["input_ids_len"][row, 0])].tolist()
        step = int(case.arrays["step_idx"][row, 0])
        answer = case.arrays["token_ids_all"][row, start : start + step].tolist()
        for size in range(index.min_ngram_size, index.max_ngram_size + 1):
            first = {}
            for text, base in ((prompt, 0), (answer, len(prompt))):
                for follower in range(size, len(text)):
                    first.setdefault(tuple(text[follower - size : follower]), base + follower)
            slots = index.slots[row, size - index.min_ngram_size]
            places = slots[slots != EMPTY_SLOT] >> 8  # of a slot's bits, 8 are of a hash
            assert sorted(places.tolist()) == sorted(first.values())


def runs(seeds, largest, **sizes):
    """Runs of growing texts beside chunks of prompts, for windows of up to `largest` tokens."""
    for seed in seeds:
        run = list(grow_batch(seed, **sizes))
        draw = random.Random(seed)
        for place, (case, fresh) in enumerate(run):
            lens = case.arrays["seq_lens_this_time"].copy()
            is_chunk = case.arrays["seq_lens_encoder"] > 0
            lens[is_chunk] = [draw.randrange(60) for _ in range(is_chunk.sum())]
            threshold = case.threshold + int(lens[is_chunk].sum() * draw.random() * 1.3)
            arrays = case.arrays | {"seq_lens_this_time": lens}
            run[place] = (replace(case, arrays=arrays, threshold=threshold), fresh)
        if largest == 64:
            longest = run[0][0].max_ngram_size + seed % 7 + 3
            run = [(replace(case, max_ngram_size=longest), fresh) for case, fresh in run]
        if 4 * (largest == 64) < run[0][0].max_ngram_size <= largest:
            yield run


def with_tokens(run, rng, vocabularies):
    """The same run with other texts."""
    names, vocab = ("input_ids", "token_ids_all"), rng.choice(vocabularies)
    texts = {name: rng.integers(0, vocab, run[0][0].arrays[name].shape) for name in names}
    return [(replace(case, arrays=case.arrays | texts), fresh) for case, fresh in run]


# Windows whose tokens are in registers, and longer ones.
LARGEST = pytest.mark.parametrize(
    ("largest", "dtypes"), [*zip((4, 64), DTYPES["ngram_match"], strict=True)], ids=("4", "64")
)


@LARGEST
def test_indices_of_growing_texts(largest, dtypes):
    draw = random.Random(largest)
    assert sum(follow(run, dtypes, draw) for run in runs(range(20), largest)) > 100


@LARGEST
def test_indices_of_texts_that_grow_in_leaps(largest, dtypes):
    """More windows than threads, which come again or are many and equal in bits of hashes."""
    draw, rng, drafted = random.Random(largest), np.random.default_rng(largest), 0
    sizes = {"num_steps": 60, "max_rows": 3, "max_room": 300}
    for run in runs(range(25), largest, **sizes):
        fresh = [set().union(*(rows for _, rows in run[i - 14 : i + 1])) for i in range(14, 60, 15)]
        cases = [case for case, _ in with_tokens(run, rng, [2, 5, 12, 40])[14::15]]
        drafted += follow(list(zip(cases, fresh, strict=True)), dtypes, draw)
    assert drafted > 100


@LARGEST
def test_indices_that_are_nearly_full(largest, dtypes):
    """Windows are far from the slots of their hashes, and wrap around at the end of a table."""
    draw, rng, drafted = random.Random(largest), np.random.default_rng(largest), 0
    for run in runs(range(100, 130), largest):
        run = with_tokens(run, rng, [8, 30])  # few windows come again
        longest = max(
            int((case.arrays["input_ids_len"] + case.arrays["step_idx"]).max()) for case, _ in run
        )
        drafted += follow(run, dtypes, draw, capacity=max(16, 1 << longest.bit_length()))
    assert drafted > 25


def test_a_table_that_was_not_cleared_drafts_nothing_but_tokens():
    """It may hold anything; texts are between columns of poison."""
    rng = np.random.default_rng(0)
    for seed in range(40):
        case = make_batch("ngram_match", seed)
        _, (tensors,) = pack_batches([case], CPU, *DTYPES["ngram_match"][0])
        rows = len(case.arrays["input_ids"])
        sizes = {"max_ngram_size": min(4, case.max_ngram_size), "min_ngram_size": 1}
        index = make_ngram_index(rows, 100, CPU, **sizes)
        slots = rng.integers(0, 150 << 8, index.slots.shape) | (rng.random(index.slots.shape) < 0.2)
        index.slots.copy_(torch.from_numpy(slots))
        drafts, _ = draft_from_index(index, NgramTexts(**tensors), threshold=10**4)
        assert set(drafts.flatten().tolist()) <= {POISON, *range(6)}
