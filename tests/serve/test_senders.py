"""What the engine is told of a request's origin: its id for the log, its client for fair turns."""

import asyncio
import hashlib

import pytest

from tests.serve.fake_client import NAME, FakeClient, fake_app, fake_info, running
from tiercel.errors import EngineDiedTwiceError
from tiercel.serve.grammar_check import GrammarChecker
from tiercel.serve.http.access import digest
from tiercel.serve.settings import AccessSettings

MESSAGES = [{"role": "user", "content": "Hi"}]
QUESTION = {"type": "predicate", "instructions": "Is it so?"}
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/score": {"query": "Hi", "items": ["a"], "labels": ["x", "y"]},
    "/v1/rerank": {"query": "Hi", "documents": ["a"]},
    "/v1/decisions": {"input": "Hi", "questions": [QUESTION]},
}
FORM = {"structured_outputs": {"choice": ["a", "b"]}}


async def send(body, path, *, headers=None, **settings):
    """The answer, and what the engine got."""
    pooling = "mean" if "embeddings" in path else None
    client = FakeClient(info=fake_info(pooling=pooling, max_model_len=400))
    async with running(fake_app(client, **settings)) as http:
        answer = await http.post(path, json={"model": NAME, **body}, headers=headers)
    return answer, client.submitted


@pytest.mark.parametrize("path", BODIES)
def test_requests_of_the_engine_carry_the_id_of_the_answer(path):
    answer, submitted = asyncio.run(send(BODIES[path], path))
    assert submitted, answer.text
    assert answer.headers["x-request-id"].startswith("req_")
    assert {request.request_id for request in submitted} == {answer.headers["x-request-id"]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_final_error_is_worded_for_the_client_who_must_not_repeat_it(path):
    async def ask():
        client = FakeClient()
        client.script = lambda _: [EngineDiedTwiceError("for the second time.", hint="Stop.")]
        async with running(fake_app(client)) as http:
            return await http.post(path, json={"model": NAME, **BODIES[path]})

    answer = asyncio.run(ask())
    assert answer.status_code == 500
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["message"] == "for the second time. Stop."


@pytest.fixture
def checked(monkeypatch):
    """The clients whose grammars were checked."""
    clients = []

    async def check(_self, _spec, client):
        clients.append(client)

    monkeypatch.setattr(GrammarChecker, "check", check)
    return clients


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_clients_are_told_apart_by_their_keys_or_else_their_addresses(path, checked):
    digests = tuple(map(digest, ("one", "two")))
    access = AccessSettings(key_digests=digests)
    submitted = []
    for headers in ({"x-api-key": "one"}, {"authorization": "Bearer two"}):
        answer, sent = asyncio.run(send(BODIES[path] | FORM, path, headers=headers, access=access))
        assert answer.status_code == 200, answer.text
        submitted += sent
    assert checked == [hashlib.sha256(key).hexdigest() for key in (b"one", b"two")]
    assert {request.client for request in submitted} == set(checked)
    asyncio.run(send(BODIES[path] | FORM, path, headers={"x-api-key": "one"}))
    assert checked[2:] == ["127.0.0.1"], "a key that is not checked names no client"
