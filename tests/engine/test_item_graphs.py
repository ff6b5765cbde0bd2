"""Steps with items padded to a size that graphs serve; the graphs themselves need a GPU."""

import dataclasses

import pytest
import torch

from tests.ops.test_multi_item_attention import ITEMS, make_case, relative_error
from tiercel.batch import Batch, PackedItems
from tiercel.engine.item_graphs import LARGEST, padded_lengths, padded_size
from tiercel.ops.multi_item_attention import multi_item_attention


def test_sizes_hold_the_step_and_waste_little():
    sizes = {padded_size(count) for count in range(1, LARGEST + 1)}
    assert len(sizes) == 28
    for count in range(1, LARGEST + 1):
        size = padded_size(count)
        assert count <= size <= LARGEST
        assert size - count < max(64, count / 4)
        assert padded_size(size) == size


def make_batch(case):
    none = torch.empty(0)
    return Batch(
        *[none] * 8,
        query_lens=tuple(case.query_lens),
        context_lens=tuple(case.context_lens),
        num_tokens=len(case.q),
        num_reqs=len(case.query_lens),
        max_query_len=0,
        max_seq_len=0,
        items=PackedItems(tuple(case.prefix_len), case.item_start),
    )


@pytest.mark.parametrize("requests", ITEMS.values(), ids=ITEMS)
def test_padding_sees_nothing_and_changes_nobody(requests, device):
    case = make_case(requests, (4, 2, 64), 16, torch.float32, device, poison=0.0)
    batch = make_batch(case)
    size = padded_size(len(case.q))
    queries, contexts, items = padded_lengths(batch, size)
    assert sum(queries) == len(items.item_start) == size
    missing = size - len(case.q)

    def grown(x):
        return torch.cat((x, torch.randn(missing, *x.shape[1:], device=device)))

    out = multi_item_attention(
        grown(case.q),
        case.k_cache,
        case.v_cache,
        torch.cat((case.tables, case.tables[:1])) if missing else case.tables,
        queries,
        contexts,
        0.15,
        prefix_len=items.prefix_len,
        item_start=items.item_start,
        k_new=grown(case.k_new),
        v_new=grown(case.v_new),
    )
    assert relative_error(out[: len(case.q)], case.expected()) < 5e-6
    assert (out[len(case.q) :] == 0.0).all()


def test_a_step_of_full_size_stays_as_it_is():
    case = make_case([(20, 20, [60, 4])], (4, 2, 64), 16, torch.float32, torch.device("cpu"))
    batch = make_batch(case)
    queries, contexts, items = padded_lengths(batch, 64)
    assert (queries, contexts, items) == (batch.query_lens, batch.context_lens, batch.items)
    shorter = dataclasses.replace(batch, num_tokens=60)
    assert padded_lengths(shorter, 64)[0] == (64, 4)
