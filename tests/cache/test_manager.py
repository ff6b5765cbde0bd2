"""Blocks of all groups: none lost, none doubled, in any order of calls."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.cache.allocator import NULL_BLOCK
from tiercel.cache.manager import BlockWrite, CacheManager, GroupBlocks, span_blocks
from tiercel.cache.pool import CachePool
from tiercel.cache.prefix import ROOT
from tiercel.cache.spec import KVCacheSpec, Plane, attention_spec, group_specs

SIZE = 4


@dataclass
class Sequence:
    """The scheduler's state of one request."""

    tokens: list[int]
    held: list[list[int]]
    num_computed: int
    parent_key: int = ROOT
    num_prefix_blocks: int = 0


@dataclass
class World:
    """A manager and the sequences that hold its blocks."""

    manager: CacheManager
    sequences: list[Sequence] = field(default_factory=list)

    def enter(self, tokens):
        match = self.manager.find(tokens)
        if self.manager.can_enter(len(tokens) + 1, len(tokens), match):
            held = self.manager.enter(match)
            self.sequences.append(
                Sequence(tokens, held, match.num_blocks * SIZE, match.parent_key, match.num_blocks)
            )

    def compute(self, sequence, count):
        stop = min(len(sequence.tokens), sequence.num_computed + count)
        if not self.manager.can_grow(sequence.held, stop):
            return
        self.manager.grow(sequence.held, stop)
        for group, blocks in zip(self.manager.groups, sequence.held, strict=True):
            assert len(blocks) == -(-stop // SIZE)
            first = max(0, sequence.num_computed - group.window + 1) if group.window else 0
            assert NULL_BLOCK not in blocks[first // SIZE :], "a token that is seen has no block"
        sequence.num_computed = stop
        while (sequence.num_prefix_blocks + 1) * SIZE <= stop:
            start = sequence.num_prefix_blocks * SIZE
            sequence.parent_key = self.manager.keep(
                sequence.parent_key,
                sequence.tokens[start : start + SIZE],
                sequence.held,
                sequence.num_prefix_blocks,
            )
            sequence.num_prefix_blocks += 1
        self.manager.trim(sequence.held, stop)

    def leave(self, sequence):
        self.sequences.remove(sequence)
        self.manager.release(sequence.held)

    def check(self):
        for group, allocator in enumerate(self.manager.allocators):
            owned = [b for s in self.sequences for b in s.held[group] if b != NULL_BLOCK]
            assert allocator.num_free == allocator.num_blocks - 1 - len(set(owned))
            for block in set(owned):
                assert allocator._references[block] == owned.count(block)


@settings(max_examples=300, deadline=None)
@given(
    windows=st.lists(st.integers(1, 9), max_size=2),
    has_prefix_cache=st.booleans(),
    calls=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=40),
)
def test_no_block_is_lost_or_doubled(windows, has_prefix_cache, calls):
    groups = [GroupBlocks(14), *(GroupBlocks(11, window) for window in windows)]
    world = World(CacheManager(groups, SIZE, 8, has_prefix_cache=has_prefix_cache))
    for kind, number in calls:
        if kind == 0:
            world.enter([i // 9 % 2 for i in range(1 + number)])
        elif kind == 1 and world.sequences:
            world.leave(world.sequences[number % len(world.sequences)])
        elif kind == 5:
            world.manager.forget()
        elif world.sequences:
            world.compute(world.sequences[number % len(world.sequences)], 1 + number % 8)
        world.check()
    for sequence in list(world.sequences):
        world.leave(sequence)
    world.check()
    assert world.manager.usage == 0.0
    world.manager.forget()
    world.check()
    assert world.manager.find([i // 9 % 2 for i in range(31)]).num_blocks == 0
    assert all(allocator.num_idle == 0 for allocator in world.manager.allocators)


def test_what_an_empty_cache_holds():
    assert CacheManager([GroupBlocks(11)], SIZE, 8).capacity == 40
    # A step of 8 and the 5 tokens before it are in 4 blocks at most: with them any length fits.
    assert CacheManager([GroupBlocks(11), GroupBlocks(5, 6)], SIZE, 8).capacity == 40
    assert CacheManager([GroupBlocks(11), GroupBlocks(4, 6)], SIZE, 8).capacity == 12
    assert CacheManager([GroupBlocks(11), GroupBlocks(3, 6)], SIZE, 8).capacity == 8
    # With a window of 1 nothing before the step is seen.
    assert CacheManager([GroupBlocks(11), GroupBlocks(4, 1)], SIZE, 8).capacity == 40
    assert CacheManager([GroupBlocks(11), GroupBlocks(3, 1)], SIZE, 8).capacity == 8


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 4), (2, 4), (5, 4), (6, 4), (9, 1), (8, 3)])
def test_blocks_that_tokens_are_in(num_tokens, size):
    found = max(len({i // size for i in range(a, a + num_tokens)}) for a in range(size))
    assert span_blocks(num_tokens, size) == found


@pytest.mark.parametrize(
    ("window", "num_free", "next_tokens", "expected"),
    [
        (1, 1, 100, True),  # a window of one token is in one block, and so is the step
        (8, 1, 100, False),  # 8 tokens may be in two blocks
        (8, 2, 100, True),
        (128, 2, 256, True),
        (128, 2, 257, False),  # the first step alone needs 3
        (1, 3, 384, True),
        (1, 2, 384, False),
    ],
)
def test_a_sliding_group_must_hold_the_first_step_and_a_window(
    window, num_free, next_tokens, expected
):
    """Not a step for each sequence: that of a prompt of 1,000 tokens would need 8 blocks."""
    manager = CacheManager([GroupBlocks(20), GroupBlocks(9, window)], 128, 1000)
    manager.allocators[1].allocate(8 - num_free)
    assert manager.can_enter(1000, next_tokens, manager.find([1])) is expected
    manager.allocators[0].allocate(12)
    assert not manager.can_enter(1000, next_tokens, manager.find([1])), "7 of 8 full blocks"


def test_blocks_of_a_hit_count_for_the_window():
    """A window of 8 in two blocks, one of which is shared with a sequence that runs."""
    manager = CacheManager([GroupBlocks(20), GroupBlocks(9, 8)], 128, 1000)
    tokens = [i % 50 for i in range(300)]
    held = manager.enter(manager.find(tokens))
    manager.grow(held, 128)
    manager.keep(ROOT, tokens[:128], held, 0)
    match = manager.find(tokens)
    assert match.num_blocks == 1
    manager.allocators[1].allocate(6)  # one is free
    assert manager.can_enter(301, 200, match)
    assert not manager.can_enter(301, 257, match), "its first step is in two more"
    manager.allocators[1].allocate(1)
    assert not manager.can_enter(301, 200, match)


def test_usage_is_that_of_the_fullest_group():
    manager = CacheManager([GroupBlocks(11), GroupBlocks(6, 6)], SIZE, 8, has_prefix_cache=False)
    held = manager.enter(manager.find([1]))
    manager.grow(held, 8)
    assert manager.usage == 0.4


def test_groups_of_equal_specs():
    full, sliding = attention_spec(2, 8, torch.float32), attention_spec(2, 8, torch.float32, 6)
    groups = group_specs([sliding, full, sliding, sliding])
    assert [(group.spec, group.layers) for group in groups] == [
        (sliding, (0, 2, 3)),
        (full, (1,)),
    ]
    assert groups[0].bytes_per_block(SIZE) == 3 * SIZE * 2 * 2 * 8 * 4


def test_entries_of_several_tokens_and_blocks_that_keep_their_last_ones():
    plane = Plane("entries", torch.bfloat16, (12,))
    compressed = KVCacheSpec("full", (plane,), tokens_per_entry=4)
    inputs = KVCacheSpec("sliding", (plane,), window=8, entries_per_block=32)
    groups = group_specs([compressed, inputs])
    assert [group.bytes_per_block(64) for group in groups] == [16 * 24, 32 * 24]
    pools = [CachePool(group, 5, 64, "cpu") for group in groups]
    assert pools[0].layers[0]["entries"].shape == (5, 16, 12)
    assert pools[1].layers[1]["entries"].shape == (5, 32, 12)
    assert not pools[0].layers[0]["entries"].any()


@pytest.mark.parametrize(("window", "num_needed"), [(1, 0), (8, 1), (128, 1), (129, 1), (130, 2)])
def test_blocks_of_128_tokens_that_a_window_needs(window, num_needed):
    """After whole blocks the next token sees `window - 1` tokens: none with a window of 1."""
    manager = CacheManager([GroupBlocks(20), GroupBlocks(20, window)], 128, 512)
    tokens = [i % 50 for i in range(500)]
    held = manager.enter(manager.find(tokens))
    manager.grow(held, 384)
    key = ROOT
    for index in range(3):
        key = manager.keep(key, tokens[index * 128 : index * 128 + 128], held, index)
    manager.trim(held, 384)
    assert [block != NULL_BLOCK for block in held[1]] == [3 - i <= num_needed for i in range(3)]
    manager.release(held)
    evicted = 19 - num_needed  # all but those that the window needs, which are idle last
    other = manager.allocators[1].allocate(evicted)
    match = manager.find(tokens)
    assert match.num_blocks == 3, "the blocks before the window are not needed"
    assert match.block_ids[1] == tuple(held[1])
    manager.allocators[1].free(other)
    if num_needed:
        manager.allocators[1].allocate(19)
        assert manager.find(tokens).num_blocks == 0


@pytest.mark.parametrize(("window", "freed_at"), [(1, 128), (8, 135), (128, 255)])
def test_a_window_frees_a_block_when_no_later_token_sees_it(window, freed_at):
    manager = CacheManager([GroupBlocks(20, window)], 128, 512)
    held = manager.enter(manager.find([1]))
    manager.grow(held, 300)
    assert manager.trim(held, freed_at - 1) == []
    assert manager.trim(held, freed_at) == [BlockWrite(0, 0, (NULL_BLOCK,))]
    assert held[0][0] == NULL_BLOCK
    assert NULL_BLOCK not in held[0][1:]
