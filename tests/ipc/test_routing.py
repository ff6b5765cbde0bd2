"""Which engine a request goes to: the pure policy, against plain rules and random histories."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.cache.allocator import BlockAllocator
from tiercel.cache.prefix import ROOT, PrefixCache
from tiercel.ipc.routing import Candidate, KnownBlocks, block_keys, choose

COUNTS = st.integers(0, 3)
CANDIDATES = st.lists(
    st.builds(
        lambda waiting, known, requests, turn: (10 * waiting, 10 * known, requests, turn),
        COUNTS, COUNTS, COUNTS, COUNTS,
    ),
    min_size=1, max_size=5,
).map(lambda rows: [Candidate(number, *row) for number, row in enumerate(rows)])  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(CANDIDATES, st.integers(0, 1))
def test_the_least_tokens_then_the_longest_prefix(candidates, order):
    chosen = choose(candidates[:: 1 - 2 * order])
    prompt = 40
    for other in candidates:
        tokens = other.waiting_tokens + prompt - other.known_tokens
        least = chosen.waiting_tokens + prompt - chosen.known_tokens
        assert least <= tokens
        if least < tokens:
            continue
        assert chosen.known_tokens >= other.known_tokens
        if chosen.known_tokens > other.known_tokens:
            continue
        mine, its = ((c.num_requests, c.last_turn, c.number) for c in (chosen, other))
        assert mine <= its


def test_an_idle_server_sends_a_conversation_to_its_history_and_others_in_turn():
    assert choose([Candidate(0), Candidate(1, known_tokens=64)]).number == 1
    assert choose([Candidate(0, last_turn=7), Candidate(1, last_turn=3)]).number == 1
    assert choose([Candidate(0, num_requests=1), Candidate(1, last_turn=9)]).number == 1


@pytest.mark.parametrize(("shared", "most"), [(0, 1), (64, 1), (1024, 6), (8192, 40)])
def test_a_prompt_that_all_share_spreads_once_waiting_takes_longer(shared, most):
    """Requests of 256 tokens to generate each, which never end: the difference stays bounded."""
    counts, knows = [0, 0, 0], [0, 0, 0]
    for turn in range(60):
        engines = [
            Candidate(number, 256 * counts[number], knows[number], counts[number], turn)
            for number in range(3)
        ]
        number = choose(engines).number
        counts[number] += 1
        knows[number] = shared
        assert max(counts) - min(counts) <= most
    assert sum(counts) == 60


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40),
       st.integers(1, 8))  # fmt: skip
def test_keys_are_equal_as_far_as_whole_blocks_are(one, other, size):
    keys, others = block_keys(one, size), block_keys(other, size)
    assert len(keys) == max(0, len(one) - 1) // size
    for number, (mine, its) in enumerate(zip(keys, others, strict=False)):
        stop = (number + 1) * size
        assert (mine == its) == (one[:stop] == other[:stop])


@pytest.mark.parametrize("seed", range(10))
def test_what_is_known_is_what_the_engine_finds(seed):
    """While nothing is evicted: the same prompts through the engine's prefix cache."""
    draw = random.Random(seed)
    size, num_blocks = draw.randint(1, 4), 2000
    allocator = BlockAllocator(num_blocks)
    cache, known = PrefixCache([allocator], [0], size), KnownBlocks(num_blocks)
    for _ in range(60):
        prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 30))]
        keys = block_keys(prompt, size)
        match = cache.find(prompt)
        assert known.count(keys) == match.num_blocks
        known.note(keys)
        parent = match.parent_key if match.num_blocks else ROOT
        for start in range(match.num_blocks * size, len(keys) * size, size):
            (block_id,) = allocator.allocate(1)
            parent = cache.keep(parent, prompt[start : start + size], [block_id])


def test_as_many_blocks_are_known_as_the_cache_holds():
    known = KnownBlocks(4)
    first, second = block_keys(range(7), 2), block_keys([9, 8, 7, 6, 5], 2)
    known.note(first)
    assert (len(first), known.count(first)) == (3, 3)
    known.note(second)
    assert len(known) == 4
    assert known.count(second) == 2
    assert known.count(first) == 2, "the end of the older prompt is forgotten first"
    known.note(first[:1])
    known.note(block_keys([1, 1, 1], 2))
    known.note(block_keys([2, 2, 2], 2))
    assert known.count(first) == 1, "what was used again stays"
    known.clear()
    assert known.count(first) == len(known) == 0
    empty = KnownBlocks(0)
    empty.note(first)
    assert empty.count(first) == 0
