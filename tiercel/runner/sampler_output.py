"""What a step drew, on the device, on its way to the host, and there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
from torch import Tensor

from tiercel.ops.sample_tokens import NO_TOKEN, NONFINITE
from tiercel.ops.verify_accept import UNSOUND_DRAFT
from tiercel.request.request import Request, TokenLogprobs
from tiercel.runner.host_copies import HostCopies

PROBLEMS = {NONFINITE: "nonfinite_logits", NO_TOKEN: "no_valid_token"}


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log-probabilities of P places: of given tokens, and of the most likely ones.

    Attributes:
        token_ids: (P,) int32.
        logprobs: (P,) float32 of these.
        top_ids: (P, count) int64, best first.
        top_logprobs: (P, count) float32.
    """

    token_ids: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All four."""
        return self.token_ids, self.logprobs, self.top_ids, self.top_logprobs

    def copied(self, copies: HostCopies) -> TopLogprobs:
        """The same on its way to the host."""
        return TopLogprobs(*map(copies.add, self.tensors))

    def entries(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """On the host: one entry per place, with its own count of the most likely tokens."""
        rows = zip(*(tensor.tolist() for tensor in self.tensors), counts, strict=True)
        return [
            TokenLogprobs(token_id, logprob, tuple(zip(ids[:n], values[:n], strict=True)))
            for token_id, logprob, ids, values, n in rows
        ]


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """Results of one step on the device, for R rows.

    Attributes:
        token_ids: (R,) int32; or, in one for one copy, (R, K + 4) of `Verified` and, once they are
            made, (R, 1 + K) of `Rows.drafts`.
        problems: (R,) uint8, of `ops/sample_tokens.py`; None if they are in `token_ids`.
        asked: rows with log-probabilities, by their numbers, and
        logprobs: of each of their lines.
    """

    token_ids: Tensor
    problems: Tensor | None = None
    asked: tuple[int, ...] = ()
    logprobs: TopLogprobs | None = None

    def copied(self, copies: HostCopies) -> DeviceSample:
        """The same on its way to the host."""
        problems, logprobs = self.problems, self.logprobs
        return DeviceSample(
            copies.add(self.token_ids),
            None if problems is None else copies.add(problems),
            self.asked,
            None if logprobs is None else logprobs.copied(copies),
        )


class Sampled(msgspec.Struct, frozen=True):
    """What a step did for one row, on the host; one is made for each row and step.

    Attributes:
        token_ids: new ones, in order.
        problem: None, or ``nonfinite_logits`` / ``no_valid_token``.
        logprobs: of each, if they were asked for.
        num_drafts: drafts that were verified.
        next_drafts: what the next step may verify.
        has_unsound_draft: the logits behind a draft were not finite.
    """

    token_ids: tuple[int, ...]
    problem: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_drafts: int = 0
    next_drafts: tuple[int, ...] = ()
    has_unsound_draft: bool = False


def host_result(
    sample: DeviceSample | None, requests: Sequence[Request], widths: Sequence[int] = ()
) -> list[Sampled]:
    """Read a step's results, which have arrived on the host; rows of scratch are dropped.

    Args:
        sample: of the step.
        requests: of its first rows.
        widths: lines of each, if they verify drafts.
    """
    if sample is None:
        return []
    entries = _read_logprobs(sample, requests, widths)
    if sample.problems is not None:
        problems = sample.problems.tolist()
        return [
            Sampled((token_id,), PROBLEMS.get(problems[i]), entries.get(i, ()))
            for i, token_id in enumerate(sample.token_ids[: len(requests)].tolist())
        ]
    results = []
    width = (sample.token_ids.shape[1] - 3) // 2
    for i, line in enumerate(sample.token_ids[: len(requests)].tolist()):
        *token_ids, num_new, code, num_drafts = line[: width + 3]
        num_made, *made = line[width + 3 :]
        results.append(
            Sampled(
                tuple(token_ids[:num_new]),
                PROBLEMS.get(code),
                entries.get(i, ())[:num_new],
                num_drafts,
                tuple(made[:num_made]),
                has_unsound_draft=code == UNSOUND_DRAFT,
            )
        )
    return results


def _read_logprobs(
    sample: DeviceSample, requests: Sequence[Request], widths: Sequence[int]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Log-probabilities of the rows that asked for them, one entry for each line."""
    if sample.logprobs is None:
        return {}
    sizes = [widths[i] if widths else 1 for i in sample.asked]
    counts = [requests[i].params.logprobs or 0 for i in sample.asked]
    each = [count for count, size in zip(counts, sizes, strict=True) for _ in range(size)]
    entries = iter(sample.logprobs.entries(each))
    return {i: tuple(islice(entries, size)) for i, size in zip(sample.asked, sizes, strict=True)}


def top_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> TopLogprobs:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: (P, vocab_size) float32, raw.
        token_ids: (P,), one per row.
        count: most likely tokens to report, best first; all if there are fewer.
    """
    logprobs = logits.log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1)).squeeze(1)
    values, ids = logprobs.topk(min(count, logits.shape[1]), dim=1)
    return TopLogprobs(token_ids, chosen, ids, values)
