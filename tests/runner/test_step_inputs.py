"""Batches of steps: slots of a head's positions, and bounds that hold for any step."""

import pytest
import torch

from tiercel.ops.prepare_step import SlotLayout
from tiercel.runner.step_inputs import make_draft_batch

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
