"""When verifying drafts is worth its time, decided on the host for a step as a whole.

A step that verifies takes longer by some share c, whatever its drafts are worth; so it pays if its
rows get more than c tokens besides their own, on average. What they will get is estimated from what
earlier drafts got. How many drafts each row makes is the device's matter (`ops/verify_accept.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from tiercel.config import ACCEPTANCE_DECAY, RETRY_STEPS

FIRST_CHANCE: Final = 0.6  # that a draft is right, of a row that has had none
# A draft with a smaller chance is not made. On a GPU a place in a step that verifies costs nothing
# by itself; on a CPU each token takes its time.
LEAST_CHANCE: Final = {"cuda": 0.05, "cpu": 0.5}
# Of the time of other steps, what those may take that only try whether it would pay.
TRIAL_SHARE: Final = 0.02


def learned(chance: float, num_drafts: int, num_right: int) -> float:
    """The estimate of a row after a step, as `verify_accept` makes it."""
    chance = 1.0 - (1.0 - chance) * ACCEPTANCE_DECAY**num_right
    return chance * ACCEPTANCE_DECAY if num_right < num_drafts else chance


class DraftPolicy:
    """Says before each step whether its rows verify their drafts.

    Attributes:
        costs: (rows, c) for sizes of steps, rising, as they were measured; larger steps do not
            verify. None at all: verifying is free.
        spare_places: places of the cache behind a row's drafts that making drafts may write.
    """

    def __init__(self, costs: Sequence[tuple[int, float]] = (), spare_places: int = 0) -> None:
        self.costs = costs
        self.spare_places = spare_places
        self._num_steps = 0  # since the last one that only tried

    def pays(self, drafts: Sequence[tuple[int, float]], num_rows: int) -> bool:
        """Decide for one step.

        Args:
            drafts: of the rows that have some: how many, and the chance that one is right.
            num_rows: rows of the step, those without drafts too.
        """
        self._num_steps += 1
        if not drafts:
            return False
        gain = sum(sum(chance**j for j in range(1, count + 1)) for count, chance in drafts)
        cost = self._cost(num_rows)
        if gain > cost * num_rows or cost == inf:
            return cost < inf
        # Estimates rest while nothing is verified, and those of new rows are guesses: try it now
        # and then, soon after a time of steps that paid.
        if self._num_steps < max(RETRY_STEPS, cost / TRIAL_SHARE):
            return False
        self._num_steps = 0
        return True

    def _cost(self, num_rows: int) -> float:
        default = inf if self.costs else 0.0
        return next((cost for size, cost in self.costs if size >= num_rows), default)
