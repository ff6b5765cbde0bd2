"""Whether verifying drafts is worth its time, decided on the host for a step as a whole.

A step that verifies takes longer by some share c, whatever its drafts are worth. So it is worth it
if its rows get more than c tokens besides their own, on average. The tokens that they will get are
estimated from earlier drafts. The device decides how many drafts each row makes
(`ops/verify_accept.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from tiercel.config import ACCEPTANCE_DECAY, RETRY_STEPS

# The estimated probability that a draft is accepted, of a row that has verified none.
INITIAL_ACCEPTANCE: Final = 0.6
# A draft that is less likely to be accepted is not made. On a GPU a position in a step that
# verifies costs nothing by itself; on a CPU each token takes its time.
MIN_ACCEPTANCE: Final = {"cuda": 0.05, "cpu": 0.5}
# Share of the time of other steps that trials may take: steps that verify only to measure.
TRIAL_SHARE: Final = 0.02


def update_acceptance(acceptance: float, num_drafts: int, num_accepted: int) -> float:
    """A row's acceptance estimate after a step, as `verify_accept` makes it."""
    acceptance = 1.0 - (1.0 - acceptance) * ACCEPTANCE_DECAY**num_accepted
    return acceptance * ACCEPTANCE_DECAY if num_accepted < num_drafts else acceptance


class DraftPolicy:
    """Decides before each step whether its rows verify their drafts.

    Attributes:
        costs: (rows, c) for sizes of steps, rising, as measured; larger steps do not verify. An
            empty sequence: verifying is free.
        spare_places: positions of the cache after a row's drafts that making drafts may write.
    """

    def __init__(self, costs: Sequence[tuple[int, float]] = (), spare_places: int = 0) -> None:
        self.costs = costs
        self.spare_places = spare_places
        self._num_steps = 0  # since the last trial

    def is_worth_verifying(self, drafts: Sequence[tuple[int, float]], num_rows: int) -> bool:
        """Decide for one step.

        Args:
            drafts: of each row that has some: their number, and the row's acceptance estimate.
            num_rows: rows of the step, those without drafts too.
        """
        self._num_steps += 1
        if not drafts:
            return False
        gain = sum(sum(rate**j for j in range(1, count + 1)) for count, rate in drafts)
        cost = self._cost(num_rows)
        if gain > cost * num_rows or cost == inf:
            return cost < inf
        # Estimates do not change while nothing is verified, and those of new rows are assumed: try
        # it now and then, and soon after a time of steps that were worth it.
        if self._num_steps < max(RETRY_STEPS, cost / TRIAL_SHARE):
            return False
        self._num_steps = 0
        return True

    def _cost(self, num_rows: int) -> float:
        default = inf if self.costs else 0.0
        return next((cost for size, cost in self.costs if size >= num_rows), default)
