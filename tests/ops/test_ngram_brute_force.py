"""N-gram drafts of the CPU's way against a search that looks at every place of a text."""

import pytest
import torch

from tests.ngram_batches import grow_batch, pack_batches
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
from tiercel.ops.ngram_index import NgramTexts, make_ngram_index, ngram_index

OPS = ("ngram_match", "hybrid_mtp_ngram")
DTYPES = ((torch.int32, torch.int64), (torch.int64, torch.int32))


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("op", OPS)
def test_random_batches(op, kind):
    assert check_cases(random_cases(op, kind), DTYPES[kind]) > 500


@pytest.mark.parametrize("op", OPS)
def test_texts_and_drafts_of_all_lengths(op):
    assert check_cases([*long_texts(op), *many_drafts(op)], DTYPES[1]) > 1000
    check_cases([*many_rows(op), *every_budget(op)], DTYPES[0])


@pytest.mark.parametrize("kind", [0, 1], ids=["prompt", "generated"])
def test_one_window_at_each_place(kind):
    assert check_cases(list(one_window(kind)), DTYPES[kind]) > 21 * 45


def test_an_index_drafts_as_a_search_does():
    """Windows of its own sizes; an index of a CPU reads the texts."""
    cpu, drafted = torch.device("cpu"), 0
    for seed in range(30):
        for case, _ in grow_batch(seed, num_steps=6):
            _, (tensors,) = pack_batches([case], cpu, *DTYPES[seed % 2])
            index = make_ngram_index(
                len(case.arrays["input_ids"]),
                100,
                cpu,
                max_ngram_size=case.max_ngram_size,
                min_ngram_size=case.min_ngram_size,
            )
            options = {"threshold": case.threshold, "convention": case.convention}
            drafts, lens = ngram_index(index, NgramTexts(**tensors), **options)
            assert (drafts.tolist(), lens.tolist()) == expected(case)
            drafted += int(lens.sum()) - int((lens > 0).sum())
    assert drafted > 200
