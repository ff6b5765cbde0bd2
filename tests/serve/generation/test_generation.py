"""The one path: admission, pieces, slow readers, clients that leave, engines that die."""

import asyncio
import json
import logging
import socket
import threading

import pytest

from tests.patience import PATIENCE_S, wait_for
from tests.serve.events import read_chat, read_events, says, updates
from tests.serve.fake_client import FakeClient, ask, fake_info, fake_state, fake_tokenizer
from tests.serve.thread_server import is_healthy, thread_server
from tiercel.errors import EngineDeadError, InternalError
from tiercel.params import Limits, SamplingParams
from tiercel.request.request import TokenUpdate
from tiercel.serve.api import streaming_response
from tiercel.serve.generation import output_queue as module
from tiercel.serve.generation.generation import Generation, GenerationRequest
from tiercel.serve.lifecycle.engine_monitor import make_model

pytestmark = pytest.mark.reliability

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
RAW = {"model": "tiny", "prompt": "the thin"}
LEFT = 'tiercel:client_disconnects_total{engine="0",model_name="tiny"} 1.0'  # in metrics
# The end of a connection is noticed within 100 ms; the rest is for a busy machine.


class QueuedClient(FakeClient):
    """No request ever leaves the queue."""

    def submit(self, request):
        stream = super().submit(request)
        stream.entered_s = None
        return stream


def user(text):
    return [{"role": "user", "content": text}]


def post(body, path="/v1/chat/completions", client=None, **settings):
    return ask(("POST", path, {"json": body}), client=client, **settings)[0]


def scripted(*steps):
    client = FakeClient()
    client.script = lambda request: list(steps)
    return client


def answering(text, **options):
    client = FakeClient()
    client.script = says(text, **options)
    return client


def error_of(response):
    return response.json()["error"]


# What an answer holds, plain and streamed


TEXTS = [
    "👩‍👩‍👧‍👦 e\u0301 שלום \u202eabc \uffff \U0010fffd",
    "\x00\x01\t\r\n\u2028\u0085data: x\n\ndata: [DONE]",
    "日本語\n\n",
    "",
]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
@pytest.mark.parametrize("group", [1, 3, 64])
def test_pieces_joined_equal_the_plain_answer(text, group):
    """B1, B5."""
    plain = post(CHAT, client=answering(text, group=group)).json()
    stream = post({**CHAT, "stream": True}, client=answering(text, group=group))
    choices, _, _ = read_chat(stream.content)
    assert choices[0].content == plain["choices"][0]["message"]["content"] == text
    assert choices[0].finish_reasons == ["stop"]


def test_a_character_cut_at_max_tokens_is_shown_once():
    """B2: the replacement comes at the end only."""
    ids = fake_tokenizer().encode("a😀")[:4]
    client = answering(ids, reason="length")
    choices, _, chunks = read_chat(post({**CHAT, "stream": True}, client=client).content)
    assert choices[0].content == "a\N{REPLACEMENT CHARACTER}"
    pieces = [c["choices"][0]["delta"].get("content") for c in chunks]
    assert pieces == ["", "a", "\N{REPLACEMENT CHARACTER}", None]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_inside_a_step_cuts_text_counts_and_logprobs(is_stream):
    """B4: a step may bring several tokens; those after the match never were."""
    body = {**CHAT, "stop": ["wo th"], "logprobs": True, "return_token_ids": True}
    client = FakeClient()
    steps = says("one two three four", group=7)
    client.script = lambda request: [*steps(request)[:-1], 30.0]  # it would go on and on
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = post(body, client=client)
    if is_stream:
        choices, usage, _ = read_chat(response.content)
        joined = choices[0]
        text, logprobs, ids = joined.content, joined.logprobs, joined.token_ids
        reason, stop_reason = joined.finish_reasons[0], joined.stop_reason
    else:
        choice, usage = response.json()["choices"][0], response.json()["usage"]
        text, logprobs = choice["message"]["content"], choice["logprobs"]["content"]
        reason, stop_reason = choice["finish_reason"], choice["stop_reason"]
        ids = choice["token_ids"]
    assert (text, reason, stop_reason) == ("one t", "stop", "wo th")
    expected = fake_tokenizer().encode("one two th")
    # ` th` may be one token with the `e`: the match ends inside it.
    assert fake_tokenizer().decode(ids).startswith("one two th")
    assert len(ids) == len(logprobs) == usage["completion_tokens"] <= len(expected) + 1
    assert [request for request, _ in client.stopped] == client.submitted


