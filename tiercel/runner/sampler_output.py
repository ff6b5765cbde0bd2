"""The sampler's output: on the device, on its way to the host, and as tokens of each row there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
from msgspec import Struct
from torch import Tensor

from tiercel.ops.sample_tokens import NO_TOKEN, NONFINITE
from tiercel.ops.verify_accept import UNSOUND_DRAFT, split_drafts
from tiercel.request.request import Request, TokenLogprobs
from tiercel.runner.host_copies import HostCopies

PROBLEMS = {NONFINITE: "nonfinite_logits", NO_TOKEN: "no_valid_token"}


class TopLogprobs(Struct, frozen=True):
    """Log-probabilities at P positions: of given tokens, and of the most likely ones.

    Attributes:
        token_ids: (P,) int32, the given tokens.
        logprobs: (P,) float32, their log-probabilities.
        top_ids: (P, count) int64, the most likely tokens, best first.
        top_logprobs: (P, count) float32, their log-probabilities.
    """

    token_ids: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All four."""
        return self.token_ids, self.logprobs, self.top_ids, self.top_logprobs

    def to_host(self, copies: HostCopies) -> TopLogprobs:
        """The same values on the host, once `copies` have been waited for."""
        return TopLogprobs(*map(copies.add, self.tensors))

    def entries(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Entries of all positions, on the host, each with its own count of most likely tokens."""
        rows = zip(*(tensor.tolist() for tensor in self.tensors), counts, strict=True)
        return [
            TokenLogprobs(token_id, logprob, tuple(zip(ids[:n], values[:n], strict=True)))
            for token_id, logprob, ids, values, n in rows
        ]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What the sampler yields for the R rows of a step.

    A step without drafts has `token_ids` and `problems`; a step that verifies drafts has `table`.

    Attributes:
        token_ids: (R,) int32, the token of each row.
        problems: (R,) uint8, problems of `ops/sample_tokens.py`.
        table: (R, K + 4) int32, the table of `Verified`. New drafts follow it as (R, 1 + K) of
            `Rows.drafts` once they are made, so that one copy brings both to the host.
        logprob_rows: numbers of the rows that want log-probabilities.
        logprobs: log-probabilities for all logits rows of these.
    """

    token_ids: Tensor | None = None
    problems: Tensor | None = None
    table: Tensor | None = None
    logprob_rows: tuple[int, ...] = ()
    logprobs: TopLogprobs | None = None

    def to_host(self, copies: HostCopies) -> SamplerOutput:
        """The same values on the host, once `copies` have been waited for."""
        token_ids, problems, table = (
            None if tensor is None else copies.add(tensor)
            for tensor in (self.token_ids, self.problems, self.table)
        )
        logprobs = None if self.logprobs is None else self.logprobs.to_host(copies)
        return SamplerOutput(token_ids, problems, table, self.logprob_rows, logprobs)


class SampledTokens(msgspec.Struct, frozen=True):
    """The tokens that a step sampled for one row, on the host; one is made for each row and step.

    Attributes:
        token_ids: new token ids, in order.
        problem: None, or ``nonfinite_logits`` / ``no_valid_token``.
        logprobs: log-probabilities of each, if they were requested.
        num_drafts: number of drafts that were verified.
        next_drafts: drafts that the next step may verify.
        has_unsound_draft: whether the logits after a draft were not finite.
    """

    token_ids: tuple[int, ...]
    problem: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_drafts: int = 0
    next_drafts: tuple[int, ...] = ()
    has_unsound_draft: bool = False


def read_sampler_output(
    output: SamplerOutput, requests: Sequence[Request], widths: Sequence[int] = ()
) -> list[SampledTokens]:
    """Read a step's output, which has arrived on the host; rows of scratch are dropped.

    Args:
        output: output of the step.
        requests: requests of its first rows.
        widths: number of logits rows of each, if they verify drafts.
    """
    entries = _read_logprobs(output, requests, widths)
    if output.table is not None:
        return _read_table(output.table[: len(requests)], entries)
    assert output.token_ids is not None, "there is no table"
    assert output.problems is not None, "there is no table"
    problems = output.problems.tolist()
    return [
        SampledTokens((token_id,), PROBLEMS.get(problems[i]), entries.get(i, ()))
        for i, token_id in enumerate(output.token_ids[: len(requests)].tolist())
    ]


def _read_table(
    joined: Tensor, entries: dict[int, tuple[TokenLogprobs, ...]]
) -> list[SampledTokens]:
    """Read a table of `Verified` and the drafts after it; entries: log-probabilities by row."""
    verified, draft_ids = split_drafts(joined)
    columns = (
        verified.token_ids, verified.num_new, verified.problems, verified.num_drafts, draft_ids,
    )  # fmt: skip
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        SampledTokens(
            tuple(token_ids[:num_new]),
            PROBLEMS.get(problem),
            entries.get(i, ())[:num_new],
            num_drafts,
            tuple(made[:num_made]),
            has_unsound_draft=problem == UNSOUND_DRAFT,
        )
        for i, (token_ids, num_new, problem, num_drafts, (num_made, *made)) in enumerate(rows)
    ]


def _read_logprobs(
    output: SamplerOutput, requests: Sequence[Request], widths: Sequence[int]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Log-probabilities of the rows that want them, one entry for each logits row."""
    if output.logprobs is None:
        return {}
    numbers = output.logprob_rows
    sizes = [widths[i] if widths else 1 for i in numbers]
    counts = [requests[i].params.logprobs or 0 for i in numbers]
    each = [count for count, size in zip(counts, sizes, strict=True) for _ in range(size)]
    entries = iter(output.logprobs.entries(each))
    return {i: tuple(islice(entries, size)) for i, size in zip(numbers, sizes, strict=True)}


def top_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> TopLogprobs:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: (P, vocab_size) float32, raw.
        token_ids: (P,), one for each row of logits.
        count: number of most likely tokens, best first; all if there are fewer.
    """
    logprobs = logits.log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1)).squeeze(1)
    values, ids = logprobs.topk(min(count, logits.shape[1]), dim=1)
    return TopLogprobs(token_ids, chosen, ids, values)
