"""Tools for templates that know none: they become text of messages."""

import json

from tests.serve.generation.tools.call_writers import LOOK_UP, MIXED, NOW
from tiercel.serve.generation.tools.tool_prompt import write_tools


def test_tools_as_text():
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"é": 1}}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Sure.", "tool_calls": [call, call]},
        {"role": "tool", "content": "1 o'clock", "tool_call_id": "1"},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": ""},
    ]
    before = json.dumps(messages)
    written = write_tools(messages, (LOOK_UP, NOW))
    assert json.dumps(messages) == before
    assert [message["role"] for message in written] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    system = written[0]["content"]
    assert system.startswith("Be brief.\n\n")
    described = [json.loads(line) for line in system.splitlines()[-2:]]
    assert [entry["name"] for entry in described] == ["look_up", "now"]
    assert described[0]["parameters"] == LOOK_UP.parameters
    body = '<tool_call>\n{"name": "now", "arguments": {"é": 1}}\n</tool_call>'
    assert written[2] == {"role": "assistant", "content": f"Sure.\n{body}\n{body}"}
    assert written[3]["content"] == (
        "<tool_response>\n1 o'clock\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    )
    assert write_tools(messages[1:2], (NOW,))[0]["role"] == "system"
    assert write_tools(messages[1:2], ()) == messages[1:2]
    assert MIXED.name not in system
