"""What drafts were worth, counted on the host from the results of steps."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftCounts:
    """Totals over rows and steps; answers hold steps + accepted - trimmed tokens.

    Attributes:
        num_steps: steps of rows that may draft, counted once for each row that got tokens.
        num_drafts: of these, the ones that verified drafts.
        num_draft_tokens: drafts that were verified.
        num_trimmed_tokens: tokens that steps drew behind a stop token; a stop string cuts later,
            and is not counted.
        accepted_per_pos: how often the first, second, ... draft was right.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_trimmed_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were right."""
        return sum(self.accepted_per_pos)

    def add(self, num_drafts: int, num_right: int, num_trimmed: int) -> None:
        """Count a row's step."""
        self.num_steps += 1
        self.num_trimmed_tokens += num_trimmed
        if not num_drafts:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        missing = num_drafts - len(self.accepted_per_pos)
        self.accepted_per_pos += [0] * max(0, missing)
        for place in range(num_right):
            self.accepted_per_pos[place] += 1
