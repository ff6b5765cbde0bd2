"""The indices of a step of DeepSeek-V4: PyTorch path and kernel against the oracle, bit for bit."""

from dataclasses import replace

import pytest
import torch

from tests.dsv4_cases import captured
from tiercel.batch import Batch
from tiercel.errors import ArgumentError
from tiercel.kernels.attention import step_index as kernel
from tiercel.ops import step_index as op
from tiercel.ops import step_index_torch as torch_ops
from tiercel.ops.prepare_step import SlotLayout, entry_slots
from tiercel.ops.step_index import CompressKind, index_refusal, step_index
from tiercel.reference import step_index as oracle

BLOCK, WINDOW = 128, 100
# The window's group is 2; the others are those of CSA and HCA.
KINDS = (CompressKind(4, True, 0, 3, 32), CompressKind(128, False, 1, 4, 128))
LAYOUT = SlotLayout(BLOCK, (4, 128, 1, 1, 1), (32, 1, 128, 32, 128))

# New tokens of each request, and the position of the first of them.
STEPS = {
    "one token": ((1,), (8191,)),
    "no entry": ((1,), (2,)),
    "batch": ((1,) * 70, tuple(range(120, 190))),
    "drafts": ((5, 5, 5), (125, 3, 1023)),
    "chunks": ((130, 1, 257, 3), (0, 127, 255, 1)),
    "prompt": ((1300,), (128,)),
}


def make_batch(query_lens, starts, device, padding=0):
    """A step of shuffled rows; the last `padding` tokens have no slots."""
    num_reqs, num_tokens = len(query_lens), sum(query_lens)
    columns = -(-max(s + n for n, s in zip(query_lens, starts, strict=True)) // BLOCK) + 2
    tables = 1 + torch.randperm(5 * (num_reqs + 3) * columns).view(5, num_reqs + 3, columns).int()
    rows = torch.randperm(num_reqs + 3)[:num_reqs].int()
    positions = torch.cat([s + torch.arange(n) for n, s in zip(query_lens, starts, strict=True)])
    of_tokens = torch.tensor(oracle.step_rows(list(query_lens), rows.tolist()))
    slots = entry_slots(tables, of_tokens, positions, LAYOUT)
    slots[:, num_tokens - padding :] = -1
    return Batch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        positions=positions.int().to(device),
        cu_seqlens_q=torch.tensor((0, *query_lens)).cumsum(0).int().to(device),
        seq_lens=torch.tensor(starts).int().to(device),
        rows=rows.to(device),
        logits_rows=torch.zeros(1, dtype=torch.int32, device=device),
        slot_mapping=slots.to(device),
        block_tables=tables.to(device),
        query_lens=tuple(query_lens),
        context_lens=tuple(starts),
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_query_len=max(query_lens),
        max_seq_len=max(starts) + 1,
    )


def flat(step):
    """All that a step's indices hold, as lists and numbers."""
    kinds = [
        (ratio, c.phase.tolist(), c.visible.tolist(), *lists(c.terms), c.entry_slots.tolist())
        for ratio, c in step.compressed.items()
    ]
    window = (step.window.ends.tolist(), step.window.num_entries)
    return step.rows.tolist(), step.positions.tolist(), window, kinds, step.max_query_len


def lists(terms):
    return terms.entries.tolist(), terms.fresh.tolist(), terms.stored.tolist()


def expected(batch, starts):
    """The same from the oracle."""
    query_lens, rows = list(batch.query_lens), batch.rows.tolist()
    kinds = []
    for kind in KINDS:
        blocks = batch.block_tables[kind.inputs][batch.rows.long()].tolist()
        sizes = (kind.ratio, kind.num_terms, BLOCK, kind.rows_per_block)
        slots = batch.slot_mapping[kind.entries].tolist()
        capacity = batch.num_tokens // kind.ratio + batch.num_reqs
        found = oracle.compressed(query_lens, list(starts), slots, blocks, sizes, capacity)
        terms = (found.entries, found.fresh, found.stored)
        kinds.append((kind.ratio, found.phase, found.visible, *terms, found.entry_slots))
    positions = batch.positions.tolist()
    window = ([position + 1 for position in positions], WINDOW)
    of_tokens = oracle.step_rows(query_lens, rows)
    return of_tokens, positions, window, kinds, batch.max_query_len


