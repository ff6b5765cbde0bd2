"""Labels as places to read, items as inputs of a step, values on their way back."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.test_multi_item_attention import CASES
from tiercel.ops.linear import LinearWeight, linear, pick_rows
from tiercel.ops.prepare_step import StepInputs
from tiercel.params import SamplingParams
from tiercel.request.request import Request
from tiercel.request.score_task import ScoreRead, ScoreTask, make_trie, skipped_tiles
from tiercel.runner.packed_items import pack_items
from tiercel.runner.score_readback import ScoreReadback
from tiercel.scheduler.plan import ScheduledRow


def scoring(prompt, items):
    task = ScoreTask(tuple(map(tuple, items)), ((ScoreRead(0, (1,)),),))
    return Request("", list(prompt), SamplingParams(), 0, 0, frozenset(), 0, score=task)


def test_labels_of_one_token_need_one_sequence():
    trie = make_trie([[5], [7], [6]])
    assert trie.paths == ((),)
    assert trie.reads == ((ScoreRead(0, (5, 7, 6)),),)
    assert trie.labels == ((0,), (1,), (2,))


def test_a_path_is_read_at_each_of_its_nodes():
    trie = make_trie([[1], [2, 3], [2, 4, 5]])
    assert trie.paths == ((2, 4),)
    reads = (ScoreRead(2, (1, 2)), ScoreRead(1, (3, 4)), ScoreRead(0, (5,)))
    assert trie.reads == (reads,)
    assert [[trie.edges[i] for i in label] for label in trie.labels] == [
        [((), 1)],
        [((), 2), ((2,), 3)],
        [((), 2), ((2,), 4), ((2, 4), 5)],
    ]


labels = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    min_size=1, max_size=8, unique=True,
)  # fmt: skip


@given(labels=labels)
def test_every_token_of_every_label_is_read_once_behind_what_precedes_it(labels):
    trie = make_trie(labels)
    item, told = (90, 91), []
    for path, reads in zip(trie.paths, trie.reads, strict=True):
        for read in reads:
            sequence = (*item, *path)
            behind = sequence[: len(sequence) - read.back]
            told += [(behind[len(item) :], token_id) for token_id in read.token_ids]
    assert tuple(told) == trie.edges
    assert len(set(told)) == len(told), "a value is computed twice"
    for label, places in zip(labels, trie.labels, strict=True):
        expected = [(label[:i], token_id) for i, token_id in enumerate(label)]
        assert [trie.edges[place] for place in places] == expected
    task = ScoreTask((item,) * (3 * len(trie.paths)), trie.reads)
    assert task.num_values(len(task.items)) == 3 * len(trie.edges)


PUBLIC = [name for name, case in CASES.items() if not case["delimiters"]]


@pytest.mark.parametrize("name", PUBLIC)
def test_places_of_items_are_those_of_the_public_cases(name):
    case = CASES[name]
    arrays, prefix = case["arrays"], case["prefix_len"]
    items = [range(10 * n, 10 * n + length) for n, length in enumerate(case["item_lens"])]
    request = scoring(range(prefix), items)
    total = sum(case["item_lens"])
    part = ScheduledRow(request, 0, 0, prefix, False, False, range(len(items)), total)
    step = pack_items([part])
    assert step.items.prefix_len == (prefix,)
    index = np.arange(prefix, prefix + total)
    own = arrays["token_pos_in_items"][:total].astype(int)
    assert np.array_equal(step.items.item_start[prefix:].numpy(), index - own + 1)
    assert np.array_equal(step.item_positions[prefix:], arrays["position_ids"][prefix:])
    assert step.item_ids[prefix:].tolist() == [i for item in items for i in item]
    lines = prefix - 1 + np.cumsum(case["item_lens"])
    assert lines.tolist() == arrays["label_rows"].tolist()


def test_items_lie_among_the_tokens_of_rows():
    """A plain chunk, a request with the end of its prompt and one item, one with an item alone."""
    plain = Request("", [1] * 9, SamplingParams(), 0, 0, frozenset(), 4)
    first, second = scoring(range(5), [(50, 51), (52,)]), scoring(range(3), [(60,)])
    parts = [
        ScheduledRow(plain, 4, 2, 3, False),
        ScheduledRow(first, 1, 3, 2, False, False, range(1), 2),
        ScheduledRow(second, 2, 3, 0, False, False, range(1), 1),
    ]
    step = pack_items(parts)
    assert step.cached_starts.tolist() == [0, 3, 5, 5]
    assert step.items.prefix_len == (5, 5, 3)
    assert step.items.item_start[5:].tolist() == [5, 5, 3]
    cached = StepInputs(
        torch.tensor([11, 12, 13, 3, 4], dtype=torch.int32),
        torch.tensor([2, 3, 4, 3, 4], dtype=torch.int32),
        torch.tensor([5, 5, 3], dtype=torch.int32),
        torch.tensor([[70, 71, 72, 73, 74]]),
    )
    whole = step.merged(cached)
    assert whole.input_ids.tolist() == [11, 12, 13, 3, 4, 50, 51, 60]
    assert whole.positions.tolist() == [2, 3, 4, 3, 4, 5, 6, 3]
    assert whole.slot_mapping.tolist() == [[70, 71, 72, 73, 74, -1, -1, -1]]
    assert whole.input_ids.dtype == whole.positions.dtype == torch.int32


def test_values_of_a_repeated_step_replace_those_of_the_interrupted_one():
    request = scoring([1], [(2,), (3,), (4,)])
    for first, values in ((0, [1.0]), (1, [2.0, 2.5]), (1, [3.0, 4.0])):
        ScoreReadback(request, first, torch.tensor(values)).deliver()
    assert request.scores.tolist() == [1.0, 3.0, 4.0]
    assert not request.is_unsound
    ScoreReadback(request, 0, torch.tensor([float("nan")])).deliver()
    assert request.is_unsound


def test_what_a_part_yields():
    task = scoring([1, 2, 3], [(2,)])
    end = scoring([1, 2, 3], [])
    plain = SimpleNamespace(score=None)
    yields = [
        (ScheduledRow(task, 0, 0, 3, False), False),
        (ScheduledRow(task, 0, 0, 3, False, True, range(1), 1), True),
        (ScheduledRow(end, 0, 0, 2, False), False),
        (ScheduledRow(end, 0, 2, 1, False), True),
        (ScheduledRow(plain, 0, 2, 1, True), False),
    ]
    for part, expected in yields:
        assert part.has_scores is expected


@given(
    prefix=st.integers(0, 700),
    lens=st.lists(st.integers(1, 300), min_size=1, max_size=40),
)
def test_skipped_tiles_are_those_without_a_visible_key(prefix, lens):
    """Of tiles that a causal mask walks, those after the prefix and before the first own item."""
    starts = [sum(lens[:i]) for i, length in enumerate(lens) for _ in range(length)]
    skipped = 0
    for first in range(0, len(starts), 32):
        end = min(first + 32, len(starts))
        causal = -(-(prefix + end) // 128)
        own = -(-(end - starts[first]) // 128)
        skipped += max(0, causal - -(-prefix // 128) - own)
    assert skipped_tiles(prefix, lens) == skipped


def test_what_a_list_skips():
    assert skipped_tiles(0, [1]) == skipped_tiles(100, [300]) == 0
    exact = 640  # of the published table, for 128 items of 32 tokens after 512
    assert skipped_tiles(512, [32] * 128) == sum(4 + -(-k // 4) for k in range(1, 129)) - exact


@pytest.mark.parametrize("count", [1, 2, 7])
def test_picked_rows_of_a_matrix_give_its_columns(count, device):
    weight = torch.randn(50, 24, device=device)
    rows = torch.randperm(50)[:count].to(device)
    x = torch.randn(9, 24, device=device)
    picked = pick_rows(LinearWeight((weight,), (50, 24)), rows)
    assert picked.shape == (count, 24)
    torch.testing.assert_close(linear(x, picked), (x @ weight.t())[:, rows], rtol=1e-4, atol=1e-4)


def test_rows_of_what_is_packed_are_not_picked():
    parts = tuple(torch.zeros(4, 8) for _ in "ab")
    assert pick_rows(LinearWeight(parts, (8, 8)), torch.tensor([0])) is None
    beside = LinearWeight(parts, (8, 8), torch.ones(8, 8))
    assert torch.equal(pick_rows(beside, torch.tensor([5])).segments[0], torch.ones(1, 8))
