"""Forms, reasoning, streams, seeds and stop strings in every combination, on a real engine.

The model is random, so what it says means nothing; what must hold is that a stream says the same as
a plain answer, that a form is kept, and that counts and reasons agree.
"""

import json
from itertools import product

import pytest

from tests.serve.events import read_chat
from tests.serve.harness import start_server

PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
TEMPLATES = {"no reasoning": PLAIN, "reasoning": PLAIN + "<think>{# </think> #}"}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "act", "parameters": SCHEMA}}
FORMS = {
    "free": {},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "tool": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
}
DRAWS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 5}}
STOPS = {"no stop": {}, "stop": {"stop": ["e", "{"]}}
CASES = list(product(FORMS, TEMPLATES, DRAWS, STOPS))


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    log_path = tmp_path_factory.mktemp("log") / "server.log"
    with start_server(tiny, "--trust-request-chat-template", log_path=log_path) as running:
        yield running


# By default a greedy answer without a stop string, and a seeded one with it.
STREAM_CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] * (number % 4 in (1, 2)))
    for number, case in enumerate(CASES)
]


@pytest.mark.parametrize(("form", "template", "draw", "stop"), STREAM_CASES)
def test_a_stream_says_what_a_plain_answer_says(server, form, template, draw, stop):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 60,
        "chat_template": TEMPLATES[template],
        **FORMS[form],
        **DRAWS[draw],
        **STOPS[stop],
    }
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    plain = response.json()
    choice = plain["choices"][0]
    message = choice["message"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    choices, usage, _ = read_chat(server.post("/v1/chat/completions", body | options).content)
    joined = choices[0]
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    assert joined.content == (message["content"] or "")
    assert joined.reasoning == message.get("reasoning_content", "")
    assert [(name, arguments) for _, name, arguments in joined.calls] == calls
    assert joined.finish_reasons == [choice["finish_reason"]]
    assert joined.stop_reason == choice["stop_reason"]
    for counted in (usage, plain["usage"]):
        del counted["prompt_tokens_details"]  # the second request finds the first one's prompt
    assert usage == plain["usage"]
    check_form(form, choice, calls)
    if template == "no reasoning":
        assert "reasoning_content" not in message
    elif choice["finish_reason"] == "length" and not message["content"] and not calls:
        assert plain["usage"]["completion_tokens_details"]["reasoning_tokens"] == 60


def check_form(form, choice, calls):
    """A form that was not cut, neither by the length nor by a stop string, is whole."""
    is_whole = choice["finish_reason"] != "length" and choice["stop_reason"] is None
    if not is_whole:
        return
    if form == "schema":
        check_value(json.loads(choice["message"]["content"]))
    if form == "tool":
        ((name, arguments),) = calls
        assert (name, choice["finish_reason"]) == ("act", "tool_calls")
        check_value(json.loads(arguments))


def check_value(value):
    assert set(value) == {"ok", "kind"}
    assert isinstance(value["ok"], bool)
    assert value["kind"] in ("a", "b")


@pytest.mark.parametrize("form", ["schema", "tool"])
def test_a_form_is_reached(server, form):
    """So that the cases above do not all end at the length."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300,
            "temperature": 0, **FORMS[form]}  # fmt: skip
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["finish_reason"] in ("stop", "tool_calls")
