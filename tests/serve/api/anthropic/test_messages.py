"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's shapes, errors included."""

import json

import pytest

from tests.serve.api.openai.test_chat import ARGUMENTS, THINKING, prompt_of
from tests.serve.api.openai.test_chat_tools import called
from tests.serve.events import read_events, says, updates
from tests.serve.fake_client import (
    CHAT_TEMPLATE,
    FakeClient,
    ask,
    fake_info,
    fake_tokenizer,
)
from tiercel.request.request import TokenUpdate
from tiercel.serve.api import streaming_response

PATH = "/v1/messages"
USER = {"role": "user", "content": "hi"}
ASK = {"model": "tiny", "max_tokens": 50, "messages": [USER]}
TOOL = {
    "name": "look_up",
    "description": "Looks a word up.",
    "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}},
}
USE = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"word": "a"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "tin"}


def post(body, client=None, path=PATH, **settings):
    return ask(("POST", path, {"json": {**ASK, **body}}), client=client, **settings)[0]


def answering(text, *, template=CHAT_TEMPLATE, **options):
    client = FakeClient(info=fake_info(chat_template=template, max_model_len=1024))
    client.script = says(text, **options)
    return client


def refusal(body, **settings):
    client = FakeClient()
    response = post(body, client, **settings)
    assert response.status_code == 400, response.text
    assert client.submitted == []
    body = response.json()
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["x-request-id"]
    assert body["error"]["type"] == "invalid_request_error"
    return body["error"]["message"]


def read_stream(response):
    """The message put together from its events, and the kinds of events."""
    events = read_events(response.content)
    assert all(name == value["type"] for name, value in events)
    message, arguments = None, {}
    for name, value in events:
        if name == "message_start":
            message = value["message"]
        elif name == "content_block_start":
            assert value["index"] == len(message["content"])
            message["content"].append(value["content_block"])
        elif name == "content_block_delta":
            block, delta = message["content"][value["index"]], value["delta"]
            if delta["type"] == "input_json_delta":
                arguments.setdefault(value["index"], []).append(delta["partial_json"])
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
        elif name == "message_delta":
            message |= value["delta"]
            message["usage"] |= value["usage"]
    for index, pieces in arguments.items():
        message["content"][index]["input"] = json.loads("".join(pieces))
    return message, [name for name, _ in events]


def bare(message):
    """The message without what differs from one answer to the next."""
    content = [
        {k: v for k, v in block.items() if k not in ("id", "citations")}
        for block in message["content"]
    ]
    return {**message, "id": None, "content": content}


def test_a_plain_answer():
    message = post({}, answering("xy")).json()
    assert message["id"].startswith("msg_")
    assert bare(message) == {
        "id": None,
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "xy"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 23,
            "output_tokens": 3,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
        },
    }


def test_the_events_of_a_stream():
    message, kinds = read_stream(post({"stream": True}, answering("xy")))
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert bare(message) == bare(post({}, answering("xy")).json())


def test_thinking_text_and_tools_are_blocks():
    text = f"<think>why</think>Let me see.\n{called('look_up', ARGUMENTS)}"
    template = THINKING + "{{ tools | tojson }}{# <tool_call> #}"
    plain = post({"tools": [TOOL]}, answering(text, template=template)).json()
    thinking, said, used = plain["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "why")
    assert (said["type"], said["text"]) == ("text", "Let me see.")
    assert used["id"].startswith("toolu_")
    assert (used["name"], used["input"]) == ("look_up", json.loads(ARGUMENTS))
    assert plain["stop_reason"] == "tool_use"
    body = {"tools": [TOOL], "stream": True}
    message, _ = read_stream(post(body, answering(text, template=template)))
    assert bare(message) == bare(plain)


@pytest.mark.parametrize(
    ("text", "options", "kinds"),
    [
        ("<think>why", {"reason": "length"}, ["thinking"]),
        (f"a\n{called('look_up', '{}')}\nb", {}, ["text", "tool_use", "text"]),
    ],
    ids=["cut thinking", "text around a call"],
)
def test_a_plain_answer_has_the_blocks_of_its_stream(text, options, kinds):
    template = THINKING + "{{ tools | tojson }}{# <tool_call> #}"
    body = {"tools": [TOOL]}
    plain = post(body, answering(text, template=template, **options)).json()
    stream = post({**body, "stream": True}, answering(text, template=template, **options))
    assert [block["type"] for block in plain["content"]] == kinds
    assert bare(plain) == bare(read_stream(stream)[0])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("body", "text", "options", "reason", "sequence"),
    [
        ({}, "xy", {"reason": "length"}, "max_tokens", None),
        ({"stop_sequences": ["y"]}, "xyz", {}, "stop_sequence", "y"),
        ({}, "", {}, "end_turn", None),
    ],
    ids=["length", "stop", "empty"],
)
def test_why_an_answer_ended(is_stream, body, text, options, reason, sequence):
    response = post({**body, "stream": is_stream}, answering(text, **options))
    message = read_stream(response)[0] if is_stream else response.json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert [block["type"] for block in message["content"]] == ["text"]


