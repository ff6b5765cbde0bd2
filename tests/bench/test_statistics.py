"""Figures from samples whose answers are known by hand."""

import pytest

from tiercel.bench.completions import Sample
from tiercel.bench.statistics import Bounds, Spread, inter_token_s, is_good, spread, summarise


def sample(index=0, first=0.1, last=0.5, tokens=5, **kwargs):
    """An answer whose pieces arrive at equal intervals."""
    step = (last - first) / max(tokens - 1, 1)
    fields = {
        "start_s": 0.0,
        "output_len": tokens,
        "first_s": first,
        "latency_s": last,
        "piece_s": [first + step * i for i in range(tokens)],
        "prompt_tokens": 10,
        "completion_tokens": tokens,
    }
    return Sample(index, **(fields | kwargs))


def test_percentiles_lie_between_neighbours():
    # 0..100 in hundredths: the p-th percentile of 101 even values is p itself
    found = spread([value / 100 for value in range(101)])
    assert found == Spread(pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.9), 0.99)
    assert spread([3.0, 1.0]) == Spread(2.0, 2.0, pytest.approx(2.8), pytest.approx(2.98))
    assert spread([None, 4.0]) == Spread(4.0, 4.0, 4.0, 4.0)
    assert spread([None]) is None


def test_tokens_are_counted_by_usage_not_by_pieces():
    # three pieces, but 9 tokens: 8 steps of time, two gaps
    found = sample(first=0.2, last=1.0, tokens=9, piece_s=[0.2, 0.5, 1.0])
    assert inter_token_s(found) == pytest.approx(0.1)
    summary = summarise([found], 2.0, bounds=Bounds())
    assert summary.completion_tokens == 9
    assert summary.completion_rate == pytest.approx(4.5)
    assert summary.gap.mean == pytest.approx(0.4)


def test_no_time_per_token_where_none_can_be_known():
    assert inter_token_s(sample(tokens=1)) is None
    assert inter_token_s(sample(piece_s=[0.5])) is None  # all together
    assert inter_token_s(sample(piece_s=[])) == pytest.approx(0.1)  # offline: there are no pieces
    assert inter_token_s(sample(first_s=None, latency_s=None)) is None


def test_a_level():
    samples = [
        sample(0, first=0.1, last=0.5),
        sample(1, first=0.3, last=0.7, cached_tokens=4),
        sample(2, first=0.2, last=0.6, completion_tokens=4, due_s=-0.25, start_s=0.0),
        sample(3, error="http_429", piece_s=[]),
        sample(4, error="http_429", piece_s=[]),
        sample(5, error="dropped", first=9.0, last=9.5),
    ]
    summary = summarise(samples, 2.0, bounds=Bounds(), unfinished=3, client_s=0.5)
    assert (summary.requests, summary.ok, summary.unfinished) == (6, 3, 3)
    assert summary.errors == {"http_429": 2, "dropped": 1}
    assert (summary.prompt_tokens, summary.completion_tokens) == (30, 14)
    assert (summary.cached_tokens, summary.short) == (4, 1)
    assert summary.request_rate == pytest.approx(1.5)
    assert summary.completion_rate == pytest.approx(7.0)
    assert summary.total_rate == pytest.approx(22.0)
    assert summary.first_token.mean == pytest.approx(0.2)  # failed ones do not count
    assert summary.latency.p50 == pytest.approx(0.6)
    assert summary.late.p50 == pytest.approx(0.25)
    assert summary.client_load == pytest.approx(0.25)
    assert summary.goodput is None


def test_goodput_wants_every_bound_kept():
    quick, slow_start = sample(first=0.1, last=0.5), sample(first=0.4, last=0.8)
    stutter = sample(first=0.1, last=0.9)
    samples = [quick, slow_start, stutter, sample(error="timeout")]

    def good(**bounds):
        return summarise(samples, 1.0, bounds=Bounds(**bounds)).goodput

    assert good(first_token_ms=100) == 2.0
    assert good(inter_token_ms=101) == 2.0
    assert good(latency_ms=800) == 2.0
    assert good(first_token_ms=100, inter_token_ms=101) == 1.0
    assert good(latency_ms=1) == 0.0
    assert is_good(sample(tokens=1), Bounds(inter_token_ms=1e-9))


def test_an_empty_level():
    summary = summarise([], 0.0, bounds=Bounds(latency_ms=1))
    assert summary.first_token is None
    assert summary.gap is None
    assert summary.request_rate == 0.0
    assert summary.goodput == 0.0
