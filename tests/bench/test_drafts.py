"""Acceptance of draft tokens: totals of a server's metrics, and the increase in a level."""

import pytest

from tests.serve.http.test_metrics import render
from tiercel.bench.drafts import DraftFigures, read_metrics
from tiercel.ipc.messages import EngineStats
from tiercel.serve.http.metrics import Metrics


def test_the_metrics_of_a_server_are_read():
    metrics = Metrics()
    metrics.take_stats(
        EngineStats(num_steps=9, num_drafts=4, num_draft_tokens=11, accepted_per_pos=(3, 2, 0))
    )
    first = read_metrics(render(metrics))
    assert first == DraftFigures(4, 11, [3, 2, 0])
    metrics.take_stats(
        EngineStats(num_steps=19, num_drafts=6, num_draft_tokens=20, accepted_per_pos=(4, 3, 1, 1))
    )
    added = read_metrics(render(metrics)).since(first)
    assert added == DraftFigures(2, 9, [1, 1, 1, 1])
    assert added.acceptance == pytest.approx(4 / 9)
    assert added.place_rates() == [0.5] * 4


def test_counters_go_on_when_the_engine_is_started_again():
    metrics = Metrics()
    metrics.take_stats(EngineStats(num_steps=9, num_draft_tokens=5, accepted_per_pos=(3,)))
    metrics.forget_engine()
    metrics.take_stats(EngineStats(num_steps=2, num_draft_tokens=4, accepted_per_pos=(2, 1)))
    assert read_metrics(render(metrics)) == DraftFigures(0, 9, [5, 1])


@pytest.mark.parametrize("text", ["", "nothing\n", "x:other_total{} 3\n"])
def test_a_server_that_counts_no_guesses(text):
    assert read_metrics(text) is None


def test_the_names_of_another_engine():
    text = (
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 7.0\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 2.1e+01\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 3.0\n'
    )
    assert read_metrics(text) == DraftFigures(7, 21, [6, 0, 3])


def test_no_guesses_have_no_share():
    assert DraftFigures(0, 0, []).acceptance is None
