"""The indexer of DeepSeek-V4: scores, choice, ties, pieces, packed keys, poisoned blocks."""

import pytest
import torch

from tests.dsv4_cases import captured, case, poison, strided
from tiercel.errors import ArgumentError
from tiercel.ops import indexer_topk_torch as torch_ops
from tiercel.ops.block_quantize import decode_index_keys, encode_index_keys
from tiercel.ops.indexer_topk import PagedKeys, indexer_scores, indexer_topk
from tiercel.reference import indexer_topk as oracle


def page(keys, per_block, device, dtype=torch.float32):
    """Keys of each sequence in blocks of a shuffled pool; unused rows are NaN."""
    columns = max(-(-rows.shape[0] // per_block) for rows in keys)
    num_blocks = 1 + len(keys) * columns
    pool = torch.full((num_blocks, per_block, keys[0].shape[1] + 3), float("nan"))
    tables = torch.zeros(len(keys), columns, dtype=torch.int32)
    ids = iter((1 + torch.randperm(num_blocks - 1)).tolist())
    for sequence, rows in enumerate(keys):
        for column in range(-(-rows.shape[0] // per_block)):
            tables[sequence, column] = next(ids)
            part = rows[column * per_block : (column + 1) * per_block]
            pool[tables[sequence, column].item(), : part.shape[0], :-3] = part
    return pool.to(device, dtype)[..., :-3], tables.to(device)


def chosen(result):
    """Entries of each row; checks that they ascend and that -1 comes last."""
    rows = []
    for row in result.tolist():
        entries = [entry for entry in row if entry >= 0]
        assert row == sorted(set(entries)) + [-1] * (len(row) - len(entries))
        rows.append(entries)
    return rows


def test_scores_match_the_reference(device):
    data = case("index", device)
    for kind in ("", "_fp4"):
        q, keys = data[f"q{kind}"], data[f"k{kind}"]
        out = indexer_scores(strided(q), strided(data["w"]), strided(keys))
        torch.testing.assert_close(out, data[f"scores{kind}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("topk", [5, 11])
@pytest.mark.parametrize("per_block", [4, 32])
def test_choice_matches_the_reference(topk, per_block, device):
    data = case("index", device)
    pool, tables = page([data["k"].cpu()], per_block, device)
    paged = PagedKeys(pool, None, tables, torch.zeros(9, dtype=torch.int64, device=device))
    out = indexer_topk(data["q"], data["w"], paged, data["visible"], topk=topk, max_entries=14)
    mask = data[f"mask_top{topk}"]
    assert chosen(out) == [row.nonzero()[:, 0].tolist() for row in mask]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "d", "topk", "lengths"),
    [(6, 32, 5, (14, 3, 40)), (12, 64, 7, (100, 1)), (3, 48, 30, (65, 0, 29, 31))],
)
def test_matches_oracle(num_heads, d, topk, lengths, dtype, monkeypatch, device):
    """Sequences of unequal lengths, four tokens each, in pieces of two blocks."""
    monkeypatch.setattr(torch_ops, "PIECE_ENTRIES", 16)
    keys = [torch.randn(length, d).to(dtype).float() for length in lengths]
    pool, tables = page(keys, 8, device, dtype)
    num_tokens = 4 * len(lengths)
    seq_ids = torch.arange(num_tokens) % len(lengths)
    q = torch.randn(num_tokens, num_heads, d).to(dtype)
    weights = torch.randn(num_tokens, num_heads)
    visible = torch.tensor([int(lengths[s] * (t % 5 + 1) / 5) for t, s in enumerate(seq_ids)])
    expected = []
    for t, sequence in enumerate(seq_ids.tolist()):
        rows = oracle.scores(q[t : t + 1], weights[t : t + 1], keys[sequence])
        expected += oracle.topk(rows, visible[t : t + 1], topk)
    paged = PagedKeys(pool, None, tables, seq_ids.to(device))
    arguments = (strided(q.to(device)), weights.to(device), paged, visible.int().to(device))
    for budget in (1, 1 << 28):  # a token at a time, and all
        monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", budget)
        poison(device)
        out = indexer_topk(*arguments, topk=topk, max_entries=max(lengths))
        assert out.dtype == torch.int32
        assert chosen(out) == expected


def test_ties_go_to_the_lower_entry(monkeypatch, device):
    """Scores of exactly 0, of either sign, are all equal; they come from several pieces."""
    monkeypatch.setattr(torch_ops, "PIECE_ENTRIES", 8)
    keys = -torch.rand(40, 32)  # all products negative: zero after the relu
    keys[29] = 1.0
    keys[11] = -1.0
    pool, tables = page([keys], 4, device)
    paged = PagedKeys(pool, None, tables, torch.zeros(3, dtype=torch.int32, device=device))
    q = torch.rand(3, 2, 32, device=device) + 0.1
    weights = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]], device=device)
    weights[2] = 0.0
    visible = torch.tensor([40, 40, 33], device=device)
    out = indexer_topk(q, weights, paged, visible, topk=6, max_entries=40)
    assert chosen(out) == [[0, 1, 2, 3, 4, 29], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_zeros_of_either_sign_tie(device):
    scores = torch.tensor([[-0.0, 0.0, -1e-45, 1e-45, -2.0, float("-inf")]], device=device)
    keys = torch_ops.sort_keys(scores, 7, torch.tensor([99], device=device))
    assert keys[0].argsort(descending=True).tolist() == [3, 0, 1, 2, 4, 5]
    hidden = torch_ops.sort_keys(scores, 7, torch.tensor([12], device=device))
    assert torch_ops.entries_of(hidden).tolist() == [[7, 8, 9, 10, 11, -1]]


def test_packed_keys_are_their_decoded_values(device):
    keys = encode_index_keys(torch.randn(60, 128, device=device)).unflatten(0, (3, 20))
    tables = torch.tensor([[2, 0, 1]], device=device)
    seq_ids = torch.zeros(4, dtype=torch.int64, device=device)
    q, weights = torch.randn(4, 5, 128, device=device), torch.randn(4, 5, device=device)
    visible = torch.tensor([60, 44, 12, 0], device=device)
    packed = PagedKeys(keys[..., :64], keys[..., 64:], tables, seq_ids)
    plain = PagedKeys(decode_index_keys(keys), None, tables, seq_ids)
    results = [
        indexer_topk(q, weights, paged, visible, topk=9, max_entries=60)
        for paged in (packed, plain)
    ]
    assert torch.equal(*results)
    assert chosen(results[0])[3] == []


def test_few_entries_are_taken_without_scores(device):
    pool = torch.full((2, 8, 32), float("nan"), device=device)
    tables = torch.zeros(1, 1, dtype=torch.int64, device=device)
    paged = PagedKeys(pool, None, tables, torch.zeros(3, dtype=torch.int64, device=device))
    q, weights = torch.randn(3, 2, 32, device=device), torch.randn(3, 2, device=device)
    visible = torch.tensor([0, 5, 99], device=device)
    out = indexer_topk(q, weights, paged, visible, topk=8, max_entries=7)
    assert chosen(out) == [[], list(range(5)), list(range(7))]


def test_entries_beyond_the_bound_are_not_read(device):
    keys = torch.ones(12, 32)
    keys[6:] = 100.0
    pool, tables = page([keys], 4, device)
    paged = PagedKeys(pool, None, tables, torch.zeros(1, dtype=torch.int64, device=device))
    q, weights = torch.ones(1, 2, 32, device=device), torch.ones(1, 2, device=device)
    visible = torch.tensor([12], device=device)
    out = indexer_topk(q, weights, paged, visible, topk=3, max_entries=6)
    assert chosen(out) == [[0, 1, 2]]


def test_workspace_does_not_grow_with_the_context(monkeypatch, device):
    """The largest gather of PyTorch has the same size for 5,000 and 40,000 entries."""
    monkeypatch.setenv("TIERCEL_INDEXER_KERNEL", "0")
    monkeypatch.setattr(torch_ops, "PIECE_ENTRIES", 256)
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", 1 << 20)
    sizes = []

    def gather(*arguments):
        keys = original(*arguments)
        sizes[-1] = max(sizes[-1], keys.shape[0] * keys.shape[1])
        return keys

    original = torch_ops.gather_piece
    monkeypatch.setattr(torch_ops, "gather_piece", gather)
    for entries in (5_000, 40_000):
        pool, tables = page([torch.randn(entries, 32)], 8, device)
        paged = PagedKeys(pool, None, tables, torch.zeros(9, dtype=torch.int64, device=device))
        q, weights = torch.randn(9, 2, 32, device=device), torch.randn(9, 2, device=device)
        visible = torch.full((9,), entries, device=device)
        sizes.append(0)
        indexer_topk(q, weights, paged, visible, topk=7, max_entries=entries)
    assert sizes[0] == sizes[1] > 0
    assert sizes[0] * 12 * 32 < 1 << 20


def test_no_tokens(device):
    paged = PagedKeys(
        torch.randn(2, 8, 32, device=device),
        None,
        torch.zeros(0, 1, dtype=torch.int64, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
    )
    q, weights = torch.empty(0, 2, 32, device=device), torch.empty(0, 2, device=device)
    visible = torch.zeros(0, dtype=torch.int64, device=device)
    assert indexer_topk(q, weights, paged, visible, topk=3, max_entries=8).shape == (0, 3)
    assert indexer_scores(q, weights, paged.keys[0]).shape == (0, 8)


def test_op_names_the_bad_argument(device):
    pool, tables = page([torch.randn(9, 32)], 4, device)
    seq_ids = torch.zeros(2, dtype=torch.int64, device=device)
    paged = PagedKeys(pool, None, tables, seq_ids)
    q, weights = torch.randn(2, 3, 32, device=device), torch.randn(2, 3, device=device)
    visible = torch.tensor([9, 9], device=device)
    options = {"topk": 2, "max_entries": 9}
    with pytest.raises(ArgumentError, match=r"q is \(3, 32\)"):
        indexer_topk(q[0], weights, paged, visible, **options)
    with pytest.raises(ArgumentError, match=r"weights \(2, 2\)"):
        indexer_scores(q, weights[:, :2], pool[0])
    with pytest.raises(ArgumentError, match=r"keys are \(4, 31\)"):
        indexer_scores(q, weights, pool[0, :, :31])
    with pytest.raises(ArgumentError, match=r"visible is \(1,\)"):
        indexer_topk(q, weights, paged, visible[:1], **options)
    with pytest.raises(ArgumentError, match="topk=0"):
        indexer_topk(q, weights, paged, visible, topk=0, max_entries=9)
    bad = PagedKeys(pool[..., :31], None, tables, seq_ids)
    with pytest.raises(ArgumentError, match=r"keys are \(4, 4, 31\)"):
        indexer_topk(q, weights, bad, visible, **options)
    packed = torch.zeros(4, 4, 16, dtype=torch.uint8, device=device)
    with pytest.raises(ArgumentError, match=r"scales are None for torch\.uint8") as error:
        indexer_topk(q, weights, PagedKeys(packed, None, tables, seq_ids), visible, **options)
    assert error.value.hint == "Pass (4, 4, 1)."
    bad = PagedKeys(pool, None, tables, seq_ids[:1])
    with pytest.raises(ArgumentError, match=r"seq_ids \(1,\)"):
        indexer_topk(q, weights, bad, visible, **options)


@pytest.mark.gpu
def test_replay_equals_eager(device):
    pool, tables = page([torch.randn(300, 64)], 32, device)
    paged = PagedKeys(pool, None, tables, torch.zeros(5, dtype=torch.int64, device=device))
    q, weights = torch.randn(5, 12, 64, device=device), torch.randn(5, 12, device=device)
    visible = torch.tensor([300, 10, 0, 150, 7], device=device)

    def run():
        return indexer_topk(q, weights, paged, visible, topk=7, max_entries=300)

    assert torch.equal(captured(run), run())
