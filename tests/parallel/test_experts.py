"""Tokens on a rank that has some whole experts: which pairs count, and which weights are read."""

import torch

from tiercel.layers.moe import own_pairs

TOPK, EXPERTS = 3, 8
FIRST, COUNT = 4, 2


def case(num_tokens=64):
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand((num_tokens, EXPERTS), generator=generator)
    ids = scores.topk(TOPK, dim=1).indices
    return ids, 0.5 + torch.rand((num_tokens, TOPK), generator=generator)


def test_pairs_of_other_ranks_count_nothing():
    """Each expert of the rank has the weights that it has without the others."""
    ids, weights = case()
    own, own_weights = own_pairs(ids, weights, FIRST, COUNT)
    assert own.dtype == torch.int64
    assert own.min() >= 0
    assert own.max() < COUNT
    for expert in range(COUNT):
        wanted = weights.where(ids == FIRST + expert, 0.0).sum(dim=1)
        found = own_weights.where(own == expert, 0.0).sum(dim=1)
        assert torch.equal(found, wanted)


def test_no_expert_is_read_in_vain():
    """A token's pairs name experts that it has on this rank, or the first one if it has none."""
    ids, weights = case()
    own, _ = own_pairs(ids, weights, FIRST, COUNT)
    for before, after in zip(ids.tolist(), own.tolist(), strict=True):
        here = {i - FIRST for i in before if FIRST <= i < FIRST + COUNT}
        assert set(after) == (here or {0})


def test_all_ranks_together_have_every_pair():
    ids, weights = case()
    total = torch.zeros(len(ids), EXPERTS)
    for first in range(0, EXPERTS, COUNT):
        own, own_weights = own_pairs(ids, weights, first, COUNT)
        total[:, first : first + COUNT].scatter_add_(1, own, own_weights)
    assert torch.equal(total, torch.zeros(len(ids), EXPERTS).scatter_add_(1, ids, weights))
