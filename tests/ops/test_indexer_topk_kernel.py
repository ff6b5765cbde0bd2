"""The kernels of the indexer against the oracle: scores, choice, ties, pieces, runs."""

import pytest
import torch

from tests.dsv4_cases import captured, poison, strided
from tests.ops.test_indexer_topk import chosen, page
from tiercel.kernels.attention import indexer_topk as kernel
from tiercel.ops import indexer_topk as op
from tiercel.ops import indexer_topk_torch as torch_ops
from tiercel.ops.block_quantize import decode_index_keys, encode_index_keys
from tiercel.ops.indexer_topk import PagedKeys, indexer_topk, kernel_refusal
from tiercel.reference import indexer_topk as oracle


@pytest.fixture
def small(monkeypatch):
    """Pieces and runs of few tokens, so that small inputs pass all levels."""
    monkeypatch.setattr(kernel, "PIECES", (32, 64))
    monkeypatch.setattr(kernel, "MANY_TOKENS", 4)
    monkeypatch.setattr(kernel, "FEW_TOKENS", 2)
    monkeypatch.setattr(kernel, "BLOCK_N", 32)
    kernel._launch_scores.cache_clear()
    yield
    kernel._launch_scores.cache_clear()


def score(q, weights, paged, visible, max_entries):
    """Scores of the kernel; NaN where it wrote nothing."""
    nan = {"fill_value": float("nan"), "device": q.device}
    scores = torch.full((q.shape[0] + 2, max_entries), **nan)
    keys = (paged.keys, paged.scales, paged.block_tables, paged.seq_ids)
    kernel.launch_indexer_scores(q, weights, *keys, visible, scores[1:-1])
    assert scores[0].isnan().all()  # nothing outside is written
    assert scores[-1].isnan().all()
    return scores[1:-1]


def select(scores, visible, topk):
    """Entries that the kernel chooses, into poisoned memory."""
    num_tokens, max_entries = scores.shape
    counts = [pieces * topk for pieces, _ in kernel.plan(max_entries, topk)]
    candidates = [
        torch.full((num_tokens, count), 1 << 30, dtype=torch.int32, device=scores.device)
        for count in counts[:-1]
    ]
    out = torch.full((num_tokens + 2, topk), 7, dtype=torch.int32, device=scores.device)
    kernel.launch_indexer_select(scores, visible, out[1:-1], topk, candidates)
    assert out[0].eq(7).all()
    assert out[-1].eq(7).all()
    return out[1:-1]


