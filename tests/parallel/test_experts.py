"""Tokens on a rank that has some whole experts: which pairs count, and which weights are read."""

import torch

from tiercel.ops.moe_route_torch import own_pairs

TOPK, EXPERTS = 3, 8
OWN = range(4, 6)


def case(num_tokens=64):
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand((num_tokens, EXPERTS), generator=generator)
    ids = scores.topk(TOPK, dim=1).indices
    return ids, 0.5 + torch.rand((num_tokens, TOPK), generator=generator)


def test_pairs_of_other_ranks_count_nothing():
    """Each expert of the rank has the weights that it has without the others."""
    ids, weights = case()
    own, own_weights = own_pairs(ids, weights, OWN)
    assert own.dtype == torch.int64
    assert own.max() < len(OWN)
    for number, expert in enumerate(OWN):
        wanted = weights.where(ids == expert, 0.0).sum(dim=1)
        found = own_weights.where(own == number, 0.0).sum(dim=1)
        assert torch.equal(found, wanted)


def test_experts_of_other_ranks_are_left_out():
    """But the first token names one that it has here, or the first expert, in each place."""
    ids, weights = case()
    own, _ = own_pairs(ids, weights, OWN)
    for number, (before, after) in enumerate(zip(ids.tolist(), own.tolist(), strict=True)):
        here = {i - OWN.start for i in before if i in OWN}
        assert set(after) - {-1} == (here if number else here or {0})
        assert (-1 in after) == (number > 0 and len(here) < TOPK)


def test_all_ranks_together_have_every_pair():
    ids, weights = case()
    total = torch.zeros(len(ids), EXPERTS)
    for first in range(0, EXPERTS, len(OWN)):
        own, own_weights = own_pairs(ids, weights, range(first, first + len(OWN)))
        total[:, first : first + len(OWN)].scatter_add_(1, own.clamp(min=0), own_weights)
    assert torch.equal(total, torch.zeros(len(ids), EXPERTS).scatter_add_(1, ids, weights))
