"""The tool prompt: tools as plain text in messages, for chat templates without tools.

The text has Hermes' format, which many models have seen in training: tools are in the system
message, calls in the assistant's messages, results in the user's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from tiercel.serve.generation.tools.parsers.format import ToolSpec

_INTRODUCTION: Final = (
    "You can call functions. To call one, write only this, with its name and its arguments:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>\n'
    "The functions, as JSON:\n"
)

Message = Mapping[str, object]


def write_tools(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[dict[str, object]]:
    """Messages in which tools, calls and results are text.

    Args:
        messages: messages for a chat template: arguments of calls are objects.
        tools: tools that may be called; empty if only earlier calls are written.

    Returns:
        New messages with the roles system, user and assistant; there may be fewer.
    """
    written: list[dict[str, object]] = []
    is_result = False
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if is_result:  # templates of this format put consecutive results into one message
                written[-1]["content"] = f"{written[-1]['content']}\n{result}"
            else:
                written.append({"role": "user", "content": result})
            is_result = True
            continue
        is_result = False
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            plain["content"] = "\n".join(filter(None, [_text(message), *map(_call, calls)]))
        written.append(plain)
    if tools:
        _introduce(written, tools)
    return written


def _introduce(messages: list[dict[str, object]], tools: Sequence[ToolSpec]) -> None:
    text = _INTRODUCTION + "\n".join(_described(tool) for tool in tools)
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = f"{_text(messages[0])}\n\n{text}"
    else:
        messages.insert(0, {"role": "system", "content": text})


def _described(tool: ToolSpec) -> str:
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return json.dumps(function, ensure_ascii=False)


def _call(call: Mapping[str, Mapping[str, object]]) -> str:
    function = call["function"]
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def _text(message: Message) -> str:
    """The content of a message as text; parts are joined by line ends."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content)
    return content if isinstance(content, str) else ""
