"""N-gram drafts after those of an MTP head: the differences from `ngram_match`, line by line.

Stored cases, random batches, graphs and errors of both drafters: test_ngram_match.py.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.ngram_batches import POISON, NgramCase

PROMPT, GENERATED = [1, 2, 3, 4, 5, 6, 7, 8], [9, 1]


def batch(ready, *, max_drafts=5, threshold=1000, **changes):
    """Rows that all find 2, 3, 4, ... in their prompt; `ready` are their lengths on entry."""
    rows = len(ready)
    vectors = {
        "input_ids_len": len(PROMPT),
        "step_idx": len(GENERATED),
        "draft_token_num": 0,  # not read
        "seq_lens_this_time": ready,
        "seq_lens_decoder": 1,
        "max_dec_len": 1000,
    }
    arrays = {
        name: np.broadcast_to(np.asarray(value, dtype=np.int64), (rows,)).copy()
        for name, value in (vectors | changes).items()
    }
    arrays["input_ids"] = np.tile(PROMPT, (rows, 1))
    arrays["pre_ids"] = np.tile([*GENERATED, POISON, POISON], (rows, 1))
    arrays["draft_tokens"] = np.full((rows, max_drafts + 2), POISON)
    return NgramCase("hybrid_mtp_ngram", arrays, 2, 1, max_drafts, threshold, "count")


def lengths(case, device):
    """Lengths afterwards; drafts are checked against the oracle."""
    tensors = case.tensors(device)
    case.run(tensors)
    case.check(tensors)
    return tensors["seq_lens_this_time"].tolist()


def test_drafts_follow_those_of_the_head(device):
    case = batch([1, 3, 5, 6])
    tensors = case.tensors(device)
    case.run(tensors)
    case.check(tensors)
    rest = POISON
    assert tensors["draft_tokens"].tolist() == [
        [rest, 2, 3, 4, 5, 6, rest],
        [rest, rest, rest, 2, 3, 4, rest],
        [rest, rest, rest, rest, rest, 2, rest],
        [rest] * 7,  # five drafts are ready
    ]


def test_idle_rows_stay_as_they_are(device):
    assert lengths(batch([0, 2, 0]), device) == [0, 6, 0]


def test_rows_without_a_decoder_draft_and_give_back_what_they_did_not_reserve(device):
    # u0 = 1 for two rows: the first leaves room for one more.
    case = batch([1, 1], seq_lens_decoder=[0, 1], max_drafts=3)
    for threshold, expected in ((8, [4, 4]), (7, [4, 4]), (6, [4, 3]), (5, [4, 1])):
        assert lengths(replace(case, threshold=threshold), device) == expected


def test_rows_without_room_stay_in_the_reserve(device):
    case = batch([4, 1], max_drafts=3)  # the first is full
    for threshold, expected in ((9, [4, 4]), (8, [4, 3]), (7, [4, 1])):
        assert lengths(replace(case, threshold=threshold), device) == expected


def test_windows_below_the_least_size_do_not_count(device):
    case = replace(batch([1]), min_ngram_size=2)  # one token matches
    assert lengths(case, device) == [1]
    for above in (3, 65, 2**32 + 1, 2**70):  # above the largest: legal
        assert lengths(replace(case, min_ngram_size=above), device) == [1]
    assert lengths(replace(case, min_ngram_size=1), device) == [6]


def test_generation_limit(device):
    assert lengths(batch([1, 1, 1], max_dec_len=[3, 5, 2]), device) == [1, 3, 1]


def test_threshold_from_the_environment(device, monkeypatch):
    case = batch([1] * 300, max_drafts=5)

    def drafted(**options):
        tensors = case.tensors(device)
        case.run(tensors, **options)
        return int((tensors["draft_tokens"] != POISON).sum())

    monkeypatch.delenv("SPEC_TOKENUM_THRESHOLD", raising=False)
    assert drafted(threshold=None) == 1024 - 300
    monkeypatch.setenv("SPEC_TOKENUM_THRESHOLD", "+312")
    assert drafted(threshold=None) == 12
    device_threshold = torch.tensor([307], dtype=torch.int32, device=device)
    assert drafted(threshold=device_threshold) == 7


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_query_ends_with_the_last_ready_draft(dtype, device):
    """`index`: G[s] is the last draft of the MTP head and no part of the text."""
    case = replace(batch([2], step_idx=1), convention="index")
    tensors = case.tensors(device, dtype)
    case.run(tensors)
    case.check(tensors)
    assert tensors["draft_tokens"][0, 2:6].tolist() == [2, 3, 4, 5]


def test_the_generated_text_may_follow_its_prompt(device):
    """One matrix for both, as the engine has it: the same drafts as from two."""
    case = batch([1, 2, 4], max_drafts=6)
    apart = case.tensors(device)
    case.run(apart)
    joined = case.tensors(device)
    both = torch.cat((joined["input_ids"], joined["pre_ids"]), dim=1)
    joined["input_ids"] = joined["pre_ids"] = both
    case.run(joined, prompt_lens=joined["input_ids_len"].clone())
    assert torch.equal(joined["draft_tokens"], apart["draft_tokens"])
    assert torch.equal(joined["seq_lens_this_time"], apart["seq_lens_this_time"])
    assert joined["seq_lens_this_time"].tolist() == [7, 7, 7]
