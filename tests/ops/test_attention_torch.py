"""Attention on a CPU past its tiles of 512 keys and its blocks of 256 rows of items."""

import random
from dataclasses import replace

import pytest
import torch

from tests.ops import prefill_attention_cases
from tests.ops.prefill_attention_cases import assert_lse
from tests.paged_batches import TOLERANCE, make_case, relative_error
from tiercel.errors import ArgumentError
from tiercel.ops.decode_attention import decode_attention
from tiercel.ops.decode_attention_torch import TILE, attend_one, first_key, gather_cache
from tiercel.ops.prefill_attention_torch import BLOCK_ROWS, _blocks
from tiercel.reference.prefill_attention import prefill_attention as oracle

CPU = torch.device("cpu")
SHAPE = (2, 1, 8)
# Prompts, chunks and steps that begin, end and look back at a tile's end, or one beside it.
LENGTHS = (512, 513, 1023, 1060)
WINDOWS = (0, 1, 2, 60, 511, 512, 513, 514, 900)
LEAST_QUERIES, BLOCK_SIZE = 17, 64  # of a prompt whose start was cached: see scheduler.py


def expected_of(case, scale, window):
    q, _, _, batch, keys, values = case
    return oracle(q, keys, values, list(batch.query_lens), scale, window)[0]


def check_long_contexts(window, dtype):
    rng = random.Random(window)
    for length in LENGTHS:
        for queries in (1, 2, length - 511, rng.randint(1, length)):
            requests = [(queries, length), (1, rng.randint(1, 600))]
            block_size = rng.choice((16, 48, 64))
            case = make_case(requests, SHAPE, block_size, dtype, CPU, is_run=rng.random() < 0.3)
            out = decode_attention(*case[:4], 0.3, window=window)
            assert relative_error(out, expected_of(case, 0.3, window)) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", WINDOWS)
def test_long_contexts_match_oracle(window):
    check_long_contexts(window, torch.float32)


def test_long_contexts_match_oracle_in_16_bits():
    check_long_contexts(513, torch.bfloat16)


@pytest.mark.parametrize("window", [1, 2, 64, 65, 100, 513])
def test_blocks_before_a_window_may_be_gone(window):
    """The table then holds the null block, whatever that holds."""
    for queries, context in ((1, 640), (1, 129), (2, 66), (30, 1060), (88, 600)):
        case = make_case([(queries, context)], SHAPE, 64, torch.float32, CPU)
        _, k_cache, v_cache, batch, _, _ = case
        low = max(0, context - queries - window + 1) // 64
        batch.block_tables[0, int(batch.rows[0]), :low] = 0
        k_cache[0] = v_cache[0] = 1000.0
        out = decode_attention(*case[:4], 0.3, window=window)
        assert relative_error(out, expected_of(case, 0.3, window)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [0, 70, 600])
def test_a_tokens_bits_do_not_depend_on_where_its_chunk_began(window):
    """So a prompt whose start was cached has the same result as one computed whole."""
    q, k, v = (torch.randn(1060, heads, 16) for heads in (4, 2, 2))
    for stop in (700, 1024, 1060):
        whole = attend_one(q[:stop], k[:stop], v[:stop], 0.3, window)
        for start in range(BLOCK_SIZE, stop - LEAST_QUERIES, 3 * BLOCK_SIZE):
            base = first_key(start, stop - start, window)
            chunk = attend_one(q[start:stop], k[base:stop], v[base:stop], 0.3, window, base)
            assert torch.equal(chunk, whole[start:])


@pytest.mark.parametrize("window", [0, 1, 5, 512, 513, 600])
def test_what_is_gathered_is_what_is_seen(window):
    """Never less; for one query never more, for others from the start of a tile."""
    for start in (0, 4, 5, 511, 512, 1024, 1030, 1110):
        seen = max(0, start - window + 1) if window else 0
        assert first_key(start, 1, window) == seen
        for queries in (2, 100):
            first = first_key(start, queries, window)
            assert first % TILE == 0
            assert first <= seen < first + TILE


