"""The inputs of a step: each token once, at its place, in its slot; scratch writes nothing."""

import pytest
import torch

from tiercel.errors import ArgumentError
from tiercel.kernels.sampling import prepare_step as kernel
from tiercel.ops.prepare_step import SlotLayout, StepDrafts, prepare_step
from tiercel.reference import prepare_step as oracle

# Each is: query lengths, groups, rows, block size.
SHAPES = [
    ((1,), 1, 3, 4),
    ((1, 1, 1, 1, 1), 1, 9, 64),
    ((1,), 2, 9, 64),
    ((3, 1, 17), 2, 5, 4),
    ((1030, 1, 5), 3, 4, 16),
    ((2, 2), 1, 3, 3),
]
# (tokens per entry, entries per block) of groups with blocks of 16 tokens.
MIXED = ((4, 4), (16, 1), (1, 16), (1, 4), (2, 4), (4, 1), (1, 1))


def dense(block_size, groups=1):
    return ((1, block_size),) * groups


def make_layout(block_size, kinds):
    return SlotLayout(block_size, *map(tuple, zip(*kinds, strict=True)))


def make_case(query_lens, groups, num_rows, block_size, device):
    """Rows in no order, the last request on the scratch row."""
    longest = max(query_lens) + 40
    token_ids = torch.randint(0, 1000, (num_rows, longest), dtype=torch.int32)
    num_computed = torch.randint(0, 40, (num_rows,), dtype=torch.int32)
    max_blocks = -(-longest // block_size)
    shape = (groups, num_rows, max_blocks)
    tables = 1 + torch.randperm(groups * num_rows * max_blocks).view(shape).int()
    rows = torch.randperm(num_rows - 1)[: len(query_lens)].int()
    if len(query_lens) > 1:
        rows[-1] = num_rows - 1
    ends = torch.tensor((0, *query_lens)).cumsum(0).int()
    return [t.to(device) for t in (token_ids, num_computed, tables, rows, ends)]


def launch(token_ids, num_computed, tables, rows, ends, num_tokens, layout, *drafts):
    """The kernel alone, into poisoned outputs."""
    device = token_ids.device
    outputs = [
        torch.full((num_tokens,), -7, dtype=torch.int32, device=device),
        torch.full((num_tokens,), -7, dtype=torch.int32, device=device),
        torch.full((rows.shape[0],), -7, dtype=torch.int32, device=device),
        torch.full((tables.shape[0], num_tokens), -7, dtype=torch.int64, device=device),
    ]
    sizes = (layout.block_size, layout.tokens_per_entry, layout.entries_per_block)
    kernel.launch_prepare_step(
        token_ids, num_computed, tables, rows, ends, sizes, *outputs, *drafts
    )
    return outputs


def call_op(*arguments):
    inputs = prepare_step(*arguments)
    return [inputs.input_ids, inputs.positions, inputs.seq_lens, inputs.slot_mapping]


@pytest.mark.parametrize("run", [launch, call_op], ids=["kernel", "op"])
@pytest.mark.parametrize(("query_lens", "groups", "num_rows", "block_size"), SHAPES)
def test_matches_oracle(query_lens, groups, num_rows, block_size, run, device):
    case = make_case(query_lens, groups, num_rows, block_size, device)
    kinds = dense(block_size, groups)
    expected = oracle.prepare_step(*(t.cpu() for t in case), block_size, kinds)
    results = run(*case, sum(query_lens), make_layout(block_size, kinds))
    assert [t.tolist() for t in results] == list(expected[:4])
    assert case[1].tolist() == expected[4]


@pytest.mark.parametrize("run", [launch, call_op], ids=["kernel", "op"])
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (1030, 1, 5), (16, 33, 2)])
def test_groups_of_all_kinds_match_the_oracle(query_lens, run, device):
    """Entries of several tokens, and blocks that keep their last entries."""
    case = make_case(query_lens, len(MIXED), 5, 16, device)
    case[3].copy_(torch.tensor([2, 0, 3]))  # none on the scratch row
    expected = oracle.prepare_step(*(t.cpu() for t in case), 16, MIXED)
    results = run(*case, sum(query_lens), make_layout(16, MIXED))
    assert [t.tolist() for t in results] == list(expected[:4])
    for slots in results[3]:
        written = slots[slots >= 0]
        assert len(written.unique()) == len(written), "a slot occurs twice"