def test_answers_come_in_any_order_and_keep_their_index():
    client = FakeClient()
    client.script = lambda r: [0.02 * (3 - r.stream), *says(f"nr {r.stream}")(r)]
    plain = post({**CHAT, "n": 3}, client=client).json()
    assert [c["message"]["content"] for c in plain["choices"]] == ["nr 0", "nr 1", "nr 2"]
    choices, _, chunks = read_chat(post({**CHAT, "n": 3, "stream": True}, client=client).content)
    assert {i: choices[i].content for i in choices} == {0: "nr 0", 1: "nr 1", 2: "nr 2"}
    assert chunks[0]["choices"][0]["index"] == 2
    assert all(choices[i].finish_reasons == ["stop"] for i in choices)


def test_answers_of_one_seed_are_told_apart_by_their_stream():
    client = FakeClient()
    post({**CHAT, "n": 3, "seed": 7}, client=client)
    assert [(r.seed, r.stream) for r in client.submitted] == [(7, 0), (7, 1), (7, 2)]


# Admission


def test_prompts_times_n_are_bounded():
    body = {**RAW, "prompt": ["a"] * 3, "n": 2}
    for limits, message in (
        (Limits(max_prompts=2), "3 prompts"),
        (Limits(max_n=1), "n=2"),
        (Limits(max_answers=5), "6 answers"),
    ):
        client = FakeClient()
        response = post(body, "/v1/completions", client, limits=limits)
        assert response.status_code == 400
        assert message in error_of(response)["message"]
        assert client.submitted == []


def test_what_never_fits_the_cache_is_refused_at_once():
    """A20: 16 answers of 240 tokens do not fit 2,048 tokens of cache."""
    client = FakeClient()
    response = post({**RAW, "n": 16, "max_tokens": 240}, "/v1/completions", client)
    assert response.status_code == 400
    assert error_of(response)["param"] == "n"
    assert "2048" in error_of(response)["message"]
    assert post({**RAW, "n": 4, "max_tokens": 240}, "/v1/completions").status_code == 200
    # Without a number an answer takes what is left, which is never too much.
    assert post({**CHAT, "n": 16}).status_code == 200
    assert client.submitted == []


def test_more_answers_than_are_ever_queued_are_refused_for_good():
    limits = Limits(max_waiting_requests=4)
    client = FakeClient(max_waiting=4)
    body = {**RAW, "prompt": ["a"] * 13}
    response = post(body, "/v1/completions", client, limits=limits)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_request")


