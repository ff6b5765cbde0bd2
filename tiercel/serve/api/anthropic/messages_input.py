"""Messages and blocks of the Messages API to the messages of a conversation."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

import msgspec

from tiercel.errors import InvalidRequestError
from tiercel.serve.api.anthropic.messages_types import (
    AnthropicMessage,
    AnthropicTool,
    Block,
    PromptFields,
)
from tiercel.serve.api.compat_fields import given_fields
from tiercel.serve.generation.chat_messages import (
    FunctionCall,
    FunctionSpec,
    Message,
    Part,
    ToolCall,
)
from tiercel.serve.http.errors import client_error, escaped

OWN_TOOLS: Final = (None, "custom")
_HOSTED_BLOCKS: Final = ("redacted_thinking", "server_tool_use", "mcp_tool_use")


def template_input(body: PromptFields) -> list[Message]:
    """The messages of a request, the system text first.

    Raises:
        InvalidRequestError: naming the block; code `unsupported_content` for an image, a document
            or another block that is no text.
    """
    messages: list[Message] = []
    if body.system is not None:
        text = _text(body.system, "system")
        if text:
            messages.append(Message(role="system", content=text))
    if not body.messages:
        raise InvalidRequestError("messages is empty.", hint="Send one.", param="messages")
    use_ids: set[str] = set()
    for index, message in enumerate(body.messages):
        param = f"messages[{index}].content"
        if message.role == "system" and all(m.role == "system" for m in messages):
            text = _text(message.content, param)
            messages.append(Message(role="system", content=text))
        elif message.role != "assistant":
            # Templates accept a system text only at the start.
            _add_user(messages, message, param, use_ids)
        else:
            _add_assistant(messages, message, param)
            use_ids.update(call.id for call in messages[-1].tool_calls or ())
    return messages


def _add_user(
    messages: list[Message], message: AnthropicMessage, param: str, use_ids: Set[str]
) -> None:
    """Add a user's turn; tool results become separate messages before its text."""
    texts: list[Part] = []
    for block, name in _blocks(message, param):
        if block.type == "tool_result":
            messages.append(_tool_result(block, name, use_ids))
        else:
            texts.append(Part(type="text", text=_block_text(block, name)))
    if not texts:
        return
    last = messages[-1] if messages else None
    if last is not None and last.role == "user" and isinstance(last.content, list):
        last.content += texts  # consecutive turns of one role are one turn
    else:
        messages.append(Message(role="user", content=texts))


def _add_assistant(messages: list[Message], message: AnthropicMessage, param: str) -> None:
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        last = Message(role="assistant", content="")
        messages.append(last)
    for block, name in _blocks(message, param):
        if block.type == "thinking":
            last.reasoning_content = (last.reasoning_content or "") + (block.thinking or "")
        elif block.type == "tool_use":
            last.tool_calls = [*(last.tool_calls or ()), _tool_use(block, name)]
        elif not _is_ignored(block):
            assert isinstance(last.content, str), "it was made here"
            last.content += _block_text(block, name)


def _blocks(message: AnthropicMessage, param: str) -> list[tuple[Block, str]]:
    if isinstance(message.content, str):
        return [(Block(type="text", text=message.content), param)]
    return [(block, f"{param}[{index}]") for index, block in enumerate(message.content)]


def _is_ignored(block: Block) -> bool:
    """Whether a block of the assistant belongs to a hosted tool or cannot be read here."""
    return block.type in _HOSTED_BLOCKS or block.type.endswith("_tool_result")


def ignored_fields(body: PromptFields) -> list[str]:
    """The fields, tools and blocks of a request that are left out."""
    names = given_fields(body, ("context_management",))
    if body.thinking is not None and body.thinking.display == "omitted":
        names.append("thinking.display")
    for index, tool in enumerate(body.tools or ()):
        names += [f"tools[{index}]"] * (tool.type not in OWN_TOOLS)
    for index, message in enumerate(body.messages):
        if message.role == "assistant":
            blocks = _blocks(message, f"messages[{index}].content")
            names += [name for block, name in blocks if _is_ignored(block)]
    return names


def _tool_use(block: Block, param: str) -> ToolCall:
    if block.id is None or block.name is None or block.input is None:
        raise InvalidRequestError(f"{param} needs id, name and input.", param=param)
    arguments = msgspec.json.encode(block.input).decode()
    return ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=arguments))


def _tool_result(block: Block, param: str, use_ids: Set[str]) -> Message:
    if block.tool_use_id is None:
        raise InvalidRequestError(f"{param}.tool_use_id must be given.", param=param)
    if block.tool_use_id not in use_ids:
        shown = escaped(repr(block.tool_use_id), 80)
        raise InvalidRequestError(
            f"{param}.tool_use_id is {shown}, which no earlier tool_use has.", param=param
        )
    text = "" if block.content is None else _text(block.content, f"{param}.content")
    if block.is_error:
        text = f"Error: {text}"  # templates have no field for it
    return Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _text(content: str | Sequence[Block], param: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{param}[{i}]") for i, block in enumerate(content))


def _block_text(block: Block, param: str) -> str:
    if block.type != "text":
        shown = escaped(repr(block.type), 40)
        raise client_error(
            400,
            "unsupported_content",
            f"{param} has the type {shown}, which is not supported here.",
            hint="This model takes text.",
            param=param,
        )
    if block.text is None:
        raise InvalidRequestError(f"{param}.text must be given.", param=f"{param}.text")
    return block.text


def template_functions(tools: Sequence[AnthropicTool]) -> list[FunctionSpec]:
    """The functions that the model may call.

    Hosted tools of Anthropic are left out: see `ignored_fields`.

    Raises:
        InvalidRequestError: a tool has no schema.
    """
    specs = []
    for index, tool in enumerate(tools):
        if tool.type not in OWN_TOOLS:
            continue
        if tool.input_schema is None:
            raise InvalidRequestError(
                f"tools[{index}].input_schema must be given.", param=f"tools[{index}].input_schema"
            )
        specs.append(
            FunctionSpec(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            )
        )
    return specs
