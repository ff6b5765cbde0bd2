"""The passes of a step in which every rank has requests of its own, alike on all ranks.

Experts are shared, so ranks pass the layers together, each with its own rows. Every rank knows all
plans and finds the same passes by them: over answers, and, where any rank has such, over chunks of
prompts; each with the passes of the draft head that follow it. A rank that has nothing for a pass
brings a row of scratch, which reads the null block and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from tiercel.params import SamplingParams
from tiercel.request.request import Request, Status
from tiercel.runner.step_inputs import Shares
from tiercel.scheduler.joint import JointOutput
from tiercel.scheduler.plan import ScheduledRow

Parts = Sequence[ScheduledRow]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Which passes a step has.

    Attributes:
        drafts: whether any row drafts: then answers and chunks pass one after the other.
        is_mixed: whether any row has a chunk.
        answers: of several ranks with rows of their own, what each brings to the pass over answers,
            or to the only one.
        chunks: the same of the pass over chunks.
    """

    drafts: bool
    is_mixed: bool
    answers: Shares | None = None
    chunks: Shares | None = None


class JointStep(Struct, frozen=True):
    """A step as one rank runs it: its parts, those of scratch among them, and the passes of all."""

    parts: tuple[ScheduledRow, ...]
    shape: StepShape


class ScratchParts(Struct, frozen=True):
    """Parts of a rank that has nothing for a pass; results of their request are read by nobody.

    Attributes:
        answer: takes the place of an answer.
        chunk: takes the place of a chunk that samples.
        silent: takes the place of one that does not.
    """

    answer: ScheduledRow
    chunk: ScheduledRow
    silent: ScheduledRow


def make_scratch_parts(scratch: int) -> ScratchParts:
    """Parts of the row `scratch`."""
    request = Request("scratch", [0, 0], SamplingParams(temperature=0), 0, 0, frozenset(), 1)
    request.row, request.status = scratch, Status.RUNNING
    return ScratchParts(
        ScheduledRow(request, scratch, 0, 1, samples=True),
        ScheduledRow(request, scratch, 0, 2, samples=True),
        ScheduledRow(request, scratch, 0, 2, samples=False),
    )


def joint_step(
    plan: JointOutput,
    rank: int,
    scratch: ScratchParts,
    padded: Callable[[int, bool], tuple[int, int] | None],
) -> JointStep:
    """The step of a rank.

    Args:
        plan: of all ranks.
        rank: this one.
        scratch: of any rank.
        padded: the rows, and positions of each, to which passes over answers of so many rows are
            padded, with drafts or without; None: to none.
    """
    every = [() if own is None else own.scheduled for own in plan.by_rank]
    drafts = any(part.request.draft_limit for part in plan.scheduled)
    is_mixed = not all(part.is_answer for part in plan.scheduled)
    if not drafts:
        every = [parts or (scratch.answer,) for parts in every]
        shape = StepShape(drafts, is_mixed, _shares(every, None if is_mixed else padded))
        return JointStep(tuple(every[rank]), shape)
    answers = [[part for part in parts if part.is_answer] for parts in every]
    chunks = [[part for part in parts if not part.is_answer] for parts in every]
    own: list[ScheduledRow] = []
    of_answers = of_chunks = None
    if any(answers):
        answers = [parts or [scratch.answer] for parts in answers]
        of_answers = _shares(answers, padded)
        own += answers[rank]
    if is_mixed:
        samples = any(part.samples for parts in chunks for part in parts)
        chunks = [_with_scratch(parts, scratch, samples=samples) for parts in chunks]
        of_chunks = _shares(chunks, None)
        own += chunks[rank]
    return JointStep(tuple(own), StepShape(drafts, is_mixed, of_answers, of_chunks))


def _with_scratch(parts: Parts, scratch: ScratchParts, *, samples: bool) -> list[ScheduledRow]:
    """Chunks of a rank, some of which sample if any rank's do: then all ranks draft after them."""
    if samples and not any(part.samples for part in parts):
        return [*parts, scratch.chunk]
    return list(parts) or [scratch.silent]


def _shares(
    every: Sequence[Parts], padded: Callable[[int, bool], tuple[int, int] | None] | None
) -> Shares:
    """What all ranks bring to a pass: bounds of their tokens, and the rows that go on to draft."""
    tokens = tuple(sum(part.num_tokens for part in parts) for parts in every)
    rows = tuple(sum(part.samples for part in parts) for parts in every)
    has_drafts = any(part.num_drafts for parts in every for part in parts)
    sizes = None if padded is None else padded(max(rows), has_drafts)
    if sizes is None:
        return Shares(tokens, rows)
    size, width = sizes
    return Shares((size * width,) * len(every), (size,) * len(every), width)
