"""`/v1/chat/completions`: calls of tools, forms and reasoning, plain and streamed alike."""

import pytest

from tests.serve.api.openai.test_chat import (
    ARGUMENTS,
    CHAT,
    THINKING,
    TOOL,
    answering,
    post,
    refusal,
    roomy,
)
from tests.serve.events import read_chat, read_events


def called(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("group", [1, 5, 1000])
def test_tool_calls_are_the_same_plain_and_streamed(group):
    """B6: the arguments byte for byte; no markup in the content; numbered from 0."""
    text = f"Let me see.\n{called('look_up', ARGUMENTS)}\n{called('look_up', '{}')}"
    body = {**CHAT, "tools": [TOOL]}
    choice = post(body, answering(text, group=group)).json()["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert [call["function"]["arguments"] for call in calls] == [ARGUMENTS, "{}"]
    assert all(len(call["id"]) == 29 and call["id"].startswith("call_") for call in calls)
    response = post({**body, "stream": True}, answering(text, group=group))
    joined = read_chat(response.content)[0][0]
    assert joined.content == "Let me see."
    assert [(name, arguments) for _, name, arguments in joined.calls] == [
        ("look_up", ARGUMENTS),
        ("look_up", "{}"),
    ]
    assert joined.finish_reasons == ["tool_calls"]


def test_a_call_alone_has_no_content():
    body = {**CHAT, "tools": [TOOL], "tool_choice": "required"}
    choice = post(body, answering(called("look_up", "{}"))).json()["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


def test_a_call_that_the_length_cuts_ends_by_length():
    text = called("look_up", ARGUMENTS)[:-30]
    body = {
        **CHAT,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
    }
    choice = post(body, answering(text, reason="length")).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize(("stop", "reason"), [("{c}", "stop"), ("</tool_call>", "tool_calls")])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_that_a_stop_string_cuts_is_not_to_be_carried_out(stop, reason, is_stream):
    arguments = '{"word": "a {c}"}'
    body = {**CHAT, "tools": [TOOL], "tool_choice": "required", "stop": stop, "stream": is_stream}
    response = post(body, answering(called("look_up", arguments)))
    if is_stream:
        answer = read_chat(response.content)[0][0]
        found, ((_, _, said),) = answer.finish_reasons, answer.calls
    else:
        choice = response.json()["choices"][0]
        found = [choice["finish_reason"]]
        said = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert found == [reason]
    assert said == arguments.partition(stop)[0]


@pytest.mark.parametrize(
    ("fields", "is_constrained"),
    [
        ({}, False),
        ({"tools": [TOOL]}, True),
        ({"tools": [TOOL], "tool_choice": "none"}, False),
        ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "object"}, "strict": False}}}, True),
        ({"structured_outputs": {"regex": "[ab]+"}}, True),
        ({"guided_json": {"type": "integer"}}, True),
        ({"guided_regex": "[ab]+"}, True),
        ({"guided_choice": ["a", "b"]}, True),
        ({"guided_grammar": 'start: "a"'}, True),
    ],
    ids=str,
)  # fmt: skip
def test_the_form_of_an_answer_reaches_the_engine(fields, is_constrained):
    client = roomy()
    assert post({**CHAT, **fields}, client).status_code == 200
    assert (client.submitted[0].grammar is not None) == is_constrained


FORMS = [
    ({"guided_json": {"type": "no such type"}}, "guided_json", "invalid_schema"),
    ({"guided_json": "{not JSON"}, "guided_json", None),
    ({"response_format": {"type": "json_object", "schema": {"type": "nope"}}}, "response_format",
     "invalid_schema"),
    ({"response_format": {"type": "json_schema", "schema": {"type": "nope"}}}, "response_format",
     "invalid_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
    ({"guided_regex": "(a"}, "guided_regex", "invalid_schema"),
    ({"guided_grammar": "no grammar"}, "guided_grammar", "invalid_schema"),
    ({"guided_regex": "a" * 5000}, "guided_regex", "schema_too_complex"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "$ref": "https://example.org/x.json"}}}},
        "response_format",
        "invalid_schema",
    ),
    (
        {"tools": [{**TOOL, "function": {"name": "f", "parameters": {"type": "nope"}}}]},
        "tools[0].function.parameters",
        "invalid_schema",
    ),
]  # fmt: skip


@pytest.mark.reliability
@pytest.mark.parametrize(("fields", "param", "code"), FORMS, ids=lambda value: str(value)[:50])
def test_a_form_that_cannot_be_kept_is_refused(fields, param, code):
    """A23, A24."""
    error = refusal({**CHAT, **fields})
    assert error["param"] == param
    assert code is None or error["code"] == code


def test_a_model_without_an_end_keeps_no_form(monkeypatch):
    from tiercel.serve.lifecycle import engine_monitor

    monkeypatch.setattr(engine_monitor, "make_checker", lambda *_: None)
    assert refusal({**CHAT, "guided_choice": ["a"]})["param"] == "guided_choice"
    assert refusal({**CHAT, "tools": [TOOL], "tool_choice": "required"})["param"] == "tools"
    client = answering(called("look_up", "{}"))
    choice = post({**CHAT, "tools": [TOOL]}, client).json()["choices"][0]
    assert client.submitted[0].grammar is None
    assert choice["finish_reason"] == "tool_calls"  # found in what it wrote of its own accord


@pytest.mark.parametrize("is_mirrored", [False, True])
def test_reasoning_has_a_field_of_its_own(is_mirrored):
    client = answering("<think>\nwhy\n</think>\n\nyes", template=THINKING)
    body = {**CHAT, "stop": ["h"]}  # not inside the reasoning
    whole = post(body, client, is_reasoning_mirrored=is_mirrored).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why", "yes")
    assert message.get("reasoning") == ("why" if is_mirrored else None)
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3
    client = answering("<think>\nwhy\n</think>\n\nyes", template=THINKING)
    joined = read_chat(post({**body, "stream": True}, client).content)[0][0]
    assert (joined.reasoning, joined.content) == ("why", "yes")


def test_a_template_may_open_the_reasoning():
    body = {**CHAT, "chat_template_kwargs": {"enable_thinking": True}}
    whole = post(body, answering("why</think>yes", template=THINKING)).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why", "yes")
    client = answering("never ends", template=THINKING, reason="length")
    choice = post(body, client).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    stopped = post({**body, "stop": ["h"], "stop_in_reasoning": True},
                   answering("why</think>yes", template=THINKING)).json()  # fmt: skip
    assert stopped["choices"][0]["message"]["reasoning_content"] == "w"


def test_an_error_is_a_plain_answer_even_if_a_stream_was_asked_for():
    response = post({**CHAT, "messages": [], "stream": True})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


def test_the_headers_of_a_stream():
    response = post({**CHAT, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"]
    assert read_events(response.content)[-1] == ("", "[DONE]")
