"""What proposers read of the engine's rows and of a step, and the interface of a proposer."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct
from torch import Tensor

from tiercel.batch import Batch
from tiercel.ops.sample_tokens import SampleRows
from tiercel.ops.verify_accept import DraftRows


class DrafterState(Struct, frozen=True):
    """Columns of S rows, the last of them scratch.

    Attributes:
        sampling: token ids of each row, and how its next tokens are sampled.
        num_prompt: (S,) int32, tokens of the prompt.
        max_new: (S,) int32, tokens of the answer at most.
        drafts: draft tokens, from column 1 of `draft_ids` on; their number is in column 0.
    """

    sampling: SampleRows
    num_prompt: Tensor
    max_new: Tensor
    drafts: DraftRows


class ForwardOutput(Struct, frozen=True):
    """A step's batch with the states that the model's `forward` returned for it.

    Attributes:
        batch: of the step.
        hidden: (T, state_width), of the model's `forward`.
        width: tokens of each request, if all have equally many; else None.
        sampled: numbers of the requests that got tokens; None: all.
    """

    batch: Batch
    hidden: Tensor
    width: int | None
    sampled: tuple[int, ...] | None = None


class Proposer(Protocol):
    """Writes draft tokens that may follow the text of some rows."""

    @property
    def reads_output(self) -> bool:
        """Whether `propose` needs the model's output of each step."""

    def enter(self, rows: list[int], longest: int) -> None:
        """Take note of rows that hold a new text, of up to `longest` tokens."""

    def update_cache(self, output: ForwardOutput) -> None:
        """Take note of a step in which no request got tokens; only if `reads_output`."""

    def propose(self, rows: Tensor, output: ForwardOutput | None) -> None:
        """Draft for rows that have just got tokens.

        Args:
            rows: (R,) int32; scratch among them is harmless.
            output: of their step, if `reads_output`.
        """
