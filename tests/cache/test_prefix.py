"""Kept blocks are found by their content only and are evicted when needed, the last one first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.cache.allocator import BlockAllocator
from tiercel.cache.prefix import ROOT, PrefixCache

SIZE = 3


def fill(cache, allocator, tokens):
    """Compute a sequence: allocate its blocks, keep the full ones."""
    block_ids = allocator.allocate(-(-len(tokens) // SIZE))
    parent_key = ROOT
    for i in range(len(tokens) // SIZE):
        parent_key = cache.keep(parent_key, tokens[i * SIZE : (i + 1) * SIZE], [block_ids[i]])
    return block_ids


def found(cache, tokens):
    """The cached prefix blocks of a sequence, of the only group."""
    match = cache.find(tokens)
    assert match.num_blocks == len(match.block_ids[0])
    return match.block_ids[0]


@pytest.fixture
def allocator():
    return BlockAllocator(9)


@pytest.fixture
def cache(allocator):
    return PrefixCache([allocator], [0], SIZE)


def test_the_longest_common_run_of_whole_blocks_is_found(cache, allocator):
    block_ids = fill(cache, allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == tuple(block_ids[:2])
    assert found(cache, [1, 2, 3, 4, 5, 6]) == tuple(block_ids[:1]), "not the last token"
    assert found(cache, [1, 2, 3, 4, 9, 6, 7]) == tuple(block_ids[:1])
    assert found(cache, [4, 5, 6, 1]) == (), "the same tokens at another position"
    assert found(cache, [1]) == ()


def test_a_link_follows_its_own_forerunner_only(cache, allocator):
    fill(cache, allocator, [1, 1, 1, 5, 5, 5])
    other = fill(cache, allocator, [2, 2, 2])
    assert found(cache, [2, 2, 2, 5, 5, 5, 0]) == tuple(other)


def test_an_equal_block_is_kept_once(cache, allocator):
    first = fill(cache, allocator, [1, 2, 3])
    second = fill(cache, allocator, [1, 2, 3])
    allocator.free(second)
    assert allocator.num_idle == 0, "the second is free immediately"
    allocator.free(first)
    assert allocator.num_idle == 1
    assert found(cache, [1, 2, 3, 4]) == tuple(first)


def test_idle_blocks_are_given_away_last_block_first_and_then_forgotten(cache, allocator):
    block_ids = fill(cache, allocator, list(range(9)))
    allocator.free(block_ids)
    allocator.allocate(6)  # 5 were free: one idle block has to go
    assert found(cache, list(range(10))) == tuple(block_ids[:2])
    allocator.allocate(2)
    assert found(cache, list(range(10))) == ()


def test_a_shared_block_is_not_given_away(cache, allocator):
    block_ids = fill(cache, allocator, list(range(6)))
    allocator.free(block_ids)
    shared = found(cache, list(range(7)))
    allocator.share(shared)
    assert allocator.num_free == 6
    assert not set(allocator.allocate(6)) & set(shared)
    assert found(cache, list(range(7))) == shared


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=20))
def test_what_is_found_holds_the_tokens_asked_for(sequences):
    """A pool that remembers the writes: a hit reads back the sequence's own prefix."""
    allocator = BlockAllocator(7)
    cache = PrefixCache([allocator], [0], SIZE)
    content = {}
    for tokens in sequences:
        match = cache.find(tokens)
        matched = match.block_ids[0]
        read = [token for block_id in matched for token in content[block_id]]
        assert read == tokens[: len(read)]
        assert len(read) < len(tokens)
        allocator.share(matched)
        missing = -(-len(tokens) // SIZE) - len(matched)
        block_ids = [*matched, *allocator.allocate(missing)]
        parent_key = match.parent_key
        for i in range(len(matched), len(block_ids)):
            content[block_ids[i]] = tokens[i * SIZE : (i + 1) * SIZE]
            if len(content[block_ids[i]]) == SIZE:
                parent_key = cache.keep(parent_key, content[block_ids[i]], [block_ids[i]])
        allocator.free(block_ids)
        assert allocator.num_free == 6


def test_a_sliding_group_needs_the_blocks_of_the_last_window_only():
    full, sliding = BlockAllocator(9), BlockAllocator(9)
    cache = PrefixCache([full, sliding], [0, 4], SIZE)
    tokens, parent_key = list(range(12)), ROOT
    blocks = [full.allocate(4), sliding.allocate(4)]
    for i in range(4):
        parent_key = cache.keep(
            parent_key, tokens[i * SIZE : (i + 1) * SIZE], [held[i] for held in blocks]
        )
    full.free(blocks[0])
    sliding.free(blocks[1])
    match = cache.find([*tokens, 0])
    # The token at position 12 sees 9 .. 12: of the sliding group, only the last block.
    assert match.block_ids == (tuple(blocks[0]), (0, 0, 0, blocks[1][3]))
    sliding.allocate(5)  # 4 were free: the last block, which went idle first, is evicted
    match = cache.find([*tokens, 0])
    assert match.num_blocks == 3
    assert match.block_ids == (tuple(blocks[0][:3]), (0, 0, blocks[1][2]))
    # A recomputed block replaces the evicted one.
    cache.keep(match.parent_key, tokens[9:], [0, sliding.allocate(1)[0]])
    assert cache.find([*tokens, 0]).num_blocks == 4


def test_an_entry_without_its_full_block_is_gone():
    full, sliding = BlockAllocator(3), BlockAllocator(9)
    cache = PrefixCache([full, sliding], [0, 4], SIZE)
    blocks = full.allocate(1), sliding.allocate(1)
    cache.keep(ROOT, [1, 2, 3], [blocks[0][0], blocks[1][0]])
    full.free(blocks[0])
    sliding.free(blocks[1])
    full.allocate(2)
    assert cache.find([1, 2, 3, 4]).num_blocks == 0
    assert len(sliding.allocate(8)) == 8, "its other block can still be evicted"


def test_what_is_left_of_a_former_entry_takes_no_later_one_of_its_tokens_along():
    full, sliding = BlockAllocator(2), BlockAllocator(4)
    cache = PrefixCache([full, sliding], [0, 4], SIZE)
    for _ in range(2):  # the second takes the full block of the first
        blocks = [*full.allocate(1), *sliding.allocate(1)]
        cache.keep(ROOT, [1, 2, 3], blocks)
        full.free(blocks[:1])
        sliding.free(blocks[1:])
    assert sliding.num_idle == 2
    sliding.allocate(2)  # one was free; of the idle ones that of the first has waited longest
    match = cache.find([1, 2, 3, 4])
    assert match.block_ids == ((blocks[0],), (blocks[1],))
