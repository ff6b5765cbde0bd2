"""What proposers read of the engine's rows, and what they write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tiercel.ops.verify_accept import DraftRows


@dataclass(frozen=True, slots=True)
class DraftTexts:
    """Columns of S rows, the last of them scratch.

    Attributes:
        token_ids: (S, room) int32, prompt and answer.
        num_tokens: (S,) int32, of both.
        num_prompt: (S,) int32, of the prompt.
        max_new: (S,) int32, of the answer at most.
        drafts: where drafts go, from column 1 of `draft_ids` on; their number to column 0.
    """

    token_ids: Tensor
    num_tokens: Tensor
    num_prompt: Tensor
    max_new: Tensor
    drafts: DraftRows


class Proposer(Protocol):
    """Writes what may follow the text of some rows."""

    def enter(self, rows: list[int], longest: int) -> None:
        """Take note of rows that hold a new text, of up to `longest` tokens."""

    def propose(self, rows: Tensor) -> None:
        """Draft for rows (R,) int32 that have just got tokens; scratch among them is harmless."""
