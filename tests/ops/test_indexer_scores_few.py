"""The scores of few tokens over packed keys against the oracle; the op on a GPU."""

import pytest
import torch

from tests.dsv4_cases import captured, poison
from tests.ops.test_indexer_topk import chosen
from tests.ops.test_indexer_topk_kernel import make_paged
from tiercel.kernels.attention import indexer_scores_few as kernel
from tiercel.kernels.attention import indexer_topk as general
from tiercel.ops.indexer_topk import PagedKeys, indexer_topk
from tiercel.reference import indexer_topk as oracle


@pytest.fixture
def anywhere(request, device):
    """The kernel on the GPU, or on a processor."""
    if device.type == "cpu":
        request.getfixturevalue("on_processor")
    return device


def score(q, weights, paged, visible, max_entries, config):
    """Scores into poisoned memory; NaN where nothing is written."""
    indices = (paged.block_tables, paged.seq_ids, visible)
    assert kernel.scores_refusal(q, weights, paged.keys, paged.scales, *indices) == ""
    scores = torch.full((q.shape[0] + 2, max_entries), float("nan"), device=q.device)
    planes = (paged.keys, paged.scales)
    kernel.launch_indexer_scores_few(q, weights, *planes, *indices, scores[1:-1], config)
    assert scores[[0, -1]].isnan().all()
    return scores[1:-1]


def dense(paged_pool):
    """A plane of its own, as in the cache."""
    return paged_pool.contiguous()


def make_case(heads, dtype, device, index_dtype=torch.int64):
    keys, pool, scales, tables = make_paged("packed", 128, (100, 70), device)
    ids = torch.tensor([0, 1, 0, 1], device=device).to(index_dtype)
    paged = PagedKeys(dense(pool), dense(scales), tables.to(index_dtype), ids)
    wide = torch.randn(4, heads + 1, 128 + 8, device=device).to(dtype)
    q, weights = wide[:, 1:, :128], torch.randn(4, heads + 3, device=device)[:, :heads]
    visible = torch.tensor([100, 0, 33, 70], device=device).to(index_dtype)
    return keys, q, weights, paged, visible


@pytest.mark.parametrize(
    ("heads", "dtype", "config", "index_dtype"),
    [
        (64, torch.float32, (1, 4), torch.int64),
        (32, torch.float32, (4, 2), torch.int32),
        (48, torch.bfloat16, (2, 1), torch.int64),
    ],
    ids=str,
)
def test_scores_match_the_oracle(heads, dtype, config, index_dtype, anywhere):
    keys, q, weights, paged, visible = make_case(heads, dtype, anywhere, index_dtype)
    found = score(q, weights, paged, visible, 100, config)
    for t, sequence in enumerate(paged.seq_ids.tolist()):
        seen = visible[t].item()
        wanted = oracle.scores(q[t : t + 1].cpu(), weights[t : t + 1].cpu(), keys[sequence])
        rows = found[t, :seen].double().cpu()
        torch.testing.assert_close(rows, wanted[0, :seen], rtol=1e-4, atol=1e-4)
        assert found[t, seen:].isnan().all()


def test_other_tokens_change_no_bit(anywhere):
    _, q, weights, paged, visible = make_case(16, torch.float32, anywhere)
    full = score(q, weights, paged, visible, 100, (2, 4))
    alone = PagedKeys(paged.keys, paged.scales, paged.block_tables, paged.seq_ids[2:3])
    one = score(q[2:3], weights[2:3], alone, visible[2:3], 100, (2, 4))
    assert torch.equal(full[2, :33], one[0, :33])


def test_launches_are_chosen_by_entries():
    for entries in (1, 4096, 4097, 262144):
        assert kernel.select_indexer_scores_few(entries) in kernel.CONFIGS
    assert kernel.smem_bytes(64, is_split=True) <= 48 << 10


def test_refusals_say_why(device):
    _, q, weights, paged, visible = make_case(16, torch.float32, device)
    rest = (paged.block_tables, paged.seq_ids, visible)

    def refusal(q=q, weights=weights, keys=paged.keys, scales=paged.scales):
        return kernel.scores_refusal(q, weights, keys, scales, *rest)

    assert refusal() == ""
    assert refusal(q=q[:, :5]) == "q is (4, 5, 128)"
    assert refusal(q=q.half()).startswith("q is torch.float16")
    assert refusal(scales=None) == "keys are not packed"
    assert refusal(q=torch.zeros(4, 16, 130, device=device)[..., 1:129]) == "rows are not aligned"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "entries"), [(1, 8192), (1, 40000), (5, 3000)])
def test_the_op_takes_it(num_tokens, entries, dtype, device, monkeypatch):
    keys, pool, scales, tables = make_paged("packed", 128, (entries,), device)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    paged = PagedKeys(dense(pool), dense(scales), tables, ids)
    q = torch.randn(num_tokens, 64, 128, device=device).to(dtype)
    weights = torch.randn(num_tokens, 64, device=device)
    visible = entries - torch.arange(num_tokens, device=device) * 37
    monkeypatch.setattr(general, "launch_indexer_scores", None)

    def run():
        return indexer_topk(q, weights, paged, visible, topk=512, max_entries=entries)

    poison(device)
    out = run()
    assert torch.equal(captured(run), out)
    for t in range(num_tokens):
        rows = oracle.scores(q[t : t + 1].cpu(), weights[t : t + 1].cpu(), keys[0])
        found, wanted = chosen(out[t : t + 1])[0], oracle.topk(rows, visible[t : t + 1], 512)[0]
        least = rows[0, wanted].min().item()
        differing = set(found) ^ set(wanted)
        assert all(abs(rows[0, e].item() - least) <= 1e-4 * rows.abs().max() for e in differing)
