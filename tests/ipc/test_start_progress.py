"""The share of a start: it rises through all stages, and ends below its phase's end."""

import random

import pytest

from tiercel.ipc.start_progress import Phase, StartProgress


def shares(progress, *steps):
    told = []
    for step in steps:
        progress.take(*step)
        told.append(progress.share)
    return told


def test_a_stage_takes_four_fifths_of_what_is_left_of_its_phase():
    progress = StartProgress()
    assert shares(progress, ("Fetching", 0, 8), ("Fetching", 4, 8), ("Fetching", 8, 8)) == (
        pytest.approx([0.0, 0.2, 0.4])
    )
    assert shares(progress, ("Checking", 1, 2), ("Checking", 2, 2)) == pytest.approx([0.44, 0.48])
    progress.phase = Phase.LOAD
    assert shares(progress, ("PyTorch", 0, 0), ("Loading", 1, 2)) == pytest.approx([0.48, 0.688])


def test_nothing_to_fetch_leaves_everything_to_loading():
    progress = StartProgress()
    progress.phase = Phase.LOAD
    assert shares(progress, ("Loading", 0, 5), ("Loading", 5, 5)) == pytest.approx([0.0, 0.8])


@pytest.mark.parametrize("seed", range(20))
def test_it_only_rises_whatever_the_stages_say(seed):
    draw = random.Random(seed)
    progress, told = StartProgress(), [0.0]
    for phase in Phase:
        progress.phase = phase
        for _ in range(draw.randrange(8)):
            what, total = draw.choice("abc"), draw.choice((0, 1, 7))
            steps = [(what, draw.randrange(9), total) for _ in range(draw.randrange(6))]
            told += shares(progress, *steps)
            assert progress.share < phase.value
    assert told == sorted(told)
