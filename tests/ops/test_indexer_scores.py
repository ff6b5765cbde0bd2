"""The scores of wgmma against the oracle: types of queries, borders of tiles, scales, refusals."""

from types import SimpleNamespace

import pytest
import torch

from tests.ops.test_indexer_topk_kernel import make_paged
from tiercel.kernels.attention import indexer_scores as kernel
from tiercel.reference import indexer_topk as oracle

# Queries that are two bfloat16 numbers keep 16 bits.
TOLERANCE = {torch.bfloat16: 2e-5, torch.float32: 2e-4, torch.float16: 2e-5}


@pytest.fixture
def anywhere(request, device, monkeypatch):
    """The kernel on the GPU, or on a processor that has three places for CTAs."""
    if device.type == "cpu":
        request.getfixturevalue("on_processor").seed += 1
        few = SimpleNamespace(multi_processor_count=3)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    return device


def make_q(num_tokens, num_heads, dtype, device):
    """Rows with gaps, aligned."""
    wide = torch.full((num_tokens, num_heads + 1, 136), float("nan"), dtype=dtype, device=device)
    wide[:, 1:, :128] = torch.randn(num_tokens, num_heads, 128, device=device)
    return wide[:, 1:, :128]


def score(q, weights, pool, scales, tables, seq_ids, visible, max_entries, config=None):
    """Scores of the kernel and the best of each 16; NaN where it wrote nothing."""
    scores = torch.full((q.shape[0] + 2, max_entries), float("nan"), device=q.device)
    bests = torch.full((q.shape[0] + 2, -(-max_entries // 16)), float("nan"), device=q.device)
    assert kernel.scores_refusal(q, weights, pool, scales, tables, seq_ids) == ""
    kernel.launch_indexer_scores(
        q, weights, pool, scales, tables, seq_ids, visible, scores[1:-1], bests[1:-1], config
    )
    for rows in (scores, bests):
        assert rows[[0, -1]].isnan().all()  # nothing outside is written
    return scores[1:-1], bests[1:-1]


def check(scores, bests, q, weights, keys, seq_ids, visible):
    for t, sequence in enumerate(seq_ids.tolist()):
        rows = oracle.scores(q[t : t + 1].cpu(), weights[t : t + 1].cpu(), keys[sequence])
        seen = min(max(visible[t].item(), 0), scores.shape[1])
        found, wanted = scores[t, :seen].double().cpu(), rows[0, :seen]
        if seen:
            error = (found - wanted).abs().max() / wanted.abs().max()
            assert error <= TOLERANCE[q.dtype]
        assert scores[t, seen:].isnan().all()
        assert bests[t, -(-seen // 16) :].isnan().all()
        for i, best in enumerate(bests[t, : -(-seen // 16)].tolist()):
            assert best == scores[t, 16 * i : min(16 * i + 16, seen)].max().item()


@pytest.mark.parametrize(
    ("num_heads", "dtype", "config"),
    [(64, torch.bfloat16, (4, 1)), (20, torch.float32, (1, 4)), (5, torch.float16, (2, 2))],
    ids=str,
)
def test_scores_match_the_oracle(num_heads, dtype, config, anywhere):
    """Tokens of two sequences, whose last tiles are cut; entries from the last visible on."""
    keys, pool, scales, tables = make_paged("packed", 128, (700, 200), anywhere)
    pool, scales = pool.contiguous(), scales.contiguous()
    seq_ids = torch.tensor([0, 0, 1, 0, 1], device=anywhere)
    visible = torch.tensor([700, 65, 64, 0, 999], device=anywhere)
    if dtype != torch.bfloat16:
        visible = visible.int()
    q = make_q(5, num_heads, dtype, anywhere)
    weights = torch.randn(5, num_heads + 2, device=anywhere)[:, :num_heads]
    visible = visible.clamp(max=torch.tensor([700, 700, 200, 700, 200], device=anywhere))
    lists = (tables.int(), seq_ids, visible)
    both = score(q, weights, pool, scales, *lists, 700, config)
    check(*both, q, weights, keys, seq_ids, visible)
