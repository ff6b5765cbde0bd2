"""A whole measurement of a scripted server: counts, times, loads, prompts, refusals."""

import asyncio
from statistics import mean
from time import perf_counter

import pytest

from tests.bench.stand_in import StandIn
from tests.loopback import served
from tests.patience import PATIENCE_S
from tiercel.bench.completions import Completion
from tiercel.bench.http_client import HttpClient, parse_address
from tiercel.bench.serve import Plan, measure_server
from tiercel.bench.statistics import Bounds
from tiercel.bench.workload import Lengths, Workload
from tiercel.errors import BenchError

SHAPE = Workload(Lengths(20, 40), Lengths(3, 6), seed=5, token_ids=Lengths(100, 200))


class Place:
    """One started server; each test installs its own stand-in."""

    async def __call__(self, scope, receive, send):
        await self.server(scope, receive, send)


@pytest.fixture(scope="module")
def place():
    place = Place()
    with served(place) as place.address:
        yield place


@pytest.fixture
def server(place):
    place.server = StandIn()
    place.server.address = place.address
    return place.server


def run(server, *, timeout_s=PATIENCE_S, cancel_when=None, notes=None, api_key=None, **plan):
    """Measure the server; `cancel_when` says when the measurement is interrupted."""
    fields = {
        "model": None,
        "workload": SHAPE,
        "requests": None,
        "concurrency": (),
        "rates": (),
        "num_requests": 8,
        "num_warm_up": 0,
        "has_words": False,
        "bounds": Bounds(),
    }

    async def main():
        client = HttpClient(parse_address(server.address), api_key=api_key, timeout_s=timeout_s)
        lines = notes if notes is not None else []
        task = asyncio.ensure_future(
            measure_server(client, Plan(**(fields | plan)), lines.append, lambda *_: None)
        )
        try:
            while cancel_when is not None and not task.done():
                await asyncio.sleep(0.005)
                if cancel_when():
                    task.cancel()
                    break
            return await task
        finally:
            client.close()

    return asyncio.run(main())


def measured_bodies(server, count):
    return server.bodies[-count:]


def test_counts_and_lengths(server):
    measured = run(server, concurrency=[3])
    (level,) = measured.levels
    assert measured.model == "stand-in"
    assert measured.target == {
        "url": server.address,
        "owned_by": "nobody",
        "max_model_len": "99",
        "server": "uvicorn",
        "version": "1.5",
    }
    bodies = measured_bodies(server, 8)
    assert {body["model"] for body in bodies} == {"stand-in"}
    assert all(20 <= len(body["prompt"]) <= 40 for body in bodies)
    assert level.summary.ok == level.summary.requests == 8
    assert level.summary.prompt_tokens == sum(len(body["prompt"]) for body in bodies)
    assert level.summary.completion_tokens == sum(body["max_tokens"] for body in bodies)
    assert level.summary.short == 0
    assert [sample.index for sample in level.samples] == list(range(8))
    assert not measured.is_partial


def test_times_are_those_of_the_server(server):
    server.first_s, server.gap_s = 0.06, 0.02
    shape = Workload(Lengths(5, 5), Lengths(4, 4), token_ids=Lengths(1, 9))
    began_s = perf_counter()
    (level,) = run(server, workload=shape, concurrency=[4]).levels
    took_s = perf_counter() - began_s
    summary = level.summary
    # A sleep never ends early; how late it ends depends on the machine, so times bound each other.
    for sample in level.samples:
        assert 0.06 <= sample.first_s <= sample.latency_s - 0.03
        assert 0.12 <= sample.latency_s <= summary.duration_s
    assert min(sample.first_s for sample in level.samples) <= summary.first_token.p50
    assert summary.inter_token.mean == pytest.approx(
        mean((sample.latency_s - sample.first_s) / 3 for sample in level.samples)
    )
    assert 0 < summary.gap.p50 <= max(sample.latency_s for sample in level.samples)
    assert summary.latency.p99 >= summary.latency.p90 >= summary.latency.p50
    assert 0.24 <= summary.duration_s <= took_s  # two rounds of four
    assert summary.completion_rate == pytest.approx(32 / summary.duration_s)
    assert summary.request_rate == pytest.approx(8 / summary.duration_s)


