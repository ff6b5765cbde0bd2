"""Types of the Responses API: the request, and the items of a response.

Source: the reference of OpenAI's Responses API.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct

from tiercel.serve.api.openai.completion_types import PromptDetails, TokenLogprob
from tiercel.serve.api.sampling_fields import Logprobs, SamplingFields, TokenBound
from tiercel.serve.generation.chat_messages import Part, ToolName

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class InputItem(Struct, kw_only=True):
    """An item of the input: a message, a call, its output, or reasoning."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    name: ToolName | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None
    # Fields of an item from an earlier response.
    id: object = UNSET
    status: object = UNSET
    summary: object = UNSET
    encrypted_content: object = UNSET
    phase: object = UNSET


class CustomFormat(Struct, kw_only=True):
    """The format of the input of a custom tool."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponseTool(Struct, kw_only=True):
    """A tool: a function or a custom (freeform) tool; other types are ignored."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None


class ResponseToolChoice(Struct, kw_only=True):
    """A `tool_choice` that names a function or a custom tool."""

    type: str
    name: ToolName | None = None


class TextFormat(Struct, kw_only=True):
    """The structure of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | None = None
    strict: bool | None = None


class TextConfig(Struct, kw_only=True):
    """The `text` of a request."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Struct, kw_only=True):
    """The `reasoning` of a request."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class EventOptions(Struct, kw_only=True):
    """The `stream_options` of a request."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body of a request."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: TokenBound | None = None
    max_tokens: TokenBound | None = None
    max_completion_tokens: TokenBound | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    top_logprobs: Logprobs | None = None
    include: list[str] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    client_metadata: object = UNSET
    background: bool | None = None
    previous_response_id: object = UNSET
    conversation: object = UNSET
    prompt: object = UNSET
    max_tool_calls: object = UNSET
    moderation: object = UNSET
    context_management: object = UNSET
    add_special_tokens: object = UNSET
    n: object = UNSET
    logprobs: object = UNSET
    prompt_logprobs: object = UNSET
    response_format: object = UNSET
    structured_outputs: object = UNSET
    guided_json: object = UNSET
    guided_regex: object = UNSET
    guided_choice: object = UNSET
    guided_grammar: object = UNSET
    json_schema: object = UNSET
    regex: object = UNSET


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of the model's message."""

    text: str = ""
    annotations: list[None] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Text of the model's thinking."""

    text: str = ""


class OutputMessage(Struct, tag_field="type", tag="message"):
    """The message of the model."""

    id: str
    content: list[OutputText]
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    """The reasoning of the model."""

    id: str
    content: list[ReasoningText]
    status: Status = "in_progress"
    summary: list[None] = []


class OutputCall(Struct, tag_field="type", tag="function_call"):
    """A function that the model calls; `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


class OutputCustomCall(Struct, tag_field="type", tag="custom_tool_call"):
    """A custom tool that the model calls; `input` is any text."""

    id: str
    call_id: str
    name: str
    input: str = ""
    status: Status = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputDetails(PromptDetails, frozen=True):
    """Prompt tokens found in the prefix cache; writing to the cache is free."""

    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """Output tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(Struct, frozen=True):
    """The error of a failed response."""

    code: str
    message: str


class Incomplete(Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(Struct, kw_only=True):
    """A response, or its state so far."""

    id: str
    created_at: int
    model: str
    status: Status
    output: list[OutputItem]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice
    tools: list[ResponseTool]
    text: TextConfig
    reasoning: ReasoningConfig
    truncation: Literal["disabled", "auto"]
    top_logprobs: int
    metadata: dict[str, str]
    instructions: str | None
    max_output_tokens: int | None
    user: str | None
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    usage: ResponseUsage | None = None
    completed_at: int | None = None
    previous_response_id: None = None
    background: Literal[False] = False
    store: Literal[False] = False
    object: Literal["response"] = "response"
