"""Requests as agents send them get an answer; what is left out is named in a header."""

import json
from pathlib import Path

import pytest

from tests.serve.api.openai.test_chat import prompt_of
from tests.serve.api.openai.test_chat_tools import called
from tests.serve.api.openai.test_responses import read_stream
from tests.serve.events import read_chat, read_events, says
from tests.serve.fake_client import FakeClient, ask, fake_info

FOLDER = Path(__file__).parents[1] / "data/agents"
RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
# File -> route, and what the header names.
CASES = {
    "codex_first_turn": (RESPONSES, "include, text.verbosity, reasoning.summary, tools[2].format,"
                         " tools[3], tools[4], tools[5]"),
    "codex_later_turn": (RESPONSES, "include, text.verbosity, reasoning.summary, tools[2].format,"
                         " tools[3], tools[4], tools[5], input[7]"),
    "claude_code_first_turn": (MESSAGES, "context_management"),
    "claude_code_later_turn": (MESSAGES, "context_management, messages[1].content[1],"
                               " messages[4].content[0], messages[4].content[1]"),
    "claude_code_web_search": (MESSAGES, "tools[0]"),
    "claude_code_count_tokens": (f"{MESSAGES}/count_tokens", "betas, thinking.display"),
    "opencode": (CHAT, None),
    "cline": (CHAT, None),
    "aider": (CHAT, "extra_headers, num_ctx"),
    "zed": (CHAT, None),
    "continue_edit": (CHAT, "store, prediction, verbosity"),
}  # fmt: skip
PATCH = '*** Begin Patch\n*** Add File: b.txt\n+"é" \\ \U0001f600\n*** End Patch\n'


