"""Input items of the Responses API to the messages of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tiercel.errors import InvalidRequestError
from tiercel.serve.api.openai.custom_tools import PARAMETERS, write_arguments
from tiercel.serve.api.openai.responses_types import InputItem, ResponsesRequest, ResponseTool
from tiercel.serve.generation.chat_messages import (
    FunctionCall,
    FunctionSpec,
    Message,
    Part,
    ToolCall,
    part_text,
    read_arguments,
)
from tiercel.serve.http.errors import client_error, escaped

CUSTOM: Final = "custom"
HONOURED_TOOLS: Final = ("function", CUSTOM)
# Items of hosted tools: OpenAI has their results, or the text after them reports them.
IGNORED_ITEMS: Final = frozenset({
    "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call",
    "tool_search_call", "tool_search_output", "mcp_list_tools", "ghost_snapshot",
})  # fmt: skip


class _Conversation:
    """Collects messages; the items of one assistant's turn become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None

    def add(self, message: Message) -> None:
        self._turn = None
        self.messages.append(message)

    def add_reasoning(self, text: str) -> None:
        turn = self._turn
        if turn is None or turn.content is not None or turn.tool_calls:
            turn = self._begin()
        turn.reasoning_content = (turn.reasoning_content or "") + text

    def add_text(self, text: str) -> None:
        turn = self._turn
        if turn is None or turn.content is not None or turn.tool_calls:
            turn = self._begin()
        turn.content = text

    def add_call(self, call: ToolCall) -> None:
        turn = self._turn or self._begin()
        turn.tool_calls = [*(turn.tool_calls or ()), call]

    def _begin(self) -> Message:
        self._turn = Message(role="assistant")
        self.messages.append(self._turn)
        return self._turn


def input_messages(body: ResponsesRequest) -> list[Message]:
    """The messages of a request, instructions first.

    Raises:
        InvalidRequestError: naming the item; code `unsupported_content` if it is no text.
    """
    conversation = _Conversation()
    if body.instructions is not None:
        conversation.add(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        conversation.add(Message(role="user", content=body.input))
        return conversation.messages
    call_ids: set[str] = set()
    for index, item in enumerate(body.input):
        _add_item(conversation, item, f"input[{index}]", call_ids)
    return conversation.messages


def _add_item(conversation: _Conversation, item: InputItem, param: str, call_ids: set[str]) -> None:
    if item.type == "message":
        text = _text(item.content, f"{param}.content")
        if item.role is None:
            raise InvalidRequestError(f"{param}.role must be given.", param=f"{param}.role")
        if item.role == "assistant":
            conversation.add_text(text)
        else:
            conversation.add(Message(role=item.role, content=text))
    elif item.type == "reasoning":
        if item.content is not None:  # without content there is nothing to render
            conversation.add_reasoning(_text(item.content, f"{param}.content"))
    elif item.type in _CALLS:
        call = _CALLS[item.type](item, param)
        call_ids.add(call.id)
        conversation.add_call(call)
    elif item.type in ("function_call_output", "custom_tool_call_output"):
        if item.call_id is None or item.call_id not in call_ids:
            shown = "missing" if item.call_id is None else escaped(repr(item.call_id), 80)
            raise InvalidRequestError(
                f"{param}.call_id is {shown}; it must name an earlier call.",
                param=f"{param}.call_id",
            )
        text = _text(item.output, f"{param}.output")
        conversation.add(Message(role="tool", content=text, tool_call_id=item.call_id))
    elif item.type not in IGNORED_ITEMS:
        shown = escaped(repr(item.type), 40)
        raise client_error(
            400,
            "unsupported_content",
            f"{param} has the type {shown}.",
            hint="Use message, reasoning, function_call or custom_tool_call and their outputs.",
            param=f"{param}.type",
        )


def _call(item: InputItem, param: str) -> ToolCall:
    if item.call_id is None or item.name is None or item.arguments is None:
        raise InvalidRequestError(f"{param} needs call_id, name and arguments.", param=param)
    read_arguments(item.arguments, f"{param}.arguments")
    function = FunctionCall(name=item.name, arguments=item.arguments)
    return ToolCall(id=item.call_id, function=function)


def _custom_call(item: InputItem, param: str) -> ToolCall:
    if item.call_id is None or item.name is None or item.input is None:
        raise InvalidRequestError(f"{param} needs call_id, name and input.", param=param)
    function = FunctionCall(name=item.name, arguments=write_arguments(item.input))
    return ToolCall(id=item.call_id, function=function)


_CALLS: Final = {"function_call": _call, "custom_tool_call": _custom_call}


def _text(content: str | list[Part] | None, param: str) -> str:
    if content is None:
        raise InvalidRequestError(f"{param} must be a string or a list of text parts.", param=param)
    if isinstance(content, str):
        return content
    return "\n".join(part_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def input_tools(tools: Sequence[ResponseTool]) -> list[FunctionSpec]:
    """The functions that the model may call; a custom tool is a function with one text.

    Hosted tools of OpenAI are left out: see `ignored_input`.

    Raises:
        InvalidRequestError: a tool has no name.
    """
    specs = []
    for index, tool in enumerate(tools):
        if tool.type not in HONOURED_TOOLS:
            continue
        if tool.name is None:
            raise InvalidRequestError(
                f"tools[{index}].name must be given.", param=f"tools[{index}].name"
            )
        is_custom = tool.type == CUSTOM
        specs.append(
            FunctionSpec(
                name=tool.name,
                description=_custom_description(tool) if is_custom else tool.description,
                parameters=PARAMETERS if is_custom else tool.parameters,
                strict=tool.strict,
            )
        )
    return specs


def _custom_description(tool: ResponseTool) -> str:
    """The description of a custom tool; it includes the grammar, which is not enforced."""
    parts = [tool.description or "", "The input is free text, not JSON."]
    if tool.format is not None and tool.format.definition is not None:
        parts.append(f"It follows this {tool.format.syntax} grammar:\n{tool.format.definition}")
    return "\n".join(filter(None, parts))


def ignored_input(body: ResponsesRequest) -> list[str]:
    """The tools and items of a request that are left out, and grammars that are not enforced."""
    names = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type not in HONOURED_TOOLS:
            names.append(f"tools[{index}]")
        elif tool.format is not None and tool.format.definition is not None:
            names.append(f"tools[{index}].format")
    if isinstance(body.input, list):
        items = enumerate(body.input)
        names += [f"input[{index}]" for index, item in items if item.type in IGNORED_ITEMS]
    return names
