"""Attention over the paged cache: which keys a token sees, through which blocks, and their sum."""

import pytest
import torch

from tiercel.batch import Batch
from tiercel.errors import ArgumentError
from tiercel.kernels import paged_attention as kernel
from tiercel.ops.paged_attention import paged_attention
from tiercel.reference import paged_attention as oracle

# (heads, kv_heads, head_dim) of SmolLM2, Qwen2.5-0.5B and Gemma 3, and one without groups.
HEADS = [(9, 3, 64), (14, 2, 64), (4, 1, 256), (3, 3, 40)]
# Requests as (new tokens, context including them).
BATCHES = {
    "first token": [(1, 1)],
    "prompt": [(70, 70)],
    "decode": [(1, 67)],
    "chunk": [(7, 30)],
    "chunk from a block's end": [(66, 130)],
    "decodes": [(1, 3), (1, 64), (1, 65), (1, 1), (1, 128)],
    "mixed": [(1, 17), (9, 9), (1, 66), (5, 29), (2, 2)],
}
WINDOWS = (0, 6, 64)
# Relative, of whole results (norms): softmax is float32, but weights are rounded to 16 bits before
# they meet the values, and the result is rounded once more; each costs up to half a unit.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-8 + 2**-9, torch.float16: 2**-11 + 2**-12}
POISON = 1000.0  # in every slot that no request owns: seen once, it takes over the softmax