def test_what_is_cached_is_not_input():
    class Client(FakeClient):
        def submit(self, request):
            stream = super().submit(request)
            request.num_cached = 16
            return stream

    usage = post({}, Client()).json()["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (7, 16)


def test_messages_as_the_template_sees_them():
    template = "{{ messages | tojson }}{# <tool_call> tools #}"
    client = answering("x", template=template)
    body = {
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "c"}, USE]},
            {"role": "user", "content": [
                {**RESULT, "content": [{"type": "text", "text": "tin"}], "is_error": True},
                {"type": "text", "text": "d"}]},
        ],
    }  # fmt: skip
    assert post(body, client).status_code == 200
    rendered = json.loads(prompt_of(client).removeprefix("<|endoftext|>"))
    assert rendered[:2] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
    ]
    turn = rendered[2]
    assert (turn["content"], turn["reasoning_content"]) == ("c", "hm")
    assert turn["tool_calls"][0]["function"] == {"name": "look_up", "arguments": {"word": "a"}}
    assert rendered[3]["content"] == "Error: tin"
    assert rendered[4] == {"role": "user", "content": "d"}


def test_a_turn_of_the_assistant_at_the_end_is_continued():
    client = FakeClient()
    post({"messages": [USER, {"role": "assistant", "content": "Once"}]}, client)
    assert prompt_of(client).endswith("[assistant] Once")


def test_fields_reach_the_engine():
    client = FakeClient()
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["x"], "max_tokens": 7}
    assert post(body, client).status_code == 200
    params = client.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 3)
    assert (params.stop, client.submitted[0].max_tokens) == (("x",), 7)
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in (
        {"output_config": {"format": form}},
        {"tools": [TOOL], "tool_choice": {"type": "any"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look_up"}},
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ):
        client = answering("x")
        assert post(fields, client).status_code == 200
        assert client.submitted[0].grammar is not None
    client = answering("x")
    post({"tools": [TOOL], "tool_choice": {"type": "none"}}, client)
    assert client.submitted[0].grammar is None
    assert "look_up" not in prompt_of(client)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"thinking": {"type": "disabled"}}, "False "),
        ({"thinking": {"type": "adaptive"}}, "True "),
        ({"output_config": {"effort": "high"}}, " high"),
        ({}, " "),
    ],
    ids=str,
)
def test_thinking_is_for_the_template(fields, shown):
    client = answering("x", template="{{ enable_thinking }} {{ reasoning_effort }}")
    assert post(fields, client).status_code == 200
    assert prompt_of(client).removeprefix("<|endoftext|>") == shown


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("group", [1, 7])
def test_thinking_past_its_budget_is_closed(is_stream, group):
    """The rest is asked for after the end of the thinking; nothing of it is counted twice."""
    client = FakeClient(info=fake_info(chat_template=THINKING, max_model_len=1024))

    def script(request):
        is_rest = len(client.submitted) == 2
        return says("yes" if is_rest else "<think>" + "hm " * 100, group=group)(request)

    client.script = script
    body = {"thinking": {"type": "enabled", "budget_tokens": 20}, "max_tokens": 60}
    response = post({**body, "stream": is_stream}, client)
    message = read_stream(response)[0] if is_stream else response.json()
    thinking, text = message["content"]
    tokenizer = fake_tokenizer()
    first, rest = client.submitted
    # The template has opened the thinking, so the marker that the model writes is part of it.
    whole = tokenizer.decode(first.prompt_token_ids[-8:], skip_special_tokens=False)
    assert whole.endswith("<think>")
    assert text["text"] == "yes"
    num_kept = len(rest.prompt_token_ids) - len(first.prompt_token_ids)
    closing = tokenizer.encode("\n</think>\n\n", parse_special=True)
    assert rest.prompt_token_ids[-len(closing) :] == closing
    assert num_kept - len(closing) == 20
    kept = rest.prompt_token_ids[len(first.prompt_token_ids) : -len(closing)]
    assert thinking["thinking"] == tokenizer.decode(kept).strip("\n")
    assert rest.max_tokens == 60 - num_kept
    assert (rest.seed, rest.stream) == (first.seed, first.stream)
    assert first in client.aborted or not client.num_running
    usage = message["usage"]
    assert usage["output_tokens"] == 20 + len(tokenizer.encode("yes")) + 1
    assert usage["input_tokens"] == len(first.prompt_token_ids)


