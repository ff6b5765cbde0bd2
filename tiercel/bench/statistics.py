"""Statistics of samples: percentiles, rates, errors by kind.

Definition of each figure:
    first token   from sending a request to the first piece of text, per request
    inter-token   (last piece - first piece) / (tokens - 1), per request; tokens by usage
    gap           between two pieces of an answer, over all answers: where users see it stall
    end to end    from sending a request to its last piece
Only requests that ended well count. Rates are over the whole level, from the first request sent to
the last answer, so they include its start and its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from tiercel.bench.completions import Sample
from tiercel.bench.drafts import DraftFigures


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles of seconds; percentiles are interpolated between the nearest two."""

    mean: float
    p50: float
    p90: float
    p99: float


class Bounds(msgspec.Struct, frozen=True):
    """Bounds that a good request keeps, in milliseconds; None is no bound."""

    first_token_ms: float | None = None
    inter_token_ms: float | None = None
    latency_ms: float | None = None

    @property
    def are_set(self) -> bool:
        """Whether there is a bound."""
        return (self.first_token_ms, self.inter_token_ms, self.latency_ms) != (None, None, None)


class Summary(msgspec.Struct, frozen=True):
    """The figures of one level.

    Attributes:
        requests, ok: number of requests sent, and of those that ended well.
        errors: number of errors by kind.
        unfinished: number cut off by Ctrl-C; neither well nor an error.
        duration_s: duration of the level.
        prompt_tokens, completion_tokens, cached_tokens: sums, from usage.
        short: number of answers with fewer tokens than requested.
        request_rate, completion_rate, total_rate: rates per second.
        goodput: requests within the bounds per second; None without bounds.
        first_token, inter_token, gap, latency: seconds; None where there is nothing to count.
        late: delay with which requests were sent; open loop only.
        client_load: share of one core that the client itself used.
        drafts: draft tokens; None where they are not counted or there were none.
    """

    requests: int
    ok: int
    errors: dict[str, int]
    unfinished: int
    duration_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    short: int
    request_rate: float
    completion_rate: float
    total_rate: float
    goodput: float | None
    first_token: Spread | None
    inter_token: Spread | None
    gap: Spread | None
    latency: Spread | None
    late: Spread | None
    client_load: float | None
    drafts: DraftFigures | None = None


def inter_token_s(sample: Sample) -> float | None:
    """Seconds per token after the first; None for an answer of one token or of one piece."""
    if sample.completion_tokens < 2 or sample.first_s is None or sample.latency_s is None:
        return None
    if len(sample.piece_s) == 1:
        return None  # all tokens arrived together: the server held them back
    return (sample.latency_s - sample.first_s) / (sample.completion_tokens - 1)


def is_good(sample: Sample, bounds: Bounds) -> bool:
    """Whether a request that ended well kept all bounds; without a second token it has no delay."""
    found = (
        (bounds.first_token_ms, sample.first_s),
        (bounds.inter_token_ms, inter_token_s(sample)),
        (bounds.latency_ms, sample.latency_s),
    )
    return all(
        bound is None or seconds is None or 1000 * seconds <= bound for bound, seconds in found
    )


def summarise(
    samples: Sequence[Sample],
    duration_s: float,
    *,
    bounds: Bounds,
    unfinished: int = 0,
    client_s: float | None = None,
    drafts: DraftFigures | None = None,
) -> Summary:
    """The figures of one level.

    Args:
        samples: samples of the level's requests, without the warm-up.
        duration_s: time from the first request sent to the last answer.
        bounds: latency bounds for the goodput.
        unfinished: number of requests that were cut off.
        client_s: processor time of the client.
        drafts: draft tokens of this level.
    """
    ok = [sample for sample in samples if sample.error is None]
    seconds = max(duration_s, 1e-9)
    prompt_tokens = sum(sample.prompt_tokens for sample in ok)
    completion_tokens = sum(sample.completion_tokens for sample in ok)
    good = sum(is_good(sample, bounds) for sample in ok)
    return Summary(
        requests=len(samples),
        ok=len(ok),
        errors=dict(Counter(s.error for s in samples if s.error is not None).most_common()),
        unfinished=unfinished,
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=sum(sample.cached_tokens for sample in ok),
        short=sum(sample.completion_tokens < sample.output_len for sample in ok),
        request_rate=len(ok) / seconds,
        completion_rate=completion_tokens / seconds,
        total_rate=(prompt_tokens + completion_tokens) / seconds,
        goodput=good / seconds if bounds.are_set else None,
        first_token=spread(sample.first_s for sample in ok),
        inter_token=spread(inter_token_s(sample) for sample in ok),
        gap=spread(gap for sample in ok for gap in np.diff(sample.piece_s)),
        latency=spread(sample.latency_s for sample in ok),
        late=spread(s.start_s - s.due_s for s in samples if s.due_s is not None),
        client_load=None if client_s is None else client_s / seconds,
        drafts=drafts if drafts is not None and drafts.num_draft_tokens else None,
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and percentiles of the values that are not None; None if there are none."""
    found = np.array([value for value in values if value is not None], dtype=np.float64)
    if not found.size:
        return None
    p50, p90, p99 = np.percentile(found, (50, 90, 99))
    return Spread(float(found.mean()), float(p50), float(p90), float(p99))