def test_a_full_queue_takes_all_answers_or_none():
    """E1: refused in one go, with the time to come back."""
    client = FakeClient(max_waiting=3)
    response = post({**CHAT, "n": 4}, client=client)
    assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
    assert error_of(response)["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) == 7
    assert client.submitted == []
    assert post({**CHAT, "n": 3}, client=FakeClient(max_waiting=3)).status_code == 200


def test_a_client_that_refuses_half_way_gets_everything_back():
    """The queue may fill between two requests of one call."""
    client = FakeClient()
    original, left = client.submit, [2]

    def submit(request):
        if not left[0]:
            raise EngineDeadError("gone")
        left[0] -= 1
        return original(request)

    client.submit = submit
    response = post({**CHAT, "n": 3}, client=client)
    assert response.status_code == 503
    assert client.aborted == client.submitted
    assert client.num_running == 0


def test_a_prompt_that_is_too_long_names_both_numbers():
    """A18: by one token, and by ten million characters without tokenizing them."""
    ids = [97] * 256
    response = post({**RAW, "prompt": ids}, "/v1/completions")
    assert error_of(response)["code"] == "context_length_exceeded"
    assert error_of(response)["message"].split().count("256") == 2
    assert post({**RAW, "prompt": ids[1:]}, "/v1/completions").status_code == 200
    long = "a" * 10_000_000
    for body, path, param in (
        ({**RAW, "prompt": long}, "/v1/completions", "prompt"),
        ({**CHAT, "messages": user(long)}, "/v1/chat/completions", "messages"),
        ({"model": "tiny", "input": long}, "/v1/responses", "input"),
    ):
        error = error_of(post(body, path))
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "10000000" in error["message"]


def test_priority_needs_the_setting():
    body = {**CHAT, "priority": -3}
    assert error_of(post(body))["param"] == "priority"
    client = FakeClient()
    assert post(body, client=client, has_priority_field=True).status_code == 200
    assert client.submitted[0].priority == -3


# Ends that are no answers


ENDINGS = [
    ("nonfinite_logits", 500, "server_error"),
    ("no_valid_token", 400, "invalid_request_error"),
    ("schema_too_complex", 400, "invalid_request_error"),
    ("something_else", 500, "server_error"),
]


@pytest.mark.parametrize(("reason", "status", "kind"), ENDINGS)
def test_a_fault_of_one_request(reason, status, kind):
    """P12: no answer is made of it, and a stream breaks off without [DONE]."""
    steps = [*updates("ab")[:2], TokenUpdate((), (), "error", reason)]
    response = post(CHAT, client=scripted(*steps))
    assert response.status_code == status
    assert (error_of(response)["type"], error_of(response)["code"]) == (kind, reason)
    events = read_events(post({**CHAT, "stream": True}, client=scripted(*steps)).content)
    assert events[-1][1]["error"]["code"] == reason
    assert ("", "[DONE]") not in events
    assert "".join(e["choices"][0]["delta"].get("content", "") for _, e in events[:-1]) == "ab"


def test_the_fault_of_one_answer_ends_the_others():
    client = FakeClient()
    client.script = lambda request: (
        [0.01, TokenUpdate((), (), "error", "nonfinite_logits")]
        if request.stream == 1
        else [60.0, *updates("late")]
    )
    assert post({**CHAT, "n": 3}, client=client).status_code == 500
    assert {r.stream for r in client.aborted} == {0, 2}


def test_a_dead_engine_is_503_or_an_event():
    """P11."""
    dead = EngineDeadError("the engine ended under this request.")
    response = post(CHAT, client=scripted(*updates("ab")[:2], dead))
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_restarting")
    assert error_of(response)["type"] == "overloaded_error"
    events = read_events(post({**CHAT, "stream": True}, client=scripted(dead)).content)
    assert [value["error"]["code"] for _, value in events] == ["engine_restarting"]


def test_the_end_of_a_drain_is_an_error_not_an_answer():
    aborted = TokenUpdate((), (), "abort", None)
    response = post(CHAT, client=scripted(*updates("ab")[:2], aborted))
    assert (response.status_code, error_of(response)["code"]) == (503, "draining")


def test_a_fault_of_ours_says_nothing_of_us():
    """P6: also in a stream, where the head is sent already."""
    broken = scripted(*updates("ab")[:2], RuntimeError("secret path"))
    response = post({**CHAT, "stream": True}, client=broken)
    events = read_events(response.content)
    assert events[-1][1]["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert "Traceback" not in response.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_waits_only_so_long(is_stream):
    limits = Limits(max_queue_seconds=0.05)
    client = QueuedClient()
    client.script = lambda request: [30.0]
    response = post({**CHAT, "stream": is_stream}, client=client, limits=limits)
    if is_stream:
        assert read_events(response.content)[-1][1]["error"]["code"] == "queue_timeout"
    else:
        assert (response.status_code, error_of(response)["code"]) == (503, "queue_timeout")
        assert 1 <= int(response.headers["retry-after"]) <= 60
    assert client.aborted == client.submitted


def test_a_request_that_runs_does_not_wait():
    client = FakeClient()
    client.script = lambda request: [0.2, *updates("done")]
    assert post(CHAT, client=client, limits=Limits(max_queue_seconds=0.05)).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_has_only_so_long(is_stream):
    client = scripted(*updates("ab")[:1], 30.0)
    limits = Limits(max_request_seconds=0.1)
    response = post({**CHAT, "stream": is_stream}, client=client, limits=limits)
    if is_stream:
        assert read_events(response.content)[-1][1]["error"]["code"] == "request_timeout"
    else:
        assert (response.status_code, error_of(response)["code"]) == (503, "request_timeout")
    assert client.aborted == client.submitted


def test_an_idle_stream_says_that_it_lives(monkeypatch):
    monkeypatch.setattr(streaming_response, "KEEP_ALIVE_SECONDS", 0.03)
    client = scripted(0.2, *updates("ab"))
    response = post({**CHAT, "stream": True}, client=client)
    assert response.text.startswith(": keep-alive\n\n")
    assert read_chat(response.content)[0][0].content == "ab"


# Readers


def make_generation(client, *, is_stream=True, **wanted):
    state = fake_state(client)
    model = make_model(state, fake_info())
    request = GenerationRequest(([97],), SamplingParams(max_tokens=None), **wanted)
    return Generation(state, model, request, is_stream=is_stream)


async def let_all_come(client):
    while client.num_running:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("bound", ["deltas", "chars"])
def test_what_waits_for_a_slow_reader_is_joined(monkeypatch, bound):
    """E4: bounded, and nothing is lost."""
    name = "MAX_QUEUED_DELTAS" if bound == "deltas" else "MAX_QUEUED_CHARS"
    monkeypatch.setattr(module, name, 10)

    async def run():
        client = answering("x" * 200, reason="length")
        generation = make_generation(client)
        generation.start()
        await let_all_come(client)
        first = await generation.next_deltas()
        return first, await generation.next_deltas()

    pieces, rest = asyncio.run(run())
    assert len(pieces) == 10
    assert "".join(e.text for piece in pieces for e in piece.events) == "x" * 200
    assert [piece.num_tokens for piece in pieces] == [*range(1, 10), 200]
    assert [piece.finish_reason for piece in pieces] == [None] * 9 + ["length"]
    assert rest == []


def test_pieces_that_came_before_a_fault_are_given_first():
    async def run():
        client = scripted(*updates("ab")[:2], InternalError("no"))
        generation = make_generation(client)
        generation.start()
        await let_all_come(client)
        pieces = await generation.next_deltas()
        with pytest.raises(InternalError):
            await generation.next_deltas()
        return pieces

    assert "".join(e.text for piece in asyncio.run(run()) for e in piece.events) == "ab"


def raw_post(body, path="/v1/chat/completions"):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "computing", "answering"])
def test_a_client_that_leaves_is_noticed(is_stream, when):
    """E3: the engine is told, wherever the request is."""
    client = QueuedClient() if when == "queued" else FakeClient()
    first = updates("ab")[:1] if when == "answering" else []
    client.script = lambda request: [*first, 60.0]
    with thread_server(client=client) as server:
        with server.connect() as sock:
            sock.sendall(raw_post({**CHAT, "n": 2, "stream": is_stream}))
            wait_for(lambda: len(client.submitted) == 2)
            if is_stream and when == "answering":
                assert b"text/event-stream" in sock.recv(1 << 16)
        wait_for(lambda: len(client.aborted) == 2)
        assert client.num_running == 0
        metrics = server.get("/metrics").text
        assert LEFT in metrics
        assert 'request_success_total{engine="0",finished_reason="abort"' in metrics
        assert is_healthy(server)


