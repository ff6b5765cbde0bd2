"""Chat messages: their types on the wire, and the dictionaries that chat templates expect.

Only text is accepted. A part with an image, audio or a file is refused; nothing is ever opened or
fetched. The arguments of earlier tool calls are JSON text on the wire and objects for a template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from tiercel.errors import InvalidRequestError
from tiercel.params import LIMITS, Limits
from tiercel.serve.generation.partial_json import close_object
from tiercel.serve.http.errors import client_error, escaped, unsupported_parameter

ToolName = Annotated[
    str, Meta(min_length=1, max_length=LIMITS.max_tool_name_chars, pattern="^[A-Za-z0-9_-]+$")
]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]
TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "reasoning_text"})

TemplateMessage = dict[str, object]


class Part(Struct, kw_only=True):
    """A content part of a message; fields of other part types are not read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, kw_only=True):
    """The function of a tool call; `arguments` is JSON text."""

    name: ToolName
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A tool call in an earlier message of the assistant."""

    id: CallId
    function: FunctionCall
    type: Literal["function"] = "function"


class Message(Struct, kw_only=True):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: object = UNSET
    audio: object = UNSET


class FunctionSpec(Struct, kw_only=True):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """A tool; its only type is a function."""

    function: FunctionSpec
    type: Literal["function"] = "function"


def check_tools(tools: Sequence[FunctionSpec], limits: Limits, param: str = "tools") -> None:
    """Check the number of tools and their names, and refuse duplicate names.

    Raises:
        InvalidRequestError: naming the tool.
    """
    if len(tools) > limits.max_tools:
        raise InvalidRequestError(
            f"{param} holds {len(tools)} tools.",
            hint=f"Use at most {limits.max_tools}.",
            param=param,
        )
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise InvalidRequestError(
                f"{param} holds two functions with the name {tool.name!r}.",
                param=f"{param}[{index}]",
            )
        seen.add(tool.name)
        if len(tool.name) > limits.max_tool_name_chars:
            raise InvalidRequestError(
                f"{param}[{index}] has a name of {len(tool.name)} characters.",
                hint=f"This server takes {limits.max_tool_name_chars}.",
                param=f"{param}[{index}]",
            )


def template_tools(tools: Sequence[FunctionSpec]) -> list[dict[str, object]]:
    """Tools as templates expect them."""
    described: list[dict[str, object]] = []
    for tool in tools:
        function: dict[str, object] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
        described.append({"type": "function", "function": function})
    return described


def template_messages(
    messages: Sequence[Message], limits: Limits, *, knows_developer: bool, param: str = "messages"
) -> list[TemplateMessage]:
    """Check messages and convert them for a chat template.

    Args:
        messages: messages of a request.
        limits: limits of this server.
        knows_developer: whether the template has a role `developer`; else it becomes `system`,
            which means the same.
        param: field that holds the messages.

    Raises:
        InvalidRequestError: naming the message; code `unsupported_content` for a part that is not
            text.
    """
    if not 1 <= len(messages) <= limits.max_messages:
        raise InvalidRequestError(
            f"{param} holds {len(messages)} messages.",
            hint=f"Send 1 to {limits.max_messages}.",
            param=param,
        )
    calls: dict[str, str] = {}
    return [
        _template_message(message, f"{param}[{index}]", calls, knows_developer=knows_developer)
        for index, message in enumerate(messages)
    ]


def _template_message(
    message: Message, param: str, calls: dict[str, str], *, knows_developer: bool
) -> TemplateMessage:
    for name in ("function_call", "audio"):
        if getattr(message, name) not in (UNSET, None):
            raise unsupported_parameter(f"{param}.{name}")
    is_system = message.role == "developer" and not knows_developer
    result: TemplateMessage = {"role": "system" if is_system else message.role}
    result["content"] = _content(message, param)
    if message.name is not None:
        result["name"] = message.name
    if message.role == "assistant":
        _add_assistant_fields(result, message, param, calls)
    elif message.tool_calls:
        raise _wrong(f"{param}.tool_calls", "belongs to messages of the assistant")
    if message.role == "tool":
        if message.tool_call_id is None:
            raise _wrong(f"{param}.tool_call_id", "must be given")
        if message.tool_call_id not in calls:
            shown = escaped(repr(message.tool_call_id), 80)
            raise _wrong(f"{param}.tool_call_id", f"is {shown}, which no earlier call has")
        result["tool_call_id"] = message.tool_call_id
        result.setdefault("name", calls[message.tool_call_id])
    return result


def _add_assistant_fields(
    result: TemplateMessage, message: Message, param: str, calls: dict[str, str]
) -> None:
    reasoning = message.reasoning_content
    reasoning = message.reasoning if reasoning is None else reasoning
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            _template_call(call, f"{param}.tool_calls[{index}]", calls)
            for index, call in enumerate(message.tool_calls)
        ]


def _template_call(call: ToolCall, param: str, calls: dict[str, str]) -> dict[str, object]:
    calls[call.id] = call.function.name
    arguments = read_arguments(call.function.arguments, f"{param}.function.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def read_arguments(text: str, param: str) -> dict[str, object]:
    """The arguments of a call, decoded from their JSON text.

    A call that `max_tokens` has cut comes back in the history of its conversation: the part of its
    arguments that is there counts.

    Raises:
        InvalidRequestError: the text is not a JSON object, nor the start of one.
    """
    try:
        value: Any = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        value = close_object(text)
    if not isinstance(value, dict):
        raise _wrong(param, f"is {escaped(repr(text), 80)}; it must be a JSON object as text")
    return value


def _content(message: Message, param: str) -> str | list[dict[str, str]]:
    content = message.content
    if content is None:
        if message.refusal is not None:
            return message.refusal
        has_more = message.tool_calls or message.reasoning_content or message.reasoning
        if message.role == "assistant" and has_more:
            return ""
        raise _wrong(f"{param}.content", "must be a string or a list of text parts")
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part_text(part, f"{param}.content[{index}]")}
        for index, part in enumerate(content)
    ]


def part_text(part: Part, param: str) -> str:
    """The text of a part.

    Raises:
        InvalidRequestError: the part is not text; nothing it names is opened or fetched.
    """
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in TEXT_PARTS and part.type != "refusal":
        shown = escaped(repr(part.type), 40)
        raise client_error(
            400,
            "unsupported_content",
            f"{param} has the type {shown}; this model takes text parts only.",
            param=param,
        )
    if text is None:
        raise _wrong(f"{param}.text", "must be a string")
    return text


def _wrong(param: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {rule}.", param=param)
