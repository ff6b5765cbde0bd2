"""How the work of split attention is shared: every unit once, in order, evenly, on a processor.

What the walk of decode_attention_walk.cuh knows of each unit is held against a list of all units,
made from their definition.
"""

import ctypes
import itertools
import random
from typing import NamedTuple

import pytest
import torch

from tiercel.kernels.attention import decode_attention_split as kernel
from tiercel.kernels.runtime import rtc

TILE = 64
STARTS = [*range(0, 512, 128), *range(512, 1024, 256), *range(1024, 9000, 512)]  # of splits
MACROS = (
    ("TILE", TILE), ("FINE_KEYS", 128), ("FINE_END", 512), ("MIDDLE_KEYS", 256),
    ("MIDDLE_END", 1024), ("COARSE_KEYS", 512), ("IS_BF16", 0), ("WARPS", 1), ("D", 64),
)  # fmt: skip
SLACK, GROUP = 24, 8


class Unit(NamedTuple):
    """A split of a request, a key head and a tile of rows; its tiles of keys are begin .. end."""

    request: int
    table_row: int
    kv_head: int
    row_tile: int
    split: int
    begin: int
    end: int
    first_split: int
    last_split: int


def units_of(request, table_row, queries, length, kv_heads, row_tiles, window, *, inside):
    """Of one request, in order: splits of each tile of rows, or heads inside of splits."""
    low = max(length - queries - window + 1, 0)
    last = max(length - 1, 0)
    splits = [s for s, start in enumerate(STARTS) if start <= last and STARTS[s + 1] > low]
    units = [
        Unit(
            request, table_row, kv_head, row_tile, split,
            max(STARTS[split], low) // TILE, -(-min(STARTS[split + 1], last + 1) // TILE),
            splits[0], splits[-1],
        )
        for kv_head, row_tile, split in itertools.product(range(kv_heads), range(row_tiles), splits)
    ]  # fmt: skip
    return sorted(units, key=lambda unit: (unit.split, *unit[2:4])) if inside else units


def known_of(unit, *, inside, ends_share, is_whole):
    """The flags of a unit, as walk_units.cu writes them."""
    group, is_first = unit.split // GROUP, unit.split == unit.first_split
    is_last = unit.split == unit.last_split
    flags = (
        is_first,
        is_last,
        unit.split % GROUP == 0 or is_first,
        unit.split % GROUP == GROUP - 1 or is_last,
        group == unit.first_split // GROUP,
        ends_share and not is_whole,
        is_whole,
        is_first or inside,
    )
    return sum(int(flag) << place for place, flag in enumerate(flags))


def draw_case(draw):
    """Requests, among them empty ones, and numbers of heads, of a group and of CTAs."""
    count = draw.choice((1, 2, 5, 9, 33, 70))
    most = draw.choice((300, 300, 4000)) if count < 20 else 300
    requests = []
    for _ in range(count):
        length = draw.choice(
            (draw.randrange(1, most), draw.choice(STARTS[:9]) + draw.choice((0, 1)))
        )
        queries = min(draw.choice((1, 1, 3, 16)), max(1, length))
        kind = draw.random()
        requests.append((0, length) if kind < 0.1 else (1, 0) if kind < 0.15 else (queries, length))
    if not any(queries for queries, _ in requests):
        requests[0] = (1, 5)
    sizes = (draw.choice((1, 2, 3, 8)), draw.choice((1, 3, 7, 8)))
    return requests, *sizes, draw.choice((0, 0, 1, 40, 500)), draw.choice((1, 2, 3, 7, 24, 60))


@pytest.mark.parametrize(("folds", "inside"), [(True, False), (False, False), (False, True)])
def test_every_unit_is_walked_once_in_order(folds, inside, processor):
    row_tiles_of = 1 if folds else 2  # tiles of 8 rows
    macros = (*MACROS, ("NR", row_tiles_of), ("FOLDS", int(folds)))
    source = rtc.KernelSource("walk_units", macros)
    walk = processor.load_kernel(source, torch.device("cpu"))
    draw, num_whole, num_shared = random.Random(int(folds)), 0, 0
    for _ in range(70):
        requests, kv_heads, group, window, shares = draw_case(draw)
        table_rows = draw.sample(range(200), len(requests))
        wide = window or kernel.NO_WINDOW
        every = [
            unit
            for request, (queries, length) in enumerate(requests)
            for unit in units_of(
                request, table_rows[request], queries, length, kv_heads,
                -(-queries * group // (8 * row_tiles_of)), wide, inside=inside,
            )
        ]  # fmt: skip
        starts = torch.tensor([0, *(queries for queries, _ in requests)]).cumsum(0).int()
        lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
        rows = torch.tensor(table_rows, dtype=torch.int32)
        found = torch.full((shares, len(every) + 1, 9), -1, dtype=torch.int32)
        numbers = (found.shape[1], len(requests), kv_heads, group, wide, int(inside))
        tensors = map(rtc.pointer, (rows, starts, lengths, found))
        processor.seed += 1
        processor.launch(walk, shares, 32, [*tensors, *map(ctypes.c_int, numbers)])

        of_share = [[line for line in own if line[0] >= 0] for own in found.tolist()]
        whole = {tuple(line[:4]): line[8] >> 6 & 1 for own in of_share for line in own}
        wanted = iter(every)
        fair = -(-sum(unit.end - unit.begin for unit in every) // shares)
        owners = {}
        for share, own in enumerate(of_share):
            for place, line in enumerate(own):
                unit = next(wanted)
                assert line[:8] == [*unit[:7], unit.end - unit.begin]
                is_whole = bool(whole[unit[:4]])
                ends_share = place == len(own) - 1
                known = known_of(unit, inside=inside, ends_share=ends_share, is_whole=is_whole)
                assert line[8] == known
                owners.setdefault(unit[:4], set()).add(share)
            # A share ends with the unit, or the whole rows, that begin in it.
            tiles = [line[7] for line in own]
            last = [n for line, n in zip(own, tiles, strict=True) if line[:4] == own[-1][:4]]
            last = sum(last) if own and whole[tuple(own[-1][:4])] else max(tiles, default=0)
            assert sum(tiles) * SLACK <= fair * (SLACK + 1) + last * SLACK
        assert next(wanted, None) is None
        for rows_of_head, own in owners.items():
            if whole[rows_of_head]:
                assert folds
                assert len(own) == 1
        num_whole += sum(whole.values())
        num_shared += sum(len(own) > 1 for own in owners.values())
    assert num_shared > 60
    assert (num_whole > 60) == folds