def make_paged(form, d, lengths, device):
    """Random keys of sequences, as values and in shuffled blocks of 8."""
    if form != "packed":
        dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
        keys = [torch.randn(length, d).to(dtype).float() for length in lengths]
        pool, tables = page(keys, 8, device, dtype)
        return keys, pool, None, tables
    encoded = [encode_index_keys(torch.randn(length, d)) for length in lengths]
    keys = [decode_index_keys(rows) for rows in encoded]
    pool, tables = page([rows.float() for rows in encoded], 8, device)
    pool = pool.nan_to_num(255.0).to(torch.uint8)
    return keys, pool[..., : d // 2], pool[..., d // 2 :], tables


@pytest.mark.parametrize(
    ("form", "num_heads", "d", "dtype"),
    [
        ("packed", 20, 128, torch.bfloat16),
        ("packed", 6, 32, torch.float32),
        ("bfloat16", 5, 64, torch.float16),
        ("float32", 3, 32, torch.float32),
    ],
)
def test_scores_and_choice_match_the_oracle(form, num_heads, d, dtype, small, device):
    """Runs of one sequence of any length, in any order; two levels of pieces."""
    lengths, topk = (100, 70), 9
    keys, pool, scales, tables = make_paged(form, d, lengths, device)
    seq_ids = torch.tensor([0, 0, 1, 0, 1, 1, 1, 1, 0])
    q = torch.randn(9, num_heads, d)
    if device.type == "cuda":  # the interpreter multiplies float32
        q = q.to(dtype)
    weights = torch.randn(9, num_heads)
    visible = torch.tensor([5, 100, 70, 0, 33, 8, 64, 65, 99])
    paged = PagedKeys(pool, scales, tables, seq_ids.to(device))
    arguments = (strided(q.to(device)), strided(weights.to(device)), paged, visible.to(device))
    scores = score(*arguments, 100)
    assert len(kernel.plan(100, topk)) == 2
    best = chosen(select(scores, visible.to(device), topk))
    for t, sequence in enumerate(seq_ids.tolist()):
        rows = oracle.scores(q[t : t + 1], weights[t : t + 1], keys[sequence])
        seen = visible[t].item()
        found = scores[t, :seen].double().cpu()
        torch.testing.assert_close(found, rows[0, :seen], rtol=1e-5, atol=2e-5)
        assert best[t] == oracle.topk(rows, visible[t : t + 1], topk)[0]


def test_choice_of_equal_and_extreme_scores(small, device):
    """Against the composite keys of the PyTorch path, over all levels."""
    rows = torch.randint(-2, 3, (4, 300)).float() * 0.5
    rows[0] = 0.0
    rows[0, ::3] = -0.0
    rows[1, 250:] = torch.tensor([float("inf"), -float("inf"), 1e-45, -1e-45, 3e38]).repeat(10)
    rows[2, 100:] = float("nan")  # not visible
    rows = rows.to(device)
    visible = torch.tensor([300, 300, 100, 999], dtype=torch.int32, device=device)
    for topk in (5, 31):
        assert len(kernel.plan(300, topk)) == {5: 2, 31: 4}[topk]
        keys = torch_ops.sort_keys(rows, 0, visible)
        expected = torch_ops.entries_of(torch.topk(keys, topk, dim=1).values)
        assert torch.equal(select(rows, visible, topk), expected)


def test_choice_at_the_sizes_of_the_models(device):
    """Pieces of 2,048 and 8,192 scores; fewer visible entries than are chosen."""
    for max_entries, topk in ((1100, 512), (2100, 1024)):
        rows = torch.randn(2, max_entries, device=device)
        visible = torch.tensor([max_entries, 400], device=device)
        keys = torch_ops.sort_keys(rows, 0, visible)
        expected = torch_ops.entries_of(torch.topk(keys, topk, dim=1).values)
        assert torch.equal(select(rows, visible, topk), expected)


def test_other_tokens_change_no_bit(small, device):
    _, pool, scales, tables = make_paged("packed", 64, (60,), device)
    q, weights = torch.randn(2, 5, 64, device=device), torch.randn(2, 5, device=device)
    visible = torch.tensor([60, 44], device=device)
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    full = score(q, weights, PagedKeys(pool, scales, tables, ids), visible, 60)
    alone = score(q[:1], weights[:1], PagedKeys(pool, scales, tables, ids[:1]), visible[:1], 60)
    assert torch.equal(full[:1], alone)


def test_the_op_takes_some_tokens_at_a_time(small, monkeypatch, device):
    """The path of a GPU, in a workspace of two tokens."""
    _, pool, scales, tables = make_paged("packed", 32, (90, 80), device)
    ids = torch.tensor([0, 0, 1, 1, 0], device=device)
    paged = PagedKeys(pool, scales, tables, ids)
    q, weights = torch.randn(5, 3, 32, device=device), torch.randn(5, 3, device=device)
    visible = torch.tensor([[90, 2], [30, 2], [80, 2], [0, 2], [64, 2]], device=device)[:, 0]
    arguments = (q, weights, paged, visible, 7, 90)
    expected = torch_ops.best_entries(*arguments)
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", 2 * 4 * (90 + 2 * 7))
    assert torch.equal(op._launch(*arguments), expected)


def test_plans():
    assert kernel.plan(2048, 512) == [(1, 2048)]
    assert kernel.plan(8192, 1024) == [(1, 8192)]
    assert kernel.plan(32768, 512) == [(4, 8192), (1, 2048)]
    assert kernel.plan(262144, 512) == [(32, 8192), (2, 8192), (1, 2048)]
    assert kernel.plan(262144, 1024) == [(32, 8192), (4, 8192), (1, 8192)]
    assert kernel.plan(1 << 20, kernel.MOST_TOPK)[-1][0] == 1


def test_refusals_say_why(device):
    _, pool, scales, tables = make_paged("packed", 64, (60,), device)
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    q, paged = torch.randn(2, 5, 64, device=device), PagedKeys(pool, scales, tables, ids)
    assert kernel_refusal(q, paged, 512) == ""
    assert kernel_refusal(q, paged, 4096) == "topk=4096"
    assert kernel_refusal(q[..., :48], paged, 5) == "48 channels"
    assert kernel_refusal(q.repeat(1, 30, 1), paged, 5) == "150 heads"
    assert kernel_refusal(q.double(), paged, 5).startswith("q is torch.float64")
    turned = PagedKeys(pool, scales, tables.repeat(2, 1).t(), ids)
    assert kernel_refusal(q, turned, 5) == "keys or tables with strides"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "entries"), [(1, 40000), (5, 3000), (100, 9000)])
def test_op_matches_the_torch_path(num_tokens, entries, dtype, device, monkeypatch):
    """Exact scores, so that the choices are equal: small integers over 64; replay is the same."""
    keys = torch.randint(-2, 3, (entries, 128)).float()
    pool, tables = page([keys], 32, device, torch.bfloat16)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    paged = PagedKeys(pool, None, tables, ids)
    q = torch.randint(-2, 3, (num_tokens, 32, 128), device=device).to(dtype)
    weights = torch.randint(-2, 3, (num_tokens, 32), device=device).float()
    visible = torch.arange(num_tokens, device=device) * 37 + entries - 37 * num_tokens

    def run():
        return indexer_topk(q, weights, paged, visible, topk=512, max_entries=entries)

    poison(device)
    out = run()
    assert torch.equal(captured(run), out)
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", 1 << 20)  # some tokens at a time
    assert torch.equal(run(), out)
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", 1 << 28)
    monkeypatch.setenv("TIERCEL_INDEXER_KERNEL", "0")
    monkeypatch.setattr(kernel, "launch_indexer_scores", None)
    assert torch.equal(run(), out)
