"""Counts of draft tokens and accepted ones, kept on the host from the results of steps."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftCounts:
    """Totals over rows and steps; answers hold steps + accepted - trimmed tokens.

    Attributes:
        num_steps: steps of rows that may draft, counted once for each row that got tokens.
        num_drafts: steps of rows that verified drafts.
        num_draft_tokens: drafts that were verified.
        num_trimmed_tokens: tokens that steps sampled after a stop token; those that a stop string
            cuts off later are not counted.
        accepted_per_pos: number of times that the first, second, ... draft was accepted.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_trimmed_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were accepted."""
        return sum(self.accepted_per_pos)

    def add(self, num_drafts: int, num_accepted: int, num_trimmed: int) -> None:
        """Count a step of one row."""
        self.num_steps += 1
        self.num_trimmed_tokens += num_trimmed
        if not num_drafts:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        missing = num_drafts - len(self.accepted_per_pos)
        self.accepted_per_pos += [0] * max(0, missing)
        for index in range(num_accepted):
            self.accepted_per_pos[index] += 1
