"""Metrics: names that dashboards expect, counting on engine events, totals over restarts."""

import random
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.fake_client import FakeClient, ask, fake_info
from tiercel.ipc.messages import EngineStats
from tiercel.serve.http.metrics import EngineGauges, FinishedRequest, Metrics

# As vLLM's dashboards and autoscalers ask for them.
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
COUNTERS = [
    "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
    "num_preemptions", "request_success", "nonfinite_logits", "engine_restarts",
    "requests_rejected", "client_disconnects", "template_kills", "gpu_step_seconds",
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
    "score_items", "score_tiles_skipped",
]  # fmt: skip
HISTOGRAMS = [
    "time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_params_n", "request_params_max_tokens", "iteration_tokens_total",
]  # fmt: skip
DONE = FinishedRequest(
    finish_reasons=("stop", "length"),
    num_prompt_tokens=10,
    num_generation_tokens=(5, 9),
    n=2,
    max_tokens=16,
    total_s=2.0,
    queue_s=0.25,
    prefill_s=0.5,
    decode_s=0.8,
)


def render(metrics, **changes):
    num_kills = changes.pop("num_template_kills", 0)
    return metrics.render([EngineGauges(**changes)], num_kills).decode()


def read(text):
    """{(name, labels without the common ones): value}."""
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("engine") == "0"
            labels.pop("model_name")
            name = sample.name.removeprefix("tiercel:")
            values[(name, *sorted(labels.items()))] = sample.value
    return values


def test_all_names_are_there():
    families = {f.name: f.type for f in text_string_to_metric_families(render(Metrics()))}
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names:
            assert families[f"tiercel:{name}"] == kind, name
    assert families["tiercel:cache_config_info"] == "gauge"


def test_another_prefix():
    text = render(Metrics("vllm"))
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert names
    assert all(name.startswith("vllm:") for name in names)


def test_labels_come_with_the_model():
    metrics = Metrics()
    assert 'model_name=""' in render(metrics)
    metrics.set_model("a model", fake_info())
    text = render(metrics)
    assert 'tiercel:num_requests_running{engine="0",model_name="a model"} 0.0' in text
    assert 'block_size="16"' in text
    assert 'num_gpu_blocks="129"' in text


def test_gauges_are_read_when_asked():
    metrics = Metrics()
    metrics.take_stats(EngineStats(kv_cache_usage=0.5))
    values = read(render(metrics, num_running=3, num_waiting=7))
    assert values[("num_requests_running",)] == 3
    assert values[("num_requests_waiting",)] == 7
    assert values[("kv_cache_usage_perc",)] == 0.5
    assert read(render(metrics))[("num_requests_running",)] == 0


def test_engine_totals_grow_over_restarts():
    metrics = Metrics()
    metrics.take_stats(EngineStats(num_steps=2, num_prompt_tokens=10, prefix_queries=10))
    metrics.take_stats(
        EngineStats(num_steps=5, num_prompt_tokens=25, prefix_queries=25, prefix_hits=4)
    )
    metrics.forget_engine()
    metrics.take_stats(EngineStats(num_steps=9, num_prompt_tokens=3, num_nonfinite=1))
    values = read(render(metrics, num_restarts=1))
    assert values[("prompt_tokens_total",)] == 28
    assert values[("prefix_cache_queries_total",)] == 25
    assert values[("prefix_cache_hits_total",)] == 4
    assert values[("engine_steps_total",)] == 14
    assert values[("nonfinite_logits_total",)] == 1
    assert values[("engine_restarts_total",)] == 1


def test_a_restart_that_was_not_told_is_seen_in_the_totals():
    metrics = Metrics()
    metrics.take_stats(EngineStats(num_steps=5, num_generation_tokens=25))
    metrics.take_stats(EngineStats(num_steps=1, num_generation_tokens=2))
    assert read(render(metrics))[("generation_tokens_total",)] == 27


def test_steps_are_observed_once_each():
    metrics = Metrics()
    metrics.take_stats(EngineStats(num_steps=3, iteration_tokens=(1, 8, 600)))
    values = read(render(metrics))
    assert values[("iteration_tokens_total_count",)] == 3
    assert values[("iteration_tokens_total_sum",)] == 609
    assert values[("iteration_tokens_total_bucket", ("le", "8.0"))] == 2


