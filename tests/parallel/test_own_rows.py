"""Ranks with rows of their own and experts in common: each row as one process computes it."""

import functools

import numpy as np
import pytest
import torch

from tests.dsv4_engine import TOLERANCE, Steps
from tests.dsv4_files import TINY
from tests.parallel.shared_models import load_shared, write_v4
from tiercel.parallel import SINGLE

EXPERTS = {"tensor_parallel": False, "expert_parallel": True}
# New tokens of each rank in each step. A rank may bring one token fewer than it has said, as where
# drafts turn out to be fewer.
STEPS = ((40, 150), (1, 3), (2, 1))


pytestmark = pytest.mark.usefixtures("one_thread")


def lengths_of(size):
    """Tokens of each rank in each step."""
    return [tuple(counts[rank % 2] + rank // 2 for rank in range(size)) for counts in STEPS]


def compute_own(group, path, rank, lengths, spare):
    """Logits of a rank's own text, and of its draft head."""
    model, weights = load_shared(group, path, **(EXPERTS if group.size > 1 else {}))
    generator = torch.Generator().manual_seed(rank)
    count = sum(counts[rank] for counts in lengths)
    ids = torch.randint(2, model.config.vocab_size, (count,), generator=generator).tolist()
    steps, logits = Steps(model, [ids]), []
    for counts in lengths:
        shares = tuple(count + spare for count in counts) if group.size > 1 else ()
        batch, hidden = steps.step({0: counts[rank]}, rank_tokens=shares)
        with torch.inference_mode():
            logits.append(model.logits(hidden))
            drafted = model.draft_head.forward(batch, hidden)
            logits.append(model.draft_head.logits(drafted))
    return torch.cat(logits).numpy(), weights.read_bytes


@functools.cache
def alone(path, rank, size):
    return compute_own(SINGLE, path, rank, lengths_of(size), 0)


def compute_rank(group, path, lengths, spare):
    return compute_own(group, path, group.rank, lengths, spare)


def check(pool, path, spare):
    found = pool.run(compute_rank, path, lengths_of(pool.size), spare)
    for rank, (logits, read_bytes) in enumerate(found):
        whole, all_bytes = alone(path, rank, pool.size)
        assert np.abs(whole).max() > 1, "logits that say something"
        np.testing.assert_allclose(logits, whole, atol=TOLERANCE, rtol=0)
        assert read_bytes < all_bytes


@pytest.mark.parametrize("spare", [0, 1])
def test_two_ranks_of_the_released_model(two_ranks, spare):
    check(two_ranks, TINY, spare)


@pytest.mark.parametrize("formats", [pytest.param(False, marks=pytest.mark.slow), True])
def test_four_ranks(four_ranks, tmp_path, formats):
    check(four_ranks, write_v4(tmp_path, formats=formats, num_nextn_predict_layers=1), 0)
