"""Streams before their first token: progress for clients that want it, else keep-alives."""

import anthropic
import openai
import pytest

from tests.engine_process import make_client
from tests.serve.events import read_events, says, updates
from tests.serve.fake_client import Computed, FakeClient, ask
from tests.serve.thread_server import thread_server
from tiercel.ipc.streams import TokenStream
from tiercel.serve.api import streaming_response
from tiercel.serve.generation.prompt_progress import PromptProgressTracker

USER = [{"role": "user", "content": "hi"}]
CHAT = ("/v1/chat/completions", {"messages": USER})
RAW = ("/v1/completions", {"prompt": "the thin"})
KEEP_ALIVE = b": keep-alive\n\n"


def scripted(*steps):
    client = FakeClient()
    client.script = lambda request: list(steps)
    return client


def stream(route, client, **fields):
    path, body = route
    body = {"model": "tiny", "stream": True, **body, **fields}
    return ask(("POST", path, {"json": body}), client=client)[0]


def chunks_of(response):
    return [value for _, value in read_events(response.content) if value != "[DONE]"]


def progress_of(chunks):
    return [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]


@pytest.mark.parametrize("route", [CHAT, RAW], ids=["chat", "completions"])
def test_progress_comes_before_the_first_token_and_ends_with_the_whole_prompt(route):
    client = scripted(Computed(2), Computed(4), *updates("ab"))
    chunks = chunks_of(stream(route, client, return_progress=True))
    total = len(client.submitted[0].prompt_token_ids)
    progress = progress_of(chunks)
    assert ["prompt_progress" in chunk for chunk in chunks[:4]] == [True, True, True, False]
    assert [entry["processed"] for entry in progress] == [2, 4, total]
    assert {(entry["total"], entry["cache"]) for entry in progress} == {(total, 0)}
    times = [entry["time_ms"] for entry in progress]
    assert times == sorted(times)
    assert min(times) >= 0
    for chunk in chunks[:3]:
        (choice,) = chunk["choices"]
        assert choice.get("delta", choice.get("text")) in ({}, "")
        assert choice["finish_reason"] is None


@pytest.mark.parametrize("route", [CHAT, RAW], ids=["chat", "completions"])
def test_progress_is_for_streams_that_want_it(route):
    steps = [Computed(2), *updates("ab")]
    plain = chunks_of(stream(route, scripted(*steps)))
    assert not progress_of(plain)
    wanted = chunks_of(stream(route, scripted(*steps), return_progress=True))
    assert [c["choices"] for c in wanted if "prompt_progress" not in c] == [
        c["choices"] for c in plain
    ]
    whole = stream(route, scripted(*steps), return_progress=True, stream=False)
    assert whole.status_code == 200
    assert "prompt_progress" not in whole.json()


def test_a_prompt_of_one_step_has_one_report():
    chunks = chunks_of(stream(CHAT, scripted(*updates("ab")), return_progress=True))
    (progress,) = progress_of(chunks)
    assert progress["processed"] == progress["total"]


def test_nothing_is_reported_of_a_queued_prompt():
    client = scripted(0.05, Computed(2), *updates("ab"))
    text = stream(CHAT, client, return_progress=True).text
    assert text.startswith("data: ")
    assert '"processed":2' in text.partition("\n")[0]


def test_each_answer_reports_its_own_prompt():
    chunks = chunks_of(
        stream(CHAT, scripted(Computed(2), *updates("a")), n=2, return_progress=True)
    )
    seen = {}
    for chunk in chunks:
        if "prompt_progress" in chunk:
            index = chunk["choices"][0]["index"]
            seen.setdefault(index, []).append(chunk["prompt_progress"]["processed"])
    assert seen[0] == seen[1]
    assert [len(numbers) for numbers in seen.values()] == [2, 2]


class Prompt:
    """As much of a request as a meter reads."""

    prompt_token_ids = [5] * 100
    num_input_tokens = 100
    max_tokens = 8
    num_cached = 16