@pytest.mark.parametrize(
    "blocks", [[5, 6, 7, 8], [5, 6, 8, 7], [8, 7, 6, 5], [5, 7, 8, 9], [5] * 4]
)
def test_gathered_entries_begin_with_a_block(blocks):
    cache = torch.randn(10, 4, 2, 3)
    table = torch.tensor([*blocks, 0], dtype=torch.int32)
    every = cache[blocks].flatten(0, 1)
    for length in (1, 3, 4, 5, 15, 16):
        for first in range(length):
            out = gather_cache(cache, table, length, first)
            assert torch.equal(out, every[first // 4 * 4 : length])


# --- Items


def lengths_of(starts):
    """Rows of each item, of their `item_start`."""
    cuts = [i for i, start in enumerate(starts) if i == 0 or start != starts[i - 1]]
    return [b - a for a, b in zip(cuts, [*cuts[1:], len(starts)], strict=True)]


def test_blocks_hold_whole_items():
    """As many as fit; a longer item is a block of its own."""
    rng = random.Random(0)
    for _ in range(200):
        most = rng.choice((3, 100, 400))
        items = [rng.randint(1, most) for _ in range(rng.randint(1, 30))]
        before, prefix = rng.randint(0, 9), rng.randint(0, 50)
        _, length = prefill_attention_cases.item_starts(0, prefix, items)
        starts = prefill_attention_cases.item_starts(prefix, prefix, items)[0]
        rows = torch.tensor([0] * before + starts, dtype=torch.int32).numpy()
        blocks = _blocks(rows, before, before + length - prefix)
        assert [a for a, _ in blocks] == [before, *(b for _, b in blocks[:-1])]
        assert blocks[-1][1] == len(rows)
        for begin, end in blocks:
            held = lengths_of(rows[begin:end].tolist())
            assert sum(held) <= BLOCK_ROWS or len(held) == 1
            if end < len(rows):
                assert sum(held) + lengths_of(rows[end:].tolist())[0] > BLOCK_ROWS
            assert begin == before or rows[begin] != rows[begin - 1]
    assert _blocks(None, 0, 5) == _blocks(rows, 3, 3) == []


MANY = {
    "one request": [(30, 30, [100, 120, 30, 90, 300, 5, 0, 20, 6])],
    "several": [(0, 40, [200, 56, 1]), (7, 7, [256, 57]), (0, 0, [130, 0, 130])],
    "long prefixes": [(5, 560, []), (620, 620, [7] * 40), (0, 530, [20, 3]), (600, 640, [])],
}


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (40, 0.7), (520, 0.0)])
@pytest.mark.parametrize("requests", MANY.values(), ids=MANY)
def test_many_rows_of_items_match_oracle(requests, window, softcap):
    case = prefill_attention_cases.make_case(requests, SHAPE, 64, torch.float32, CPU)
    expected, sums = case.expected_both(window, softcap)
    out = case.op(window, softcap=softcap)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]
    lse = torch.full(case.q.shape[:2], float("nan"))
    out = case.op(window, softcap=softcap, lse=lse)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]
    assert_lse(lse, sums, 1e-4)


def test_the_table_holds_each_block_of_the_prefix():
    """Exactly as many are enough, one less is refused."""
    for prefix, blocks in ((1, 1), (16, 1), (17, 2), (48, 3), (49, 4)):
        case = prefill_attention_cases.make_case(
            [(prefix, prefix, [3])], SHAPE, 16, torch.float32, CPU
        )
        out = case.op()
        assert torch.equal(replace(case, tables=case.tables[:, :blocks]).op(), out)
        with pytest.raises(ArgumentError, match="hold too few blocks"):
            replace(case, tables=case.tables[:, : blocks - 1]).op()
