"""What the Responses API takes, brought to the messages that every conversation becomes."""

from __future__ import annotations

from collections.abc import Sequence

from tiercel.errors import InvalidRequestError
from tiercel.serve.chat_messages import (
    FunctionCall,
    FunctionSpec,
    Message,
    Part,
    ToolCall,
    part_text,
    read_arguments,
)
from tiercel.serve.errors import escaped, refusal, unsupported
from tiercel.serve.responses_types import InputItem, ResponsesRequest, ResponseTool


class _Conversation:
    """Collects messages; what one turn of the assistant is made of becomes one message."""

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
        InvalidRequestError: naming the item; code `unsupported_content` for what is no text.
    """
    conversation = _Conversation()
    if body.instructions is not None:
        conversation.add(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        conversation.add(Message(role="user", content=body.input))
        return conversation.messages
    call_ids: set[str] = set()
    for place, item in enumerate(body.input):
        _add_item(conversation, item, f"input[{place}]", call_ids)
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
        if item.content is not None:  # without it there is nothing that a template could show
            conversation.add_reasoning(_text(item.content, f"{param}.content"))
    elif item.type == "function_call":
        call = _call(item, param)
        call_ids.add(call.id)
        conversation.add_call(call)
    elif item.type == "function_call_output":
        if item.call_id is None or item.call_id not in call_ids:
            shown = "missing" if item.call_id is None else escaped(repr(item.call_id), 80)
            raise InvalidRequestError(
                f"{param}.call_id is {shown}; it must name an earlier function_call.",
                param=f"{param}.call_id",
            )
        text = _text(item.output, f"{param}.output")
        conversation.add(Message(role="tool", content=text, tool_call_id=item.call_id))
    else:
        shown = escaped(repr(item.type), 40)
        raise refusal(
            400,
            "unsupported_content",
            f"{param} has the type {shown}.",
            hint="Use message, function_call, function_call_output or reasoning.",
            param=f"{param}.type",
        )


def _call(item: InputItem, param: str) -> ToolCall:
    if item.call_id is None or item.name is None or item.arguments is None:
        raise InvalidRequestError(f"{param} needs call_id, name and arguments.", param=param)
    read_arguments(item.arguments, f"{param}.arguments")
    function = FunctionCall(name=item.name, arguments=item.arguments)
    return ToolCall(id=item.call_id, function=function)


def _text(content: str | list[Part] | None, param: str) -> str:
    if content is None:
        raise InvalidRequestError(f"{param} must be a string or a list of text parts.", param=param)
    if isinstance(content, str):
        return content
    return "\n".join(part_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def input_tools(tools: Sequence[ResponseTool]) -> list[FunctionSpec]:
    """The functions that the model may call.

    Raises:
        InvalidRequestError: 400 `unsupported_parameter` for a tool of another kind.
    """
    specs = []
    for place, tool in enumerate(tools):
        if tool.type != "function":
            shown = escaped(repr(tool.type), 40)
            raise unsupported(f"tools[{place}].type", f"is {shown}; only functions are supported")
        if tool.name is None:
            raise InvalidRequestError(
                f"tools[{place}].name must be given.", param=f"tools[{place}].name"
            )
        specs.append(
            FunctionSpec(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
        )
    return specs
