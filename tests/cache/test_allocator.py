"""Blocks are free or owned by one request, in any order of calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.cache.allocator import NULL_BLOCK, BlockAllocator


@settings(max_examples=300, deadline=None)
@given(
    num_blocks=st.integers(1, 12),
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=30),
)
def test_no_block_is_lost_or_owned_twice(num_blocks, calls):
    allocator = BlockAllocator(num_blocks)
    everything = set(range(num_blocks)) - {NULL_BLOCK}
    owners = []
    for is_free, number in calls:
        if is_free and owners:
            allocator.free(owners.pop(number % len(owners)))
        elif number <= allocator.num_free:
            owners.append(allocator.allocate(number))
            assert len(owners[-1]) == number
        owned = [block for blocks in owners for block in blocks]
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert set(owned) <= everything, "the null block, or one that does not exist"
        assert allocator.num_free == len(everything) - len(owned)
    for blocks in owners:
        allocator.free(blocks)
    assert set(allocator.allocate(allocator.num_free)) == everything


def test_a_lone_request_gets_a_run_again_and_again():
    allocator = BlockAllocator(8)
    for _ in range(3):
        blocks = allocator.allocate(5)
        assert blocks == [1, 2, 3, 4, 5]
        allocator.free(blocks)


def test_more_than_is_free_is_a_fault_of_the_scheduler():
    allocator = BlockAllocator(3)
    with pytest.raises(AssertionError, match="reserves"):
        allocator.allocate(3)
    assert allocator.num_free == 2
