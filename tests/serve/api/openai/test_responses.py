"""`/v1/responses`: items in, items out, events in order."""

import json

import pytest

from tests.serve.api.openai.test_chat import ARGUMENTS, THINKING, prompt_of
from tests.serve.api.openai.test_chat_tools import called
from tests.serve.events import made_up, read_events, says, updates
from tests.serve.fake_client import CHAT_TEMPLATE, FakeClient, ask, fake_info, fake_tokenizer
from tiercel.request.request import TokenUpdate

PATH = "/v1/responses"
ASK = {"model": "tiny", "input": "hi"}
TOOL = {
    "type": "function",
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}
CALL = {"type": "function_call", "call_id": "call_1", "name": "look_up", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "tin"}


def post(body, client=None, **settings):
    return ask(("POST", PATH, {"json": {**ASK, **body}}), client=client, **settings)[0]


def answering(text, *, template=CHAT_TEMPLATE, **options):
    client = FakeClient(info=fake_info(chat_template=template, max_model_len=1024))
    client.script = says(text, **options)
    return client


def refusal(body, **settings):
    client = FakeClient()
    response = post(body, client, **settings)
    assert response.status_code == 400, response.text
    assert client.submitted == []
    return response.json()["error"]


def read_stream(response):
    """The events, checked for order: numbers rise by one, items nest, deltas join to the whole."""
    events = read_events(response.content)
    values = [value for _, value in events]
    assert [name for name, _ in events] == [value["type"] for value in values]
    assert [value["sequence_number"] for value in values] == list(range(len(values)))
    assert [value["type"] for value in values[:2]] == ["response.created", "response.in_progress"]
    assert values[0]["response"]["status"] == "in_progress"
    items = {}
    for value in values[2:-1]:
        _add_event(items, value)
    last = values[-1]
    output = last["response"]["output"]
    assert [item["done"] for item in items.values()] == output[: len(items)]
    return values, last


def _add_event(items, value):
    kind, index = value["type"], value["output_index"]
    if kind == "response.output_item.added":
        assert index == len(items)
        assert value["item"]["status"] == "in_progress"
        items[index] = {"id": value["item"]["id"], "text": "", "done": None}
        return
    item = items[index]
    assert item["done"] is None
    if kind == "response.output_item.done":
        assert value["item"]["id"] == item["id"]
        item["done"] = value["item"]
        return
    assert value["item_id"] == item["id"]
    if kind.endswith(".delta"):
        item["text"] += value["delta"]
    elif kind.endswith("_text.done"):
        assert value["text"] == item["text"]
    elif kind.endswith("arguments.done"):
        assert value["arguments"] == item["text"]


def test_a_plain_answer():
    whole = post({"metadata": {"a": "b"}, "user": "me"}, answering("xy")).json()
    assert whole["object"] == "response"
    assert whole["id"].startswith("resp_")
    assert whole["status"] == "completed"
    assert whole["error"] is whole["incomplete_details"] is whole["previous_response_id"] is None
    assert (whole["metadata"], whole["user"], whole["store"]) == ({"a": "b"}, "me", False)
    (item,) = whole["output"]
    assert item == {
        "type": "message",
        "id": item["id"],
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "xy", "annotations": [], "logprobs": []}],
    }
    assert whole["usage"] == {
        "input_tokens": 23,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 26,
    }


def test_the_events_of_a_stream():
    values, last = read_stream(post({"stream": True}, answering("xy")))
    assert [value["type"].removeprefix("response.") for value in values] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert last["response"]["usage"]["output_tokens"] == 3
    assert "[DONE]" not in values