def test_reported_numbers_only_rise():
    """A preempted request is computed again."""
    stream = TokenStream(Prompt, 0.0)
    stream.enter(1.0, 16)
    meter = PromptProgressTracker(stream)
    first = meter.advance(48, 3.0)
    assert (first.total, first.cached, first.processed, first.seconds) == (100, 16, 48, 2.0)
    assert meter.advance(32, 3.5) is None
    assert meter.advance(48, 3.5) is None
    assert meter.advance(64, 4.0).processed == 64
    assert meter.finish(5.0).processed == 100
    assert meter.finish(6.0) is None
    assert meter.advance(96, 6.0) is None


# Keep-alives


class QueuedClient(FakeClient):
    """Requests enter with their first token."""

    def submit(self, request):
        stream = super().submit(request)
        stream.entered_s = None
        return stream


@pytest.mark.parametrize(
    "route", [CHAT, RAW, ("/v1/responses", {"input": "hi"})], ids=lambda r: r[0]
)
def test_a_queued_stream_has_comments(monkeypatch, route):
    monkeypatch.setattr(streaming_response, "KEEP_ALIVE_SECONDS", 0.03)
    client = QueuedClient()
    client.script = lambda request: [0.5, *updates("ab")]
    assert stream(route, client).content.count(KEEP_ALIVE) >= 2


def test_a_stream_whose_tokens_show_nothing_has_comments(monkeypatch):
    """The text of a stop string that may follow is held back: an idle stream all the same."""
    monkeypatch.setattr(streaming_response, "KEEP_ALIVE_SECONDS", 0.1)
    client = FakeClient()
    steps = updates("abcdefgh")
    client.script = lambda request: [part for step in steps for part in (0.03, step)]
    response = stream(RAW, client, stop=["abcdefghi"])
    assert KEEP_ALIVE in response.content
    assert response.content.index(KEEP_ALIVE) < response.content.index(b'"text"')


def test_the_official_clients_pass_over_what_comes_before_a_slow_first_token(monkeypatch):
    monkeypatch.setattr(streaming_response, "KEEP_ALIVE_SECONDS", 0.03)
    client = FakeClient()
    client.script = lambda request: [0.1, Computed(2), 0.1, *says("a thin man")(request)]
    with thread_server(client=client) as server:
        url = server.url
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
            fields = {"model": "tiny", "stream": True}
            chat = list(made.chat.completions.create(messages=USER, **fields))
            assert "".join(c.choices[0].delta.content or "" for c in chat) == "a thin man"
            wanted = {"extra_body": {"return_progress": True}}
            chat = list(made.chat.completions.create(messages=USER, **fields, **wanted))
            assert "".join(c.choices[0].delta.content or "" for c in chat) == "a thin man"
            assert chat[0].prompt_progress["processed"] == 2
            raw = list(made.completions.create(prompt="the", **fields, **wanted))
            assert "".join(c.choices[0].text for c in raw) == "a thin man"
            response = made.responses.create(input="hi", **fields)
            text = "".join(e.delta for e in response if e.type == "response.output_text.delta")
            assert text == "a thin man"
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as made:
            fields = {"model": "tiny", "max_tokens": 40, "messages": USER}
            with made.messages.stream(**fields) as events:
                assert "".join(events.text_stream) == "a thin man"


@pytest.mark.usefixtures("forked_engines")
def test_an_engine_whose_first_step_is_slow(monkeypatch):
    """Prompt steps of a real engine that each take 0.3 s: keep-alives, or their progress."""
    monkeypatch.setattr(streaming_response, "KEEP_ALIVE_SECONDS", 0.1)
    monkeypatch.setenv("TIERCEL_FAULTS", "sleep:0.3@1,sleep:0.3@2,sleep:0.3@4,sleep:0.3@5")
    client = make_client(max_num_batched_tokens=32, max_num_seqs=2, enable_fault_injection=True)
    body = {"model": "tiny", "prompt": [5] * 40, "stream": True, "max_tokens": 2}
    with thread_server(client=client) as server:
        quiet = server.post("/v1/completions", body | {"prompt": [7] * 40})
        assert quiet.content.count(KEEP_ALIVE) >= 2
        loud = server.post("/v1/completions", body | {"return_progress": True})
    assert [entry["processed"] for entry in progress_of(chunks_of(loud))] == [32, 40]