def make_batch(requests, block_size, device, *, is_run=False, num_blocks=80):
    """A batch over blocks in random order, or in one run per request; rows are shuffled too.

    Returns:
        The batch and the slots of each request's context.
    """
    rows = torch.randperm(len(requests) + 2)[: len(requests)]
    order = torch.arange(num_blocks - 1) if is_run else torch.randperm(num_blocks - 1)
    free, tables, slots = (1 + order).tolist(), torch.zeros(len(requests) + 2, 40), []
    for row, (_, context) in zip(rows.tolist(), requests, strict=True):
        count = -(-context // block_size)
        blocks, free = torch.tensor(free[:count]), free[count:]
        tables[row, :count] = blocks
        places = torch.arange(context)
        slots.append(blocks[places // block_size] * block_size + places % block_size)
    query_lens = tuple(queries for queries, _ in requests)
    contexts = tuple(context for _, context in requests)
    mapping = [places[-queries:] for places, queries in zip(slots, query_lens, strict=True)]
    num_tokens = sum(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    positions = [torch.arange(context)[-queries:] for queries, context in requests]
    int32 = {"dtype": torch.int32, "device": device}
    batch = Batch(
        input_ids=torch.zeros(num_tokens, **int32),
        positions=torch.cat([torch.empty(0), *positions]).to(**int32),
        cu_seqlens_q=starts.to(**int32),
        seq_lens=torch.tensor(contexts).to(**int32),
        rows=rows.to(**int32),
        logits_rows=(starts[1:] - 1).to(**int32),
        slot_mapping=torch.cat([torch.empty(0), *mapping]).long().unsqueeze(0).to(device),
        block_tables=tables.unsqueeze(0).to(**int32),
        query_lens=query_lens,
        context_lens=contexts,
        num_tokens=num_tokens,
        num_reqs=len(requests),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(contexts, default=0),
    )
    return batch, slots


def make_case(requests, shape, block_size, dtype, device, *, is_run=False):
    """Queries cut out of a fused row, poisoned caches with each request's keys in its slots."""
    heads, kv_heads, head_dim = shape
    batch, slots = make_batch(requests, block_size, device, is_run=is_run)
    fused = torch.randn(batch.num_tokens, heads + 2 * kv_heads, head_dim).to(dtype).to(device)
    caches = torch.full((2, 80, block_size, kv_heads, head_dim), POISON).to(dtype)
    entries = [torch.randn(2, len(places), kv_heads, head_dim).to(dtype) for places in slots]
    for places, entry in zip(slots, entries, strict=True):
        caches.flatten(1, 2)[:, places] = entry
    keys, values = [entry[0] for entry in entries], [entry[1] for entry in entries]
    k_cache, v_cache = caches.to(device)
    return fused[:, :heads], k_cache, v_cache, batch, keys, values


def relative_error(actual, expected):
    return ((actual.double().cpu() - expected).norm() / expected.norm()).item()


def check_op(requests, shape, block_size, window, dtype, device, *, is_run=False):
    q, k_cache, v_cache, batch, keys, values = make_case(
        requests, shape, block_size, dtype, device, is_run=is_run
    )
    scale = 0.4 if shape[2] == 64 else 1 / 16  # not 1 / sqrt(head_dim): scale is an argument
    out = paged_attention(q, k_cache, v_cache, batch, scale, window=window)
    assert out.dtype == dtype
    assert out.shape == (batch.num_tokens, shape[0] * shape[2])
    query_lens = list(batch.query_lens)
    expected = oracle.paged_attention(q.cpu(), keys, values, query_lens, scale, window)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [4, 64])
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_op_matches_oracle(requests, shape, block_size, window, device):
    check_op(requests, shape, block_size, window, torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_op_matches_oracle_in_16_bits(requests, shape, dtype, device):
    check_op(requests, shape, 64, 0, dtype, device)
    check_op(requests, shape, 64, 6, dtype, device)


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_blocks_in_a_run(requests, device):
    check_op(requests, (9, 3, 64), 4, 6, torch.float32, device, is_run=True)
    check_op(requests, (9, 3, 64), 4, 0, torch.bfloat16, device, is_run=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 1, 5, 22, 23, 24])
@pytest.mark.parametrize("queries", [1, 6, 23])
def test_which_keys_each_token_sees(queries, window, dtype, device):
    """One huge value at a time: it shows in exactly the tokens p with j <= p < j + window."""
    context = 23
    q, k_cache, v_cache, batch, _, _ = make_case([(queries, context)], (4, 2, 64), 4, dtype, device)
    blocks = batch.block_tables[0, int(batch.rows[0])].tolist()
    positions = batch.positions.cpu()
    for key in range(context):
        v_cache.zero_()
        v_cache[blocks[key // 4], key % 4] = 1000.0
        out = paged_attention(q * 0.1, k_cache, v_cache, batch, 0.1, window=window).float().cpu()
        is_seen = (positions >= key) & (positions < key + (window or context))
        assert (out[is_seen] > 1.0).all()  # a weight of at least a thousandth
        assert (out[~is_seen] == 0.0).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [0, 9, 33])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 50), (33, 33), (6, 50)])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_attend_one_matches_oracle(shape, queries, keys, window, dtype, device):
    heads, kv_heads, head_dim = shape
    q, k, v = (
        torch.randn(tokens, count + 2, head_dim).to(dtype)[:, 1:-1]
        for tokens, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    out = kernel.attend_one(q.to(device), k.to(device), v.to(device), 0.2, window)
    assert out.shape == q.shape
    expected = oracle.paged_attention(q, [k], [v], [queries], 0.2, window)
    assert relative_error(out.flatten(1), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_attend_decode_matches_oracle(shape, window, dtype, device):
    """The form of a GPU's decode steps; PyTorch operators, so a CPU can judge it too."""
    q, k_cache, v_cache, batch, keys, values = make_case(
        BATCHES["decodes"], shape, 16, dtype, device
    )
    tables = batch.block_tables[0].index_select(0, batch.rows)[:, : 128 // 16]
    out = kernel.attend_decode(q, k_cache, v_cache, tables, batch.seq_lens, 0.2, window)
    expected = oracle.paged_attention(q.cpu(), keys, values, [1] * 5, 0.2, window)
    assert relative_error(out.flatten(1), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("is_run", [False, True])
def test_gathered_entries_are_those_of_the_table(is_run, device):
    cache = torch.randn(9, 4, 2, 8, device=device)
    blocks = [3, 4, 5, 6] if is_run else [3, 4, 6, 5]
    table = torch.tensor([*blocks, 0, 0], dtype=torch.int32, device=device)
    for length in (1, 4, 5, 13, 16):
        out = kernel.gather_cache(cache, table, length)
        assert torch.equal(out, cache[blocks].flatten(0, 1)[:length])
        is_view = out.data_ptr() == cache[3].data_ptr()
        assert is_view == (device.type == "cpu" and (is_run or length <= 8))


def test_the_cache_group_is_chosen(device):
    q, k_cache, v_cache, batch, keys, values = make_case(
        BATCHES["mixed"], (9, 3, 64), 4, torch.float32, device
    )
    other, own = torch.zeros_like(batch.block_tables), batch.block_tables
    fields = {name: getattr(batch, name) for name in Batch.__slots__}
    batch = Batch(**{**fields, "block_tables": torch.cat((other, own))})
    out = paged_attention(q, k_cache, v_cache, batch, 0.1, group=1)
    expected = oracle.paged_attention(q.cpu(), keys, values, list(batch.query_lens), 0.1)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_caches_and_queries_are_left_alone(device):
    q, k_cache, v_cache, batch, _, _ = make_case(
        BATCHES["mixed"], (9, 3, 64), 4, torch.bfloat16, device
    )
    before = [tensor.clone() for tensor in (q, k_cache, v_cache)]
    first = paged_attention(q, k_cache, v_cache, batch, 0.1, window=5)
    assert all(torch.equal(a, b) for a, b in zip((q, k_cache, v_cache), before, strict=True))
    assert torch.equal(first, paged_attention(q, k_cache, v_cache, batch, 0.1, window=5))


def test_no_requests(device):
    batch, _ = make_batch([], 4, device)
    q = torch.empty(0, 9, 64, device=device)
    cache = torch.zeros(4, 4, 3, 64, device=device)
    assert paged_attention(q, cache, cache, batch, 0.1).shape == (0, 9 * 64)


def test_op_names_the_bad_argument(device):
    q, k_cache, v_cache, batch, _, _ = make_case([(2, 5)], (9, 3, 64), 4, torch.float32, device)
    with pytest.raises(ArgumentError, match=r"q \(1, 9, 64\) does not fit 2 tokens"):
        paged_attention(q[:1], k_cache, v_cache, batch, 0.1)
    with pytest.raises(ArgumentError, match=r"q \(2, 8, 64\) .* a cache of \(80, 4, 3, 64\)"):
        paged_attention(q[:, :8], k_cache, v_cache, batch, 0.1)
    with pytest.raises(ArgumentError, match=r"q \(2, 9, 32\)"):
        paged_attention(q[..., :32], k_cache, v_cache, batch, 0.1)
