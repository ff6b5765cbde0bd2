"""Kept blocks are found by their content alone and leave when needed, the last one first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.cache.allocator import BlockAllocator
from tiercel.cache.prefix import ROOT, PrefixCache

SIZE = 3


def fill(cache, allocator, tokens):
    """Compute a sequence: its blocks, full ones kept."""
    block_ids = allocator.allocate(-(-len(tokens) // SIZE))
    link = ROOT
    for i in range(len(tokens) // SIZE):
        link = cache.keep(link, tokens[i * SIZE : (i + 1) * SIZE], block_ids[i])
    return block_ids


@pytest.fixture
def allocator():
    return BlockAllocator(9)


@pytest.fixture
def cache(allocator):
    return PrefixCache(allocator, SIZE)


def test_the_longest_common_run_of_whole_blocks_is_found(cache, allocator):
    block_ids = fill(cache, allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.find([1, 2, 3, 4, 5, 6, 7, 8]).block_ids == tuple(block_ids[:2])
    assert cache.find([1, 2, 3, 4, 5, 6]).block_ids == tuple(block_ids[:1]), "not the last token"
    assert cache.find([1, 2, 3, 4, 9, 6, 7]).block_ids == tuple(block_ids[:1])
    assert cache.find([4, 5, 6, 1]).block_ids == (), "the same tokens at another place"
    assert cache.find([1]).block_ids == ()


def test_a_link_follows_its_own_forerunner_only(cache, allocator):
    fill(cache, allocator, [1, 1, 1, 5, 5, 5])
    other = fill(cache, allocator, [2, 2, 2])
    assert cache.find([2, 2, 2, 5, 5, 5, 0]).block_ids == tuple(other)


def test_an_equal_block_is_kept_once(cache, allocator):
    first = fill(cache, allocator, [1, 2, 3])
    second = fill(cache, allocator, [1, 2, 3])
    allocator.free(second)
    assert allocator.num_idle == 0, "the second is free at once"
    allocator.free(first)
    assert allocator.num_idle == 1
    assert cache.find([1, 2, 3, 4]).block_ids == tuple(first)


def test_idle_blocks_are_given_away_last_block_first_and_then_forgotten(cache, allocator):
    block_ids = fill(cache, allocator, list(range(9)))
    allocator.free(block_ids)
    allocator.allocate(6)  # 5 were free: one idle block has to go
    assert cache.find(list(range(10))).block_ids == tuple(block_ids[:2])
    allocator.allocate(2)
    assert cache.find(list(range(10))).block_ids == ()


def test_a_shared_block_is_not_given_away(cache, allocator):
    block_ids = fill(cache, allocator, list(range(6)))
    allocator.free(block_ids)
    found = cache.find(list(range(7))).block_ids
    allocator.share(found)
    assert allocator.num_free == 6
    assert not set(allocator.allocate(6)) & set(found)
    assert cache.find(list(range(7))).block_ids == found


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=20))
def test_what_is_found_holds_the_tokens_asked_for(sequences):
    """A pool that remembers what was written where: a hit reads back the sequence's own start."""
    allocator = BlockAllocator(7)
    cache = PrefixCache(allocator, SIZE)
    content = {}
    for tokens in sequences:
        match = cache.find(tokens)
        read = [token for block_id in match.block_ids for token in content[block_id]]
        assert read == tokens[: len(read)]
        assert len(read) < len(tokens)
        allocator.share(match.block_ids)
        missing = -(-len(tokens) // SIZE) - len(match.block_ids)
        block_ids = [*match.block_ids, *allocator.allocate(missing)]
        link = match.link
        for i in range(len(match.block_ids), len(block_ids)):
            content[block_ids[i]] = tokens[i * SIZE : (i + 1) * SIZE]
            if len(content[block_ids[i]]) == SIZE:
                link = cache.keep(link, content[block_ids[i]], block_ids[i])
        allocator.free(block_ids)
        assert allocator.num_free == 6
