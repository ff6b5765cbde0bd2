"""The inputs of a step: each token once, at its place, in its slot; scratch writes nothing."""

import pytest
import torch

from tiercel.errors import ArgumentError
from tiercel.kernels.sampling import prepare_step as kernel
from tiercel.ops.prepare_step import StepDrafts, prepare_step
from tiercel.reference import prepare_step as oracle

# Each is: query lengths, groups, rows, block size.
SHAPES = [
    ((1,), 1, 3, 4),
    ((1, 1, 1, 1, 1), 1, 9, 64),
    ((3, 1, 17), 2, 5, 4),
    ((1030, 1, 5), 3, 4, 16),
    ((2, 2), 1, 3, 3),
]


def make_case(query_lens, groups, num_rows, block_size, device):
    """Rows in no order, the last request on the scratch row."""
    longest = max(query_lens) + 40
    token_ids = torch.randint(0, 1000, (num_rows, longest), dtype=torch.int32)
    num_computed = torch.randint(0, 40, (num_rows,), dtype=torch.int32)
    max_blocks = -(-longest // block_size)
    tables = torch.randint(1, 99, (groups, num_rows, max_blocks), dtype=torch.int32)
    rows = torch.randperm(num_rows - 1)[: len(query_lens)].int()
    if len(query_lens) > 1:
        rows[-1] = num_rows - 1
    ends = torch.tensor((0, *query_lens)).cumsum(0).int()
    return [t.to(device) for t in (token_ids, num_computed, tables, rows, ends)]


def launch(token_ids, num_computed, tables, rows, ends, num_tokens, block_size, *drafts):
    """The kernel alone, into poisoned outputs."""
    device = token_ids.device
    outputs = [
        torch.full((num_tokens,), -7, dtype=torch.int32, device=device),
        torch.full((num_tokens,), -7, dtype=torch.int32, device=device),
        torch.full((rows.shape[0],), -7, dtype=torch.int32, device=device),
        torch.full((tables.shape[0], num_tokens), -7, dtype=torch.int64, device=device),
    ]
    kernel.launch_prepare_step(
        token_ids, num_computed, tables, rows, ends, block_size, *outputs, *drafts
    )
    return outputs


def call_op(*arguments):
    inputs = prepare_step(*arguments)
    return [inputs.input_ids, inputs.positions, inputs.seq_lens, inputs.slot_mapping]


@pytest.mark.parametrize("run", [launch, call_op], ids=["kernel", "op"])
@pytest.mark.parametrize(("query_lens", "groups", "num_rows", "block_size"), SHAPES)
def test_matches_oracle(query_lens, groups, num_rows, block_size, run, device):
    case = make_case(query_lens, groups, num_rows, block_size, device)
    expected = oracle.prepare_step(*(t.cpu() for t in case), block_size)
    results = run(*case, sum(query_lens), block_size)
    assert [t.tolist() for t in results] == list(expected[:4])
    assert case[1].tolist() == expected[4]


@pytest.mark.parametrize("run", [launch, call_op], ids=["kernel", "op"])
def test_a_batch_padded_with_scratch(run, device):
    case = make_case((1, 1, 1, 1), 2, 6, 4, device)
    case[3][1:] = 5  # three places that no request fills
    expected = oracle.prepare_step(*(t.cpu() for t in case), 4)
    results = run(*case, 4, 4)
    assert results[3][:, 1:].eq(-1).all()
    assert results[2].tolist()[1:] == [1, 1, 1]
    assert results[3][:, 0].tolist() == [slots[0] for slots in expected[3]]


def test_two_steps_follow_each_other(device):
    case = make_case((3, 1), 1, 4, 4, device)
    first, second = (call_op(*case, 4, 4) for _ in range(2))
    assert second[1][:3].tolist() == (first[1][:3] + 3).tolist()


def test_wrong_shapes_are_named(device):
    case = make_case((3, 1), 1, 4, 4, device)
    with pytest.raises(ArgumentError, match="do not fit"):
        prepare_step(*case[:4], case[4][:-1], 4, 4)
    with pytest.raises(ArgumentError, match="int64"):
        prepare_step(case[0].long(), *case[1:], 4, 4)


@pytest.mark.parametrize("run", [launch, call_op], ids=["kernel", "op"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_drafts_follow_the_last_token(run, is_padded, device):
    """Each row's own token, then its draft tokens; positions after them write nothing."""
    counts = torch.tensor([2, 0, 4, 1], dtype=torch.int32, device=device)
    widths = (5,) * 4 if is_padded else (3, 1, 5, 2)
    case = make_case(widths, 2, 7, 4, device)
    draft_ids = torch.randint(1000, 2000, (7, 5), dtype=torch.int32, device=device)
    expected = oracle.prepare_step(*(t.cpu() for t in case), 4, draft_ids.cpu(), counts.cpu())
    drafts = (draft_ids, counts)
    arguments = drafts if run is launch else (StepDrafts(*drafts),)
    results = run(*case, sum(widths), 4, *arguments)
    assert [t.tolist() for t in results] == list(expected[:4])
    assert case[1].tolist() == expected[4]


def test_wrong_drafts_are_named(device):
    case = make_case((2, 2), 1, 4, 4, device)
    draft_ids = torch.zeros((4, 3), dtype=torch.int32, device=device)
    with pytest.raises(ArgumentError, match="drafts"):
        prepare_step(*case, 4, 4, StepDrafts(draft_ids, torch.zeros(3, dtype=torch.int32)))
    with pytest.raises(ArgumentError, match="int64"):
        prepare_step(*case, 4, 4, StepDrafts(draft_ids.long(), torch.zeros(2, dtype=torch.int32)))