@pytest.fixture
def poisoned(monkeypatch):
    """New memory of the op holds numbers that no index has."""
    make = torch.empty

    def empty(*args, **kwargs):
        return make(*args, **kwargs).fill_(-777_777)

    monkeypatch.setattr(op.torch, "empty", empty)


@pytest.mark.parametrize("padding", [0, 3], ids=["full", "padding"])
@pytest.mark.parametrize("name", STEPS)
def test_kernel_and_torch_match_the_oracle(name, padding, device, poisoned):
    query_lens, starts = STEPS[name]
    padding = min(padding, sum(query_lens) - 1)
    batch = make_batch(query_lens, starts, device, padding)
    wanted = expected(batch, starts)
    assert flat(torch_ops.index_step(batch, BLOCK, WINDOW, 2, KINDS)) == wanted
    step = op._launch(batch, BLOCK, WINDOW, 2, KINDS)
    assert flat(step) == wanted
    for ours, theirs in zip(tensors_of(step), tensors_of(step_index_of(batch)), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() % 8 == 0


def tensors_of(step):
    """Every tensor that layers take."""
    kinds = [
        tensor
        for c in step.compressed.values()
        for tensor in (c.phase, c.entry_slots, c.input_slots, c.block_tables, c.visible)
    ]
    return [step.rows, step.positions, step.window.ends, step.window.block_tables, *kinds]


def step_index_of(batch):
    return torch_ops.index_step(batch, BLOCK, WINDOW, 2, KINDS)


def test_a_draft_head_has_a_window_alone(device, poisoned):
    batch = make_batch(*STEPS["drafts"], device)
    step = op._launch(batch, BLOCK, WINDOW, 2, ())
    assert step.compressed == {}
    assert flat(step) == flat(torch_ops.index_step(batch, BLOCK, WINDOW, 2, ()))
    assert torch.equal(step.kv_slots, batch.slot_mapping[2])


def test_small_turns_of_each_loop(device, monkeypatch, poisoned):
    """Chunks, prefixes, requests and rows to fill in more than one turn each."""
    for name, size in (("BLOCK", 16), ("PREFIX", 32), ("REQUESTS", 2), ("FILL", 4)):
        monkeypatch.setattr(kernel, name, size)
    kernel._launch.cache_clear()
    query_lens, starts = STEPS["chunks"]
    batch = make_batch(query_lens, starts, device, 2)
    assert flat(op._launch(batch, BLOCK, WINDOW, 2, KINDS)) == expected(batch, starts)
    kernel._launch.cache_clear()


def test_pieces_are_aligned():
    sizes = kernel.long_sizes(7, [2, 9], [8, 128])
    assert sizes == [7, 7, 7, 7, 2, 2, 16, 16, 7, 9, 9, 1152, 1152]
    assert [kernel.padded(size) for size in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_refusals_say_why(device, monkeypatch):
    batch = make_batch(*STEPS["drafts"], device)
    on_gpu = device.type == "cuda"
    assert index_refusal(batch) == ("" if on_gpu else "the step is not on a GPU")
    if on_gpu:
        strided = replace(batch, rows=batch.rows.repeat_interleave(2)[::2])
        assert index_refusal(strided) == "indices with strides"
        monkeypatch.setenv("TIERCEL_COMPRESS_KERNEL", "0")
        assert index_refusal(batch) == "TIERCEL_COMPRESS_KERNEL=0"


def test_kinds_that_do_not_fit_blocks_are_refused(device):
    batch = make_batch(*STEPS["one token"], device)
    with pytest.raises(ArgumentError, match="ratio=3, block_size=128"):
        step_index(batch, BLOCK, WINDOW, 2, [CompressKind(3, False, 0, 3, 32)])
    with pytest.raises(ArgumentError, match="rows_per_block=4, an entry takes 8"):
        step_index(batch, BLOCK, WINDOW, 2, [CompressKind(4, True, 0, 3, 4)])


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_replay_gives_the_same(name, device):
    batch = make_batch(*STEPS[name], device)
    step = captured(lambda: step_index(batch, BLOCK, WINDOW, 2, KINDS))
    assert flat(step) == flat(step_index_of(batch))
