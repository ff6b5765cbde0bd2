"""Batches of steps: slots of a head's positions, and bounds that hold for any step."""

import pytest
import torch

from tiercel.ops.prepare_step import SlotLayout
from tiercel.runner.row_state import Rows
from tiercel.runner.step_inputs import PaddedInputs, make_draft_batch

# (tokens per entry, entries per block) in blocks of 8 tokens; the last row of tables is scratch.
KINDS = ((1, 8), (4, 2), (8, 1), (1, 4), (2, 2))


@pytest.mark.parametrize("kinds", [KINDS, KINDS[:1]], ids=["all kinds", "dense"])
def test_slots_of_a_position_of_each_row(kinds, device):
    tables = 1 + torch.randperm(len(kinds) * 5 * 3).view(len(kinds), 5, 3).int()
    rows, positions = [3, 0, 2, 4, 1], [7, 12, 23, 7, 15]
    ends = [24, 12, 24, 24, 24]  # the second may write no more
    rows_, positions_, ends_ = (torch.tensor(v).int().to(device) for v in (rows, positions, ends))
    layout = SlotLayout(8, *map(tuple, zip(*kinds, strict=True)))
    batch = make_draft_batch(tables.to(device), layout, 24, rows_, rows_ + 5, positions_, ends_)
    for group, (per_entry, entries) in enumerate(kinds):
        expected = []
        for row, position, end in zip(rows, positions, ends, strict=True):
            entry = position % 8 // per_entry % entries
            slot = int(tables[group, row, position // 8]) * entries + entry
            writes = row < 4 and position < end and (position + 1) % per_entry == 0
            expected.append(slot if writes else -1)
        assert batch.slot_mapping[group].tolist() == expected
    assert batch.slot_mapping.dtype == torch.int64
    assert batch.positions.tolist() == positions


@pytest.mark.parametrize("size", [16, 300])
def test_bounds_of_padded_steps_hold_for_any_step(size):
    """One request may have all tokens, after a prefix of any length."""
    rows = Rows(3, 1000, 2, 8, torch.device("cpu"), 5)
    batch = PaddedInputs(rows, 300, 1005).batch(size, {})
    assert (batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (size, size, 1005)
    assert batch.num_reqs == len(batch.query_lens) == len(batch.context_lens) == min(size, 257)
    assert sum(batch.query_lens) == size
    assert set(batch.context_lens) == {1005}


def test_padding_longer_than_any_request_fits_its_context():
    rows = Rows(3, 1000, 2, 8, torch.device("cpu"), 5)
    batch = PaddedInputs(rows, 1400, 1005).batch(1400, {})
    assert max(batch.query_lens) > 1005
    assert all(
        new <= length for new, length in zip(batch.query_lens, batch.context_lens, strict=True)
    )
    assert batch.max_seq_len == max(batch.context_lens)
