"""What proposers read of the engine's rows and of a step, and what they write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tiercel.batch import Batch
from tiercel.ops.sample_tokens import SampleRows
from tiercel.ops.verify_accept import DraftRows


@dataclass(frozen=True, slots=True)
class DraftTexts:
    """Columns of S rows, the last of them scratch.

    Attributes:
        sampling: the texts, and how their next tokens are drawn.
        num_prompt: (S,) int32, of the prompt.
        max_new: (S,) int32, of the answer at most.
        drafts: where drafts go, from column 1 of `draft_ids` on; their number to column 0.
    """

    sampling: SampleRows
    num_prompt: Tensor
    max_new: Tensor
    drafts: DraftRows


@dataclass(frozen=True, slots=True)
class StepStates:
    """What a model made of a step.

    Attributes:
        batch: of the step.
        hidden: (T, hidden) float32, of its `forward`.
        width: places of each request, if all have as many.
        drawn: which requests got tokens, by their numbers; None: all.
    """

    batch: Batch
    hidden: Tensor
    width: int | None
    drawn: tuple[int, ...] | None = None


class Proposer(Protocol):
    """Writes what may follow the text of some rows."""

    @property
    def reads_states(self) -> bool:
        """Whether `propose` needs the states of each step."""

    def enter(self, rows: list[int], longest: int) -> None:
        """Take note of rows that hold a new text, of up to `longest` tokens."""

    def follow(self, states: StepStates) -> None:
        """Take note of a step of which no request got tokens; only if `reads_states`."""

    def propose(self, rows: Tensor, states: StepStates | None) -> None:
        """Draft for rows that have just got tokens.

        Args:
            rows: (R,) int32; scratch among them is harmless.
            states: of their step, if `reads_states`.
        """