def test_pieces_of_several_tokens_do_not_change_the_count(server):
    server.piece_tokens, server.gap_s = 4, 0.03
    shape = Workload(Lengths(5, 5), Lengths(10, 10), token_ids=Lengths(1, 9))
    (level,) = run(server, workload=shape, concurrency=[1], num_requests=2).levels
    assert level.summary.completion_tokens == 20
    assert all(1 <= len(sample.piece_s) <= 3 for sample in level.samples)  # some may come together
    rates = [(sample.latency_s - sample.first_s) / 9 for sample in level.samples]
    assert level.summary.inter_token.mean == pytest.approx(mean(rates))


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_a_closed_loop_keeps_so_many_under_way(server, concurrency):
    server.first_s, server.crowd = 0.03, concurrency
    run(server, concurrency=[concurrency], num_requests=12)
    assert server.most_running == concurrency


def test_an_open_loop_sends_on_time_whatever_the_server_does(server):
    server.crowd = 6  # it answers none before
    measured = run(server, rates=[50.0], num_requests=10)
    (level,) = measured.levels
    assert server.most_running >= 6
    due = [sample.due_s for sample in level.samples]
    assert due == sorted(due)
    assert all(sample.start_s >= sample.due_s for sample in level.samples)
    assert level.load.rate == 50.0
    again = run(server, rates=[50.0], num_requests=10)
    assert [sample.due_s for sample in again.levels[0].samples] == due


def test_levels_have_the_same_lengths_and_other_prompts(server):
    measured = run(server, concurrency=[1, 4], rates=[200.0], num_requests=6)
    assert [level.load.name for level in measured.levels] == ["1 at once", "4 at once", "200/s"]
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts) == 1 + 3 * 6  # one request probes for ids
    lengths = [sorted(map(len, prompts[i : i + 6])) for i in (1, 7, 13)]
    assert lengths[0] == lengths[1] == lengths[2]


def test_the_warm_up_does_not_count(server):
    measured = run(server, concurrency=[2], num_warm_up=5)
    assert len(server.bodies) == 1 + 5 + 8
    assert measured.levels[0].summary.requests == 8
    server.bodies.clear()
    run(server, concurrency=[3], num_warm_up=None)
    assert len(server.bodies) == 1 + 3 + 8


def test_a_server_without_ids_gets_words_of_the_right_length(server):
    server.takes_ids = False
    server.words_per = (2, 1.25)
    notes = []
    measured = run(server, concurrency=[2], notes=notes)
    assert "takes no token ids" in notes[0]
    assert "prompt must be a string" in notes[0]
    assert measured.workload.token_ids is None  # the result says so
    words = [len(body["prompt"].split()) for body in measured_bodies(server, 8)]
    assert all(abs(2 + 1.25 * count - 30) <= 11 for count in words)
    assert 8 * 20 - 8 <= measured.levels[0].summary.prompt_tokens <= 8 * 40 + 8
    assert run(server, concurrency=[1], has_words=True).workload.token_ids is None


def test_a_count_that_is_not_ours_is_said(server):
    server.extra_tokens = 1
    notes = []
    run(server, concurrency=[1], notes=notes)
    assert notes == ["The server counts 25 tokens for a prompt of 24."]


def faulty(*prompts):
    """A workload from a file whose prompts name faults of the stand-in."""
    requests = [Completion("fine", 2), *(Completion(prompt, 3) for prompt in prompts)]
    return {
        "workload": Workload(None, Lengths(2, 2)),
        "requests": requests,
        "num_requests": len(requests),
        "concurrency": [4],
    }


def test_errors_are_counted_by_kind(server):
    faults = {
        "429": "http_429",
        "503": "http_503",
        "drop": "dropped",
        "garbage": "bad_answer",
        "no_choices": "bad_answer",
        "error_event": "stream_error",
        "no_done": "dropped",
        "no_usage": "no_usage",
        "silence": "timeout",
        "silence_inside": "timeout",
    }
    (level,) = run(server, timeout_s=2.0, **faulty(*faults, "429")).levels
    found = {fault: sample.error for fault, sample in zip(faults, level.samples[1:], strict=False)}
    assert found == faults
    assert level.samples[0].error is None
    assert level.summary.errors == {
        "http_429": 2,
        "dropped": 2,
        "bad_answer": 2,
        "timeout": 2,
        "http_503": 1,
        "stream_error": 1,
        "no_usage": 1,
    }
    assert level.summary.ok == 1
    assert level.summary.completion_tokens == 2
    details = {sample.error: sample.detail for sample in level.samples}
    assert details["http_429"] == "429 it is"
    assert details["stream_error"] == "the engine died"