def test_a_finished_request():
    metrics = Metrics()
    metrics.count_finished(DONE)
    values = read(render(metrics))
    assert values[("request_success_total", ("finished_reason", "stop"))] == 1
    assert values[("request_success_total", ("finished_reason", "length"))] == 1
    assert values[("e2e_request_latency_seconds_sum",)] == 2.0
    assert values[("request_queue_time_seconds_sum",)] == 0.25
    assert values[("request_prefill_time_seconds_sum",)] == 0.5
    assert values[("request_inference_time_seconds_sum",)] == pytest.approx(1.3)
    assert values[("request_time_per_output_token_seconds_sum",)] == pytest.approx(0.1)
    assert values[("request_prompt_tokens_sum",)] == 10
    assert values[("request_generation_tokens_sum",)] == 14
    assert values[("request_generation_tokens_count",)] == 2
    assert values[("request_params_n_sum",)] == 2


def test_tokens_of_one_step_share_its_time():
    metrics = Metrics()
    metrics.observe_first_token(0.05)
    metrics.observe_tokens(4, 0.02)
    values = read(render(metrics))
    assert values[("time_to_first_token_seconds_count",)] == 1
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert values[(f"{name}_count",)] == 4
        assert values[(f"{name}_sum",)] == pytest.approx(0.02)
        assert values[(f"{name}_bucket", ("le", "0.005"))] == 4


@pytest.mark.reliability
def test_labels_hold_nothing_from_clients():
    paths = [f"/v1/models/x{i}" for i in range(20)]
    *_, metrics = ask(
        *[("GET", path) for path in paths],
        *[(f"M{i}", "/health") for i in range(20)],
        ("POST", "/tokenize", {"json": {"prompt": 1, "secret-field": 2}}),
        ("GET", "/metrics"),
    )
    values = read(metrics.text)
    rejected = {
        key[1][1]: value for key, value in values.items() if key[0] == "requests_rejected_total"
    }
    assert rejected["model_not_found"] == 20
    assert rejected["invalid_request"] == 1
    assert len(rejected) <= 4
    assert "secret-field" not in metrics.text
    assert "/v1/models/x1" not in metrics.text


def test_two_applications_do_not_share_counters():
    for _ in range(2):
        *_, metrics = ask(("GET", "/nowhere"), ("GET", "/metrics"))
        rejected = read(metrics.text)[("requests_rejected_total", ("reason", "not_found"))]
        assert rejected == 1


def test_requests_of_clients_are_counted():
    client = FakeClient()
    body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2}
    *_, metrics = ask(
        ("POST", "/v1/completions", {"json": body}), ("GET", "/metrics"), client=client
    )
    values = read(metrics.text)
    assert values[("request_success_total", ("finished_reason", "length"))] == 2
    assert values[("time_to_first_token_seconds_count",)] == 2
    assert values[("request_params_max_tokens_sum",)] == 2


# --- Every counter, against sums over random messages --------------------------------------------

TOTALS = {  # name in the metrics: field of the message
    "prompt_tokens": "num_prompt_tokens",
    "generation_tokens": "num_generation_tokens",
    "prefix_cache_queries": "prefix_queries",
    "prefix_cache_hits": "prefix_hits",
    "num_preemptions": "num_preemptions",
    "nonfinite_logits": "num_nonfinite",
    "engine_steps": "num_steps",
    "gpu_step_seconds": "step_seconds",
    "spec_decode_num_drafts": "num_drafts",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
}