def test_reasoning_and_calls_are_items_of_their_own():
    text = f"<think>why</think>Let me see.\n{called('look_up', ARGUMENTS)}"
    template = THINKING + "{{ tools | tojson }}{# <tool_call> #}"
    body = {"tools": [TOOL]}
    whole = post(body, answering(text, template=template)).json()
    reasoning, message, call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert reasoning["summary"] == []
    assert message["content"][0]["text"] == "Let me see."
    assert (call["name"], call["arguments"]) == ("look_up", ARGUMENTS)
    assert call["call_id"].startswith("call_")
    assert {item["status"] for item in whole["output"]} == {"completed"}
    values, last = read_stream(post({**body, "stream": True}, answering(text, template=template)))

    def bare(output):
        return [
            {key: value for key, value in item.items() if key not in ("id", "call_id")}
            for item in output
        ]

    assert bare(last["response"]["output"]) == bare(whole["output"])
    kinds = [value["type"] for value in values]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert "response.function_call_arguments.done" in kinds


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_the_length_cuts_is_incomplete(is_stream):
    client = answering("xy", reason="length")
    response = post({"stream": is_stream, "max_output_tokens": 2}, client)
    if is_stream:
        _, last = read_stream(response)
        assert last["type"] == "response.incomplete"
        whole = last["response"]
    else:
        whole = response.json()
    assert client.submitted[0].max_tokens == 2
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete"


def test_a_call_that_a_stop_string_cuts_is_incomplete():
    text = called("look_up", '{"word": "abc"}')
    body = {"tools": [TOOL], "tool_choice": "required", "stop": "b"}
    (call,) = post(body, answering(text)).json()["output"]
    assert (call["arguments"], call["status"]) == ('{"word": "a', "incomplete")
    (whole,) = post({**body, "stop": "z"}, answering(text)).json()["output"]
    assert whole["status"] == "completed"


def test_an_empty_answer_has_an_empty_message():
    whole = post({}, answering("")).json()
    assert whole["output"][0]["content"][0]["text"] == ""
    _, last = read_stream(post({"stream": True}, answering("")))
    assert last["response"]["output"][0]["content"][0]["text"] == ""


def test_a_failure_in_a_stream_is_its_last_event():
    client = FakeClient()
    client.script = lambda r: [*updates("ab")[:2], TokenUpdate((), (), "error", "nonfinite_logits")]
    events = read_events(post({"stream": True}, client).content)
    name, value = events[-1]
    assert name == "response.failed"
    assert value["response"]["status"] == "failed"
    assert value["response"]["error"]["code"] == "server_error"
    assert post({}, client).json()["error"]["code"] == "nonfinite_logits"


def test_items_become_messages():
    template = "{{ messages | tojson }}{# <tool_call> tools #}"
    client = answering("x", template=template)
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        CALL,
        {**CALL, "call_id": "call_2", "arguments": '{"word": "c"}'},
        RESULT,
        {**RESULT, "call_id": "call_2", "output": [{"type": "input_text", "text": "d"}]},
    ]  # fmt: skip
    assert post({"input": items, "instructions": "obey"}, client).status_code == 200
    rendered = json.loads(prompt_of(client).removeprefix("<|endoftext|>"))
    assert [m["role"] for m in rendered] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    turn = rendered[3]
    assert (turn["content"], turn["reasoning_content"]) == ("b", "hm")
    assert [c["function"]["arguments"] for c in turn["tool_calls"]] == [{}, {"word": "c"}]
    assert [m["content"] for m in rendered[4:]] == ["tin", "d"]


WRONG = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "poet", "content": "x"}]}, "input[0].role"),
    ({"input": [RESULT]}, "input[0].call_id"),
    ({"input": [CALL, {**RESULT, "call_id": "other"}]}, "input[1].call_id"),
    ({"input": [{**CALL, "arguments": "x"}]}, "input[0].arguments"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "x"}]}, "input[0]"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "x"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "look_up"}}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools[1]"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"truncation": "middle"}, "truncation"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temperature": 3}, "temperature"),
]


@pytest.mark.reliability
@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_refusals_name_the_field(fields, param):
    assert refusal(fields)["param"] == param


def test_what_changes_nothing_is_taken():
    body = {"store": True, "background": False, "truncation": "disabled", "include": [],
            "reasoning": {"summary": "auto", "effort": "low"}, "service_tier": "auto",
            "safety_identifier": "x", "stream_options": {"include_obfuscation": False},
            "text": {"format": {"type": "text"}}, "prompt_cache_key": "x"}  # fmt: skip
    whole = post(body, is_strict=True).json()
    assert whole["store"] is False  # said back as what it is
    assert whole["reasoning"]["effort"] == "low"


def test_sampling_fields_reach_the_engine():
    client = FakeClient()
    post({"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": "x", "top_k": 2}, client)
    params = client.submitted[0].params
    assert (params.temperature, params.top_p, params.seed, params.top_k) == (0.5, 0.9, 3, 2)
    assert params.stop == ("x",)


