"""Clients are served in turn, and each one's items in their order."""

import random
from collections import Counter

import pytest

from tiercel.ipc.fair_queue import FairQueue


def test_many_items_of_one_client_delay_another_by_one():
    queue = FairQueue()
    for number in range(30):
        queue.put("a", f"a{number}")
    assert queue.take() == "a0"
    queue.put("b", "b0")
    assert [queue.take() for _ in range(4)] == ["a1", "b0", "a2", "a3"]
    assert (len(queue), queue.count("a"), queue.count("b")) == (26, 26, 0)


def test_an_empty_queue_gives_nothing():
    queue = FairQueue()
    assert queue.take() is None
    queue.put("a", 0)
    assert queue.take() == 0
    assert queue.take() is None
    queue.remove("a", 0)


@pytest.mark.parametrize("seed", range(10))
def test_no_client_is_served_twice_while_another_waits_through(seed):
    """Random puts, takes and removals against a list."""
    rng, queue, waiting, last, passed = random.Random(seed), FairQueue(), [], None, set()
    for number in range(600):
        client = rng.choice("aaaabc")
        if rng.random() < 0.5:
            queue.put(client, (client, number))
            waiting.append((client, number))
        elif waiting and rng.random() < 0.2:
            gone = rng.choice(waiting)
            queue.remove(gone[0], gone)
            waiting.remove(gone)
        else:
            item = queue.take()
            assert (item is None) == (not waiting)
            if item is None:
                continue
            assert item == next(entry for entry in waiting if entry[0] == item[0]), "its oldest"
            waiting.remove(item)
            is_again = last == item[0]
            assert not (is_again and passed & set(waiting)), "another client waited since"
            last, passed = item[0], {entry for entry in waiting if entry[0] != item[0]}
        assert len(queue) == len(waiting)
        assert {c: queue.count(c) for c in "abc"} == {
            c: Counter(entry[0] for entry in waiting)[c] for c in "abc"
        }