@pytest.mark.parametrize("seed", range(8))
def test_totals_are_the_sums_of_what_each_engine_counted(seed):
    """Messages of several engines, one after the other; each counts from zero."""
    rng = random.Random(seed)
    metrics, sums, per_position, steps = Metrics(), dict.fromkeys(TOTALS, 0), [0] * 4, []
    num_restarts = rng.randint(0, 3)
    for _ in range(1 + num_restarts):
        now = dict.fromkeys(TOTALS.values(), 0)
        positions = [0] * rng.randint(0, 4)
        for _ in range(rng.randint(1, 4)):
            for name, field in TOTALS.items():
                growth = rng.randint(1, 9) if name == "engine_steps" else rng.randint(0, 50)
                now[field] += growth
                sums[name] += growth
            for place in range(len(positions)):
                growth = rng.randint(0, 3)
                positions[place] += growth
                per_position[place] += growth
            tokens = tuple(rng.randint(1, 3000) for _ in range(rng.randint(0, 3)))
            steps += tokens
            now["accepted_per_pos"] = tuple(positions)
            metrics.take_stats(EngineStats(**now, iteration_tokens=tokens))
            if rng.random() < 0.3:  # a message that brings nothing new
                metrics.take_stats(EngineStats(**now))
        metrics.forget_engine()
    values = read(render(metrics, num_restarts=num_restarts))
    assert {name: values[(f"{name}_total",)] for name in TOTALS} == sums
    assert values[("spec_decode_num_accepted_tokens_total",)] == sum(per_position)
    for place, count in enumerate(per_position):
        key = ("spec_decode_num_accepted_tokens_per_pos_total", ("position", str(place)))
        assert values.get(key, 0) == count
    assert values[("iteration_tokens_total_sum",)] == sum(steps)
    assert values[("iteration_tokens_total_count",)] == len(steps)
    assert values[("engine_restarts_total",)] == num_restarts


@pytest.mark.parametrize("seed", range(8))
def test_requests_add_up(seed):
    rng = random.Random(seed)
    metrics = Metrics()
    seen = {}

    def observe(name, value):
        seen[f"{name}_sum"] = seen.get(f"{name}_sum", 0) + value
        seen[f"{name}_count"] = seen.get(f"{name}_count", 0) + 1

    reasons = []
    for _ in range(rng.randint(1, 6)):
        n = rng.randint(1, 3)
        queue, prefill, decode = (rng.choice([None, rng.uniform(0, 3)]) for _ in range(3))
        request = FinishedRequest(
            finish_reasons=tuple(rng.choices(["stop", "length", "abort"], k=n)),
            num_prompt_tokens=rng.randint(1, 500),
            num_generation_tokens=tuple(rng.randint(0, 40) for _ in range(n)),
            n=n, max_tokens=rng.randint(1, 99), total_s=rng.uniform(0, 9),
            queue_s=queue, prefill_s=prefill, decode_s=decode,
        )  # fmt: skip
        metrics.count_finished(request)
        reasons += request.finish_reasons
        observe("request_prompt_tokens", request.num_prompt_tokens)
        observe("request_params_n", n)
        observe("request_params_max_tokens", request.max_tokens)
        observe("e2e_request_latency_seconds", request.total_s)
        for count in request.num_generation_tokens:
            observe("request_generation_tokens", count)
        for name, seconds in (("queue", queue), ("prefill", prefill), ("decode", decode)):
            if seconds is not None:
                observe(f"request_{name}_time_seconds", seconds)
        if prefill is not None and decode is not None:
            observe("request_inference_time_seconds", prefill + decode)
            longest = max(request.num_generation_tokens)
            if longest > 1:  # steps between the tokens of the longest answer
                observe("request_time_per_output_token_seconds", decode / (longest - 1))
    values = read(render(metrics))
    for name, value in seen.items():
        assert values[(name,)] == pytest.approx(value), name
    for reason in ("stop", "length", "abort"):
        key = ("request_success_total", ("finished_reason", reason))
        assert values.get(key, 0) == reasons.count(reason)


def test_what_happens_at_the_door_is_counted_apart():
    metrics = Metrics()
    metrics.count_unknown_fields(3)
    metrics.count_unknown_fields(2)
    for _ in range(4):
        metrics.count_disconnect()
    metrics.count_score_items(7, 11)
    metrics.count_score_items(1, 2)
    for code in ("queue_full", "queue_full", "not_found", "made_up", "invented"):
        metrics.count_rejected(code)
    for kills, restarts in ((1, 0), (3, 2), (3, 2), (9, 5)):
        values = read(render(metrics, num_template_kills=kills, num_restarts=restarts))
        assert values[("template_kills_total",)] == kills
        assert values[("engine_restarts_total",)] == restarts
    assert values[("unknown_fields_total",)] == 5
    assert values[("client_disconnects_total",)] == 4
    assert values[("score_items_total",)] == 8
    assert values[("score_tiles_skipped_total",)] == 13
    for reason, count in (("queue_full", 2), ("not_found", 1), ("other", 2)):
        assert values[("requests_rejected_total", ("reason", reason))] == count
