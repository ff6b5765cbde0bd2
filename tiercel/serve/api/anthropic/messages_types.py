"""Anthropic's Messages API as types.

Source: the reference of that API.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct

from tiercel.params import LIMITS
from tiercel.serve.api.sampling_fields import MinShare, PositiveCount, Share, StopText, TopK
from tiercel.serve.generation.chat_messages import ToolName


class Block(Struct, kw_only=True):
    """A block of a message; what other kinds of blocks hold is not read."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    name: ToolName | None = None
    input: dict[str, object] | None = None
    tool_use_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class AnthropicMessage(Struct, kw_only=True):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Struct, kw_only=True):
    """A tool; other kinds than those of the client are ignored."""

    name: ToolName
    input_schema: dict[str, object] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class AnthropicToolChoice(Struct, kw_only=True):
    """Whether and which tools are used."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """Whether the model thinks, and its thinking budget."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: PositiveCount | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, kw_only=True):
    """The structure of the text."""

    type: Literal["json_schema"]
    schema: dict[str, object]


class OutputConfig(Struct, kw_only=True):
    """The `output_config` of a request."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class PromptFields(Struct, kw_only=True):
    """The fields that make the prompt."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # These change no completion.
    cache_control: object = UNSET
    metadata: object = UNSET
    service_tier: object = UNSET
    inference_geo: object = UNSET
    speed: object = UNSET
    # Known, but not supported.
    container: object = UNSET
    mcp_servers: object = UNSET
    context_management: object = UNSET
    prefill: object = UNSET
    thread: object = UNSET


class CountRequest(PromptFields, kw_only=True):
    """The body of a request to count tokens."""


class MessagesRequest(PromptFields, kw_only=True):
    """The body of a request."""

    max_tokens: PositiveCount
    stop_sequences: Annotated[list[StopText], Meta(max_length=LIMITS.max_stop_strings)] | None = (
        None
    )
    temperature: MinShare | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    stream: bool | None = None


class CountAnswer(Struct, frozen=True):
    """The response to a request to count tokens."""

    input_tokens: int


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    """Text of the message."""

    text: str
    citations: None = None


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    """The model's thinking; it is not signed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A tool call."""

    id: str
    name: str
    input: dict[str, object]


class AnthropicUsage(Struct, frozen=True):
    """Tokens of a request; those read from the cache are not among the input tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class AnthropicAnswer(Struct, frozen=True):
    """The response."""

    id: str
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"