def fixture(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def answering(text, **options):
    client = FakeClient(info=fake_info(max_position=65536, max_model_len=65536, num_blocks=8192))
    client.script = says(text, **options)
    return client


def send(name, client, **changes):
    path, _ = CASES[name]
    return ask(("POST", path, {"json": {**fixture(name), **changes}}), client=client)[0]


def test_every_fixture_is_sent():
    assert {path.stem for path in FOLDER.glob("*.json")} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_request_of_an_agent_gets_an_answer(name, is_stream):
    path, ignored = CASES[name]
    client = answering("Done.")
    body = fixture(name)
    if not is_stream:
        body.pop("stream_options", None)
        body.pop("stream", None)
    (response,) = ask(("POST", path, {"json": body}), client=client)
    assert response.status_code == 200, response.text
    assert response.headers.get("x-tiercel-ignored") == ignored
    if "count" in path:
        assert response.json()["input_tokens"] > 100
        return
    if not is_stream:
        assert "Done." in response.text
        return
    last = read_events(response.content)[-1][1]
    assert last == "[DONE]" or last["type"] in ("response.completed", "message_stop")


def test_the_history_of_codex_reaches_the_model():
    client = answering("Done.")
    assert send("codex_later_turn", client).status_code == 200
    prompt = prompt_of(client)
    for text in (
        '{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\\n*** Delete File: a.txt',
        "Success. Updated the following files:\nD a.txt",
        '{"name": "exec_command", "arguments": {"cmd": "printf \'x"}}',
        "*** Add File: ",  # the grammar is told
        "The input is free text, not JSON.",
    ):
        assert text in prompt
    assert "web_search" not in prompt
    assert "mcp__docs__" not in prompt


@pytest.mark.parametrize("group", [1, 5, 1000])
def test_codex_gets_a_freeform_call(group):
    arguments = json.dumps({"input": PATCH})
    text = f"Let me.\n{called('apply_patch', arguments)}"
    response = send("codex_first_turn", answering(text, group=group))
    values, last = read_freeform(response)
    _, item = last["response"]["output"]
    assert item == {
        "type": "custom_tool_call", "id": item["id"], "call_id": item["call_id"],
        "name": "apply_patch", "input": PATCH, "status": "completed",
    }  # fmt: skip
    assert item["id"].startswith("ctc_")
    assert item["call_id"].startswith("call_")
    deltas = [v["delta"] for v in values if v["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH
    assert group > 5 or len(deltas) > 5
    plain = send("codex_first_turn", answering(text, group=group), stream=False).json()
    assert [i["type"] for i in plain["output"]] == ["message", "custom_tool_call"]
    assert plain["output"][1]["input"] == PATCH
    assert [tool["type"] for tool in plain["tools"]] == ["function", "function", "custom"]


def read_freeform(response):
    """The events of a stream; those of freeform calls are checked here."""
    values = [value for _, value in read_events(response.content)]
    done = [v for v in values if v["type"] == "response.custom_tool_call_input.done"]
    added = [v["item"] for v in values if v["type"] == "response.output_item.added"]
    assert [v["item_id"] for v in done] == [i["id"] for i in added if "input" in i]
    return values, values[-1]


def test_a_freeform_call_beside_a_function():
    calls = [called("exec_command", '{"cmd": "ls"}'), called("apply_patch", '{"input": "x"}')]
    _, last = read_freeform(send("codex_first_turn", answering("\n".join(calls))))
    assert [item["type"] for item in last["response"]["output"]] == [
        "function_call", "custom_tool_call",
    ]  # fmt: skip


def test_a_freeform_call_that_the_length_cuts_is_incomplete():
    text = called("apply_patch", json.dumps({"input": PATCH}))
    client = answering(text[: text.index("Add File") + 3], reason="length")
    _, last = read_freeform(send("codex_first_turn", client))
    assert last["type"] == "response.incomplete"
    (item,) = last["response"]["output"]
    assert item["status"] == "incomplete"
    assert item["input"] == "*** Begin Patch\n*** Add"


def test_a_freeform_tool_can_be_demanded():
    client = answering(called("apply_patch", '{"input": ""}'))
    choice = {"type": "custom", "name": "apply_patch"}
    _, last = read_freeform(send("codex_first_turn", client, tool_choice=choice))
    assert last["response"]["output"][0]["input"] == ""
    assert client.submitted[0].grammar is not None
    for name, kind in (("web_search", "custom"), ("apply_patch", "function")):
        response = send("codex_first_turn", client, tool_choice={"type": kind, "name": name})
        assert response.json()["error"]["param"] == "tool_choice"


def test_a_tool_of_the_vendor_cannot_be_demanded():
    for choice in ({"type": "tool", "name": "web_search"}, {"type": "any"}):
        response = send("claude_code_web_search", answering("x"), tool_choice=choice)
        assert response.status_code == 400
        assert "tool_choice" in response.json()["error"]["message"]


def test_the_history_of_claude_code_reaches_the_model():
    client = answering("Done.")
    assert send("claude_code_later_turn", client).status_code == 200
    prompt = prompt_of(client)
    for text in (
        "You are Claude Code",
        "I'll read it.",
        "     1→hello",
        "[user] The user has changed the permission mode to plan.\n[assistant]",
        "It says hello.",
    ):
        assert text in prompt
    for text in ("EmwKAhgB", "EqgfCioIARgBIiQ3", "srvtoolu_01"):
        assert text not in prompt


def test_a_system_message_at_the_start_is_one():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    client = answering("x")
    assert send("claude_code_web_search", client, messages=messages).status_code == 200
    assert "[system] Be brief." in prompt_of(client)


def test_claude_code_gets_a_call_of_its_tool():
    text = called("Read", '{"file_path": "/a", "limit": 5}')
    response = send("claude_code_first_turn", answering(text), stream=False)
    (block,) = response.json()["content"]
    assert (block["name"], block["input"]) == ("Read", {"file_path": "/a", "limit": 5})


def test_a_tool_of_a_server_of_tools_may_have_a_long_name():
    name = "mcp__plugin_browser_browser__browser_take_screenshot_of_an_element"
    tool = {**fixture("claude_code_first_turn")["tools"][0], "name": name}
    response = send("claude_code_first_turn", answering("x"), tools=[tool])
    assert response.status_code == 200, response.text


def test_cline_gets_the_rest_of_the_context():
    client = answering("Done.")
    (answer,) = read_chat(send("cline", client).content)[0].values()
    assert answer.content == "Done."
    assert client.submitted[0].params.max_tokens is None
    assert '{"path": "a"}' in prompt_of(client)


def test_events_of_codex_are_in_order():
    read_stream(send("codex_first_turn", answering("Done.")))