def test_half_a_character_of_closed_thinking_does_not_reach_the_answer():
    client = FakeClient(info=fake_info(chat_template=THINKING, max_model_len=1024))
    client.script = lambda request: says("yes" if len(client.submitted) == 2 else "é" * 9)(request)
    body = {"thinking": {"type": "enabled", "budget_tokens": 5}, "max_tokens": 60}
    thinking, text = post(body, client).json()["content"]
    assert thinking["thinking"] == "éé\N{REPLACEMENT CHARACTER}"
    assert text["text"] == "yes"


def test_a_budget_that_is_not_reached_changes_nothing():
    client = answering("why</think>yes", template=THINKING)
    body = {"thinking": {"type": "enabled", "budget_tokens": 49}}
    assert [b["type"] for b in post(body, client).json()["content"]] == ["thinking", "text"]
    assert len(client.submitted) == 1
    client = answering("yes")  # a model that does not think
    assert post(body, client).json()["content"][0]["text"] == "yes"


WRONG = [
    ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "budget_tokens"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "budget_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
    (
        {"system": "x", "messages": [USER, {"role": "user", "content": [RESULT]}]},
        "messages[1].content[0].tool_use_id is 'toolu_1'",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, USER]}, "content[0]"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
        "output_config.format",
    ),
]


@pytest.mark.reliability
@pytest.mark.parametrize(("fields", "word"), WRONG, ids=lambda value: str(value)[:60])
def test_refusals_have_the_shape_and_name_the_field(fields, word):
    assert word in refusal(fields)


def test_what_changes_nothing_is_taken():
    body = {"metadata": {"user_id": "x"}, "service_tier": "auto", "mcp_servers": []}
    assert post(body, is_strict=True).status_code == 200


def test_errors_have_types_of_their_own():
    client = FakeClient(max_waiting=0)
    response = post({}, client)
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    response = post({"model": "other"})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    client = FakeClient()
    client.script = lambda r: [*updates("ab")[:2], TokenUpdate((), (), "error", "nonfinite_logits")]
    response = post({}, client)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")
    name, value = read_events(post({"stream": True}, client).content)[-1]
    assert (name, value["type"], value["error"]["type"]) == ("error", "error", "api_error")


def test_threads_are_refused_so_that_a_client_goes_on_without():
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        error = post({"thread": thread}, FakeClient()).json()["error"]
        assert error["details"] == {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }
        assert error["type"] == "invalid_request_error"
    assert post({"thread": None}).status_code == 200
    assert "details" not in post({"max_tokens": 0}).json()["error"]


def test_pings_while_waiting(monkeypatch):
    monkeypatch.setattr(streaming_response, "KEEP_ALIVE_SECONDS", 0.03)
    client = FakeClient()
    client.script = lambda request: [0.5, *says("x")(request)]
    _, kinds = read_stream(post({"stream": True}, client))
    assert kinds[:3] == ["message_start", "ping", "ping"]


def test_count_tokens_counts_what_a_message_would_use():
    body = {key: ASK[key] for key in ("model", "messages")}
    path = f"{PATH}/count_tokens"
    (counted,) = ask(("POST", path, {"json": body}))
    assert counted.json() == {"input_tokens": 23}
    client = answering("x")
    tools = {"tools": [TOOL], "system": "be brief"}
    used = post(tools, client).json()["usage"]["input_tokens"]
    client = FakeClient(info=fake_info(max_model_len=1024))
    (counted,) = ask(("POST", path, {"json": {**body, **tools}}), client=client)
    assert counted.json() == {"input_tokens": used}
    assert client.submitted == []
    (wrong,) = ask(("POST", path, {"json": {**body, "messages": []}}))
    assert wrong.json()["error"]["type"] == "invalid_request_error"