def test_short_answers_and_cached_prompts_are_seen(server):
    server.missing_tokens, server.cached = 1, 7
    (level,) = run(server, concurrency=[2]).levels
    assert level.summary.short == 8
    assert level.summary.cached_tokens == 56


def test_goodput(server):
    server.first_s = 0.05
    (level,) = run(server, concurrency=[8], bounds=Bounds(first_token_ms=10)).levels
    assert level.summary.goodput == 0.0
    (level,) = run(server, concurrency=[8], bounds=Bounds(first_token_ms=10_000)).levels
    assert level.summary.goodput == level.summary.request_rate > 0


def test_nothing_answers_at_all(server):
    server.first_s = 10.0
    with pytest.raises(BenchError, match=r"request failed: timeout: nothing came for 1 s"):
        run(server, concurrency=[1], timeout_s=1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"models": []}, "has no model 'at all'"),
        ({"models": None}, "is not a list of models"),
        ({"models": [{"name": "x"}]}, "is not a list of models"),
    ],
)
def test_servers_that_cannot_be_measured(server, change, words):
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(BenchError, match=words):
        run(server, concurrency=[1])


def test_names_and_keys(server):
    assert run(server, concurrency=[1], model="b").model == "b"
    assert server.bodies[-1]["model"] == "b"
    with pytest.raises(BenchError, match="has no model 'c'") as caught:
        run(server, concurrency=[1], model="c")
    assert "It has stand-in, b." in caught.value.hint
    with pytest.raises(BenchError, match="answered HTTP 401"):
        run(server, concurrency=[1], api_key="wrong")


def test_nobody_listens(server):
    server.address = "http://127.0.0.1:9"
    with pytest.raises(BenchError, match="/v1/models: connect: "):
        run(server, concurrency=[1])


def test_every_first_request_refused_ends_it_at_once(server):
    plan = faulty("503")
    plan["requests"] = plan["requests"][1:]
    with pytest.raises(BenchError, match="http_503: 503 it is"):
        run(server, **plan)


def test_a_warm_up_that_fails_as_a_whole_ends_it(server):
    server.refuse_from = 2  # the request that probes for ids is answered
    with pytest.raises(BenchError, match="http_503: 503 it is"):
        run(server, concurrency=[2], num_warm_up=3)
    assert len(server.bodies) == 4


def test_a_slow_answer_is_no_silent_one(server):
    server.gap_s = 0.2
    shape = Workload(Lengths(5, 5), Lengths(8, 8), token_ids=Lengths(1, 9))
    (level,) = run(server, workload=shape, concurrency=[2], num_requests=2, timeout_s=1.0).levels
    assert level.summary.ok == 2
    assert level.summary.latency.p50 > 1.0


def test_an_interruption_keeps_what_has_come(server):
    server.first_s = 0.05
    enough = 1 + 4 + 12  # the request that probes, the warm-up, some of the first level
    measured = run(
        server, concurrency=[4, 8], num_requests=1000, num_warm_up=None,
        cancel_when=lambda: len(server.bodies) >= enough,
    )  # fmt: skip
    assert measured.is_partial
    (level,) = measured.levels
    assert 0 < level.summary.ok < 1000
    assert 0 < level.summary.unfinished <= 4
    assert level.summary.errors == {}
    assert level.summary.duration_s >= 0.1


def test_an_interruption_in_a_later_warm_up_keeps_the_levels_before(server):
    server.first_s = 0.02
    requests = [Completion("fine", 2)] * 4 + [Completion("silence", 2)]
    plan = faulty()
    plan |= {"requests": requests, "num_requests": 4, "concurrency": [4, 5], "num_warm_up": None}
    measured = run(
        server, cancel_when=lambda: server.bodies[-1:] and server.bodies[-1]["prompt"] == "silence",
        **plan,
    )  # fmt: skip
    assert [level.summary.ok for level in measured.levels] == [4]
    assert measured.is_partial


@pytest.mark.parametrize("num_asked", [1, 3], ids=["first request", "warm-up"])
def test_an_interruption_before_anything_was_measured_is_one(server, num_asked):
    server.first_s = 0.3

    def is_time():
        return len(server.bodies) >= num_asked

    with pytest.raises(asyncio.CancelledError):
        run(server, concurrency=[1], num_warm_up=100, cancel_when=is_time)