def test_forms_and_choices_reach_the_engine():
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    for fields in (
        {"text": {"format": schema}},
        {"text": {"format": {"type": "json_object"}}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "look_up"}},
    ):
        client = answering("x")
        assert post(fields, client).status_code == 200
        assert client.submitted[0].grammar is not None


@pytest.mark.parametrize(
    "fields",
    [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 1}],
    ids=["include", "number"],
)
@pytest.mark.parametrize("gap", ["", "\n\n"])
def test_log_probabilities_are_those_of_the_text(fields, gap):
    text = f"<think>why</think>{gap}é"
    plain = post(fields, answering(text, template=THINKING)).json()
    shown = plain["output"][1]["content"][0]["logprobs"]
    tokens = [entry["token"] for entry in shown]
    assert len(tokens) == len(gap) + 3  # two halves of a character and the end
    assert shown[0]["logprob"] == made_up(0).logprob
    assert len(shown[0]["top_logprobs"]) == fields.get("top_logprobs", 0)
    values, last = read_stream(post({**fields, "stream": True}, answering(text, template=THINKING)))
    deltas = [v["logprobs"] for v in values if v["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta] == shown
    assert last["response"]["output"][1]["content"][0]["logprobs"] == shown


def turns(count, size=40):
    items = []
    for number in range(count):
        items += [
            {"role": "user", "content": f"q{number:02} " + "x" * size},
            {"role": "assistant", "content": f"a{number:02} " + "y" * size},
        ]
    return [*items, {"role": "user", "content": "last"}]


@pytest.mark.parametrize("count", [10, 17, 20, 33])
@pytest.mark.parametrize("size", [1, 5, 40])
def test_auto_truncation_drops_the_oldest_turns(count, size):
    body = {"input": turns(count, size), "instructions": "obey", "truncation": "auto"}
    client = FakeClient()
    assert post(body, client).status_code == 200
    text = prompt_of(client)
    assert "[system] obey" in text
    assert text.count("[user]") == text.count("[assistant]") > 1
    assert "q00 " not in text
    assert f"q{count - 1:02} " in text
    assert text.endswith("[user] last\n[assistant] ")
    # No more than needed was dropped.
    turn = fake_tokenizer().encode(f"[user] q00 {'x' * size}\n[assistant] a00 {'y' * size}\n")
    assert len(client.submitted[0].prompt_token_ids) + len(turn) >= 256 - 2


def test_what_no_truncation_helps_is_refused():
    body = {"input": turns(20), "truncation": "disabled"}
    assert refusal(body)["code"] == "context_length_exceeded"
    error = refusal({"input": "x" * 300, "truncation": "auto"})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    client = FakeClient()
    post({"input": turns(1), "truncation": "auto"}, client)  # it fits as it is
    assert "q00 " in prompt_of(client)


@pytest.mark.parametrize("is_stream", [False, True])
def test_only_an_answer_that_is_whole_has_a_time_of_its_end(is_stream):
    for reason, is_whole in (("stop", True), ("length", False)):
        response = post({"stream": is_stream}, answering("xy", reason=reason))
        whole = read_stream(response)[1]["response"] if is_stream else response.json()
        assert (whole["status"] == "completed") == is_whole
        assert (whole["completed_at"] is not None) == is_whole
        assert not is_whole or whole["completed_at"] >= whole["created_at"]


def test_log_probabilities_wait_for_the_text_of_their_tokens():
    """A token that is half a character opens no message; nothing is lost or told twice."""
    body = {"include": ["message.output_text.logprobs"]}
    for text in ("é", "aé", "éa", "日本", "a"):
        values, last = read_stream(post({**body, "stream": True}, answering(text)))
        deltas = [v for v in values if v["type"] == "response.output_text.delta"]
        assert "".join(delta["delta"] for delta in deltas) == text
        assert deltas[0]["delta"], "a message begins with text"
        shown = last["response"]["output"][0]["content"][0]["logprobs"]
        assert [entry for delta in deltas for entry in delta["logprobs"]] == shown
        plain = post(body, answering(text)).json()["output"][0]["content"][0]["logprobs"]
        assert shown == plain
        assert b"".join(bytes(entry["bytes"] or ()) for entry in shown).decode() == text
