"""Requests that pass through the server before it is ready: all routes, and no trace of them."""

import asyncio
import gc
import logging

import pytest

from tests.gguf_files import tiny_model
from tests.serve.fake_client import CHAT_TEMPLATE, FakeClient, ask, fake_app, fake_info, running
from tiercel.config import LoadOptions
from tiercel.ipc.client import EngineClient
from tiercel.serve.app import create_app
from tiercel.serve.http.metrics import Metrics
from tiercel.serve.settings import ServeSettings
from tiercel.serve.state import ServerState

NUM_ANSWERS = 5  # bodies; on a CPU as streams
NUM_SCORES = 3  # lists and questions
# A byte is a token: what is asked about a document takes some hundreds.
ROOM = {"max_model_len": 1024, "max_num_batched_tokens": 1024}


@pytest.fixture(autouse=True)
def thawed():
    """A rehearsal freezes what is there; this process goes on."""
    yield
    gc.unfreeze()


def counted(response):
    """Lines of the metrics whose value is not 0, without times at which series began."""
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    return {line for line in lines if not line.endswith(" 0.0") and "_created" not in line}


def test_every_route_is_asked_and_nothing_is_counted_or_logged(caplog):
    caplog.set_level(logging.INFO, logger="tiercel")
    client = FakeClient(info=fake_info(**ROOM))
    (rehearsed,) = ask(("GET", "/metrics"), client=client, warms_up=True, logs_prompts=True)
    names = {record.name for record in caplog.records}
    assert len(client.submitted) == NUM_ANSWERS + NUM_SCORES
    assert sum(request.score is not None for request in client.submitted) == NUM_SCORES
    assert not client.aborted
    assert client.num_forgets == 1
    assert client.on_stats is not None
    assert "tiercel.serve.generation.generation" not in names
    assert [r.args for r in caplog.records if r.name == "tiercel.serve.request"] == []
    (plain,) = ask(("GET", "/metrics"), client=FakeClient(info=fake_info(**ROOM)))
    assert counted(rehearsed) == counted(plain)


def test_the_server_is_not_ready_before_its_end():
    client, seen = FakeClient(), []
    app = fake_app(client, warms_up=True)
    play = client.script

    def watched(request):
        seen.append(app.state.server.model)
        return play(request)

    client.script = watched

    async def start():
        async with running(app):
            pass

    asyncio.run(start())
    assert seen == [None] * NUM_ANSWERS


def test_a_gpu_is_asked_more_often_and_for_more():
    client = FakeClient(info=fake_info(device="cuda:0", **ROOM))
    ask(client=client, warms_up=True)
    assert len(client.submitted) == 4 * (NUM_ANSWERS + 1 + NUM_SCORES)
    long = [r.prompt_token_ids for r in client.submitted if len(r.prompt_token_ids) == 512]
    assert [ids[0] for ids in long] == [0, 1, 2, 3]  # none is a prefix hit


def test_an_embedding_model_is_asked_for_vectors():
    client = FakeClient(info=fake_info(pooling="mean", **ROOM))
    ask(client=client, warms_up=True)
    assert sum(request.pooling == "mean" for request in client.submitted) == 1


def test_a_refusal_delays_nothing():
    without_template = FakeClient(info=fake_info(chat_template=None))
    (ready,) = ask(("GET", "/ready"), client=without_template, warms_up=True)
    assert ready.status_code == 200
    assert 0 < len(without_template.submitted) < NUM_ANSWERS
    full = FakeClient(max_waiting=0)
    (ready,) = ask(("GET", "/ready"), client=full, warms_up=True)
    assert ready.status_code == 200
    assert not full.submitted


def test_a_fault_is_logged_and_the_server_starts(caplog):
    client = FakeClient()
    client.script = lambda _request: [RuntimeError("a fault")]
    gpu = fake_info(device="cuda:0")
    client.info = gpu
    (ready,) = ask(("GET", "/ready"), client=client, warms_up=True)
    assert ready.status_code == 200
    faults = [r for r in caplog.records if r.name == "tiercel.serve.lifecycle.warmup"]
    assert len(faults) == 2 * (NUM_ANSWERS + 1)  # whole answers; streams end with an event


def test_the_engine_forgets_what_was_rehearsed(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    client = EngineClient(LoadOptions(model=str(path), device="cpu"))
    state = ServerState(ServeSettings(warms_up=True), client, Metrics())
    ids = [i % 250 for i in range(70)]
    body = {"model": "m", "prompt": ids, "max_tokens": 3, "temperature": 0, "ignore_eos": True}

    async def use():
        async with running(create_app(state)) as http:
            assert client.stats.num_steps == client.stats.num_prompt_tokens == 0
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200
            while client.stats.num_generation_tokens < 3:
                await asyncio.sleep(0.02)
            return client.stats, (await http.get("/metrics")).text.splitlines()

    stats, lines = asyncio.run(use())
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (70, 3)
    assert stats.prefix_hits == 0
    (line,) = (x for x in lines if x.startswith("tiercel:prompt_tokens_total"))
    assert line.endswith(" 70.0")
