"""The plan of one step: all that the runner knows of it.

A step computes some rows: the last token of an answer with its drafts, a chunk of a prompt, or
items to score, in any mixture.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from tiercel.cache.manager import BlockWrite
from tiercel.request.request import Request
from tiercel.scheduler.step_budget import Chunk


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """The part of one request in a step.

    Attributes:
        request: the owner.
        row: its engine row.
        start: first computed position; an upper bound while steps with drafts are under way.
        num_query: new tokens of prompt and output, >= 1 if there are no items.
        samples: whether the step reaches the last token, and so yields the next one.
        enters: whether the request got its engine row in this step.
        items: range of the items of its `score` that are computed after the new tokens.
        num_item_tokens: tokens of the items in `items`.
        num_drafts: draft tokens after the last token, at most; each may yield one more token.
    """

    request: Request
    row: int
    start: int
    num_query: int
    samples: bool
    enters: bool = False
    items: range = range(0)
    num_item_tokens: int = 0
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """New tokens, those of drafts and items included."""
        return self.num_query + self.num_drafts + self.num_item_tokens

    @property
    def is_chunk(self) -> bool:
        """Whether it is more than the last token of an answer with its drafts."""
        return self.num_query > 1 or bool(self.items)

    @property
    def is_answer(self) -> bool:
        """Whether it is one token of an answer, or of a prompt that is not read."""
        request = self.request
        is_read = request.reads_prompt and self.start < len(request.prompt_token_ids)
        return self.num_query == 1 and self.samples and not is_read

    @property
    def num_ahead(self) -> int:
        """Tokens that the step adds at most."""
        return self.num_drafts + self.samples

    @property
    def has_scores(self) -> bool:
        """Whether the step yields values of the request's `score`."""
        request = self.request
        if request.score is None:
            return False
        is_read = self.start + self.num_query == len(request.prompt_token_ids)
        return bool(self.items) or (is_read and not request.num_items)


class SchedulerOutput(Struct, frozen=True):
    """The plan of one step.

    Attributes:
        step_id: counts from 1.
        scheduled: rows with single new tokens first.
        new_blocks: entries of the block tables to write, (row, write) each.
        unsound_blocks: per cache group, freed blocks to zero before they are written again.
    """

    step_id: int
    scheduled: tuple[ScheduledRow, ...]
    new_blocks: tuple[tuple[int, BlockWrite], ...]
    unsound_blocks: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return sum(row.num_tokens for row in self.scheduled)

    @property
    def chunks(self) -> list[Chunk]:
        """Chunks of prompts and items in this step."""
        return [Chunk(row.start, row.num_tokens) for row in self.scheduled if row.is_chunk]
