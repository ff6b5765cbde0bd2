"""How much of an engine's start is done, as one share that only rises.

A start has two phases, finding the model and loading it, and each has stages that are not known
beforehand: a download, a check, each with a count of its own. So a stage takes four fifths of the
share that its phase has left, and the second phase the whole share that the first one left.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

_STAGE_SHARE: Final = 0.8


class Phase(Enum):
    """A part of the start; its value is the share at which it ends."""

    FIND = 0.5
    LOAD = 1.0


class StartProgress:
    """The share of one start.

    Attributes:
        phase: phase to which the stages belong; set by the caller.
        share: share of the start that is done, 0 to 1.
    """

    def __init__(self) -> None:
        self.phase = Phase.FIND
        self.share = 0.0
        self._stage = ""
        self._low = self._high = 0.0

    def take(self, what: str, done: int, total: int) -> None:
        """Note the progress of a stage, by its name; a total of 0 is unknown and moves nothing."""
        if what != self._stage:
            self._stage = what
            self._low = self.share
            self._high = self.share + _STAGE_SHARE * (self.phase.value - self.share)
        if total:
            reached = self._low + (self._high - self._low) * min(1.0, done / total)
            self.share = max(self.share, reached)