@pytest.mark.parametrize("run", [launch, call_op], ids=["kernel", "op"])
def test_slots_of_deepseek_v4(run, device):
    """A prompt of 200 tokens in blocks of 128, written out."""
    tables = torch.tensor([[[3, 5]] * 2] * 4, dtype=torch.int32, device=device)
    ids = torch.zeros((2, 256), dtype=torch.int32, device=device)
    rows, starts = ids[0, :1].clone(), torch.tensor([0, 200], dtype=torch.int32, device=device)
    layout = SlotLayout(128, (4, 128, 1, 1), (32, 1, 32, 128))
    csa, hca, inputs, window = run(ids, ids[:, 0].clone(), tables, rows, starts, 200, layout)[3]
    none = torch.full((200,), -1)
    expected = none.clone()
    expected[3::4] = torch.cat((3 * 32 + torch.arange(32), 5 * 32 + torch.arange(18)))
    assert torch.equal(csa.cpu(), expected)
    expected = none.clone()
    expected[127] = 3
    assert torch.equal(hca.cpu(), expected)
    expected = none.clone()  # the last 32 of each block so far, at position mod 32
    expected[96:128] = 3 * 32 + torch.arange(32)
    expected[168:200] = 5 * 32 + torch.arange(168, 200) % 32
    assert torch.equal(inputs.cpu(), expected)
    expected = torch.cat((3 * 128 + torch.arange(128), 5 * 128 + torch.arange(72)))
    assert torch.equal(window.cpu(), expected)


@pytest.mark.parametrize("run", [launch, call_op], ids=["kernel", "op"])
def test_a_batch_padded_with_scratch(run, device):
    case = make_case((1, 1, 1, 1), 2, 6, 4, device)
    case[3][1:] = 5  # three places that no request fills
    expected = oracle.prepare_step(*(t.cpu() for t in case), 4, dense(4, 2))
    results = run(*case, 4, make_layout(4, dense(4, 2)))
    assert results[3][:, 1:].eq(-1).all()
    assert results[2].tolist()[1:] == [1, 1, 1]
    assert results[3][:, 0].tolist() == [slots[0] for slots in expected[3]]


def test_two_steps_follow_each_other(device):
    case = make_case((3, 1), 1, 4, 4, device)
    first, second = (call_op(*case, 4, make_layout(4, dense(4))) for _ in range(2))
    assert second[1][:3].tolist() == (first[1][:3] + 3).tolist()


def test_wrong_shapes_are_named(device):
    case = make_case((3, 1), 1, 4, 4, device)
    with pytest.raises(ArgumentError, match="do not fit"):
        prepare_step(*case[:4], case[4][:-1], 4, make_layout(4, dense(4)))
    with pytest.raises(ArgumentError, match="int64"):
        prepare_step(case[0].long(), *case[1:], 4, make_layout(4, dense(4)))
    for kinds in (dense(4, 2), ((1, 3),), ((2, 4),), ((1, 0),)):
        with pytest.raises(ArgumentError, match="does not fit 1 cache groups"):
            prepare_step(*case, 4, make_layout(4, kinds))


@pytest.mark.parametrize("run", [launch, call_op], ids=["kernel", "op"])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("kinds", [dense(4, 2), ((1, 1), (1, 2), (2, 2), (2, 1), (4, 1))], ids=len)
def test_drafts_follow_the_last_token(run, is_padded, kinds, device):
    """Each row's own token, then its draft tokens; positions after them write nothing.

    Nor do they take the slot of a token before them.
    """
    counts = torch.tensor([2, 0, 4, 1], dtype=torch.int32, device=device)
    widths = (5,) * 4 if is_padded else (3, 1, 5, 2)
    case = make_case(widths, len(kinds), 7, 4, device)
    draft_ids = torch.randint(1000, 2000, (7, 5), dtype=torch.int32, device=device)
    on_host = (draft_ids.cpu(), counts.cpu())
    expected = oracle.prepare_step(*(t.cpu() for t in case), 4, kinds, *on_host)
    drafts = (draft_ids, counts)
    arguments = drafts if run is launch else (StepDrafts(*drafts),)
    results = run(*case, sum(widths), make_layout(4, kinds), *arguments)
    assert [t.tolist() for t in results] == list(expected[:4])
    assert case[1].tolist() == expected[4]


def test_wrong_drafts_are_named(device):
    case = make_case((2, 2), 1, 4, 4, device)
    draft_ids = torch.zeros((4, 3), dtype=torch.int32, device=device)
    layout = make_layout(4, dense(4))
    with pytest.raises(ArgumentError, match="drafts"):
        prepare_step(*case, 4, layout, StepDrafts(draft_ids, torch.zeros(3, dtype=torch.int32)))
    counts = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="int64"):
        prepare_step(*case, 4, layout, StepDrafts(draft_ids.long(), counts))


def test_single_tokens_of_real_rows_match_the_oracle():
    """Steps without scratch, drafts or prompts have a path of their own on a CPU."""
    query_lens, block_size = (1, 1, 1, 1), 16
    case = make_case(query_lens, 2, 9, block_size, "cpu")
    case[3] = torch.tensor([7, 0, 3, 5], dtype=torch.int32)
    expected = oracle.prepare_step(*(t.clone() for t in case), block_size, dense(block_size, 2))
    results = call_op(*case, 4, make_layout(block_size, dense(block_size, 2)))
    assert [t.tolist() for t in results] == list(expected[:4])
    assert [t.dtype for t in results] == [torch.int32] * 3 + [torch.int64]
    assert case[1].tolist() == expected[4]