def test_a_client_that_leaves_while_its_prompt_is_rendered(monkeypatch):
    """The template may take seconds; nothing is submitted for nobody."""
    from tiercel.serve.generation import prompts

    original = prompts.encode_chat
    begun, may_end, ended = (threading.Event() for _ in range(3))

    def slow(*args, **options):
        begun.set()
        may_end.wait(PATIENCE_S)
        try:
            return original(*args, **options)
        finally:
            ended.set()

    monkeypatch.setattr(prompts, "encode_chat", slow)
    client = FakeClient()
    with thread_server(client=client) as server:
        with server.connect() as sock:
            sock.sendall(raw_post(CHAT))
            assert begun.wait(PATIENCE_S)
        wait_for(lambda: LEFT in server.get("/metrics").text)
        may_end.set()
        assert ended.wait(PATIENCE_S)
        assert is_healthy(server)  # and answers after what the ended prompt would have led to
        assert client.submitted == []


def test_a_reader_that_never_reads_is_given_up():
    """E4: within the time for slow clients; the connection goes and others are unhurt."""
    client = FakeClient()
    some = [TokenUpdate((121,), (), None, None)] * 100
    steps = [step for _ in range(1000) for step in (*some, 0.001)]  # 25 MB of events
    client.script = lambda request: steps
    settings = {"client": client, "slow_client_seconds": 0.5}
    with thread_server(**settings) as server, server.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(raw_post({**CHAT, "stream": True}))
        wait_for(lambda: client.submitted)
        assert is_healthy(server)
        wait_for(lambda: client.aborted)
        assert client.num_running == 0
        assert is_healthy(server)
        assert "client_disconnects_total" in server.get("/metrics").text


# What is counted and logged


def test_the_line_of_the_log_and_the_metrics(caplog):
    with caplog.at_level(logging.INFO, "tiercel.serve.request"):
        replies = ask(
            ("POST", "/v1/completions", {"json": {**RAW, "prompt": "abc", "n": 2}}),
            ("GET", "/metrics"),
            client=answering("xy"),
        )
    line = next(r.fields for r in caplog.records if r.fields.get("path") == "/v1/completions")
    assert (line["status"], line["finish_reason"]) == (200, "stop")
    assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (4, 6, 0)
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"]
    assert "abc" not in str(line)
    metrics = replies[1].text
    for name, value in (
        ('request_success_total{engine="0",finished_reason="stop",model_name="tiny"}', 2),
        ('time_to_first_token_seconds_count{engine="0",model_name="tiny"}', 2),
        ('inter_token_latency_seconds_count{engine="0",model_name="tiny"}', 4),
        ('request_prompt_tokens_sum{engine="0",model_name="tiny"}', 4),
        ('request_generation_tokens_sum{engine="0",model_name="tiny"}', 6),
        ('request_params_n_sum{engine="0",model_name="tiny"}', 2),
        ('e2e_request_latency_seconds_count{engine="0",model_name="tiny"}', 1),
        ('request_queue_time_seconds_count{engine="0",model_name="tiny"}', 1),
        ('request_decode_time_seconds_count{engine="0",model_name="tiny"}', 1),
    ):
        assert f"tiercel:{name} {value}.0" in metrics, name
