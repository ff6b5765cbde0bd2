"""Responses and stream events of the Messages API: a response is a list of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from tiercel.errors import TiercelError
from tiercel.serve.api.anthropic.messages_types import (
    AnthropicAnswer,
    AnthropicUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from tiercel.serve.api.assembled_message import AssembledToolCall, assemble_message, merge_events
from tiercel.serve.generation.generation import Generation
from tiercel.serve.generation.output_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallStart,
)
from tiercel.serve.generation.output_queue import CompletionDelta
from tiercel.serve.generation.usage import Usage
from tiercel.serve.http import sse
from tiercel.serve.http.errors import anthropic_error_body
from tiercel.serve.http.object_fields import new_object_id

AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_CALL_PREFIX: Final = "call_"
_USE_PREFIX: Final = "toolu_"


def stop_reason(delta: CompletionDelta) -> StopReason:
    """The stop reason of a completion."""
    if delta.finish_reason == "length":
        return "max_tokens"
    if delta.finish_reason == "tool_calls":
        return "tool_use"
    return "stop_sequence" if isinstance(delta.stop_reason, str) else "end_turn"


def stop_sequence(delta: CompletionDelta) -> str | None:
    """The stop string that ended a completion."""
    return delta.stop_reason if isinstance(delta.stop_reason, str) else None


def usage_of(usage: Usage) -> AnthropicUsage:
    """The `usage`; tokens read from the cache are not among the input tokens."""
    return AnthropicUsage(
        input_tokens=usage.prompt - usage.cached,
        output_tokens=usage.completion,
        cache_read_input_tokens=usage.cached,
    )


class AnthropicWriter:
    """The wire format of one request."""

    def __init__(self, name: str, request_id: str) -> None:
        self._id = new_object_id("msg_")
        self._name = name
        self._request_id = request_id
        self._index = -1
        self._kind: type[Event] | None = None
        self._events: list[bytes] = []

    def make_body(self, generation: Generation, completions: Sequence[CompletionDelta]) -> object:
        """The body of a plain response."""
        delta = completions[0]
        return AnthropicAnswer(
            id=self._id,
            model=self._name,
            content=_blocks(delta.events) or [TextBlock("")],
            stop_reason=stop_reason(delta),
            stop_sequence=stop_sequence(delta),
            usage=usage_of(generation.usage()),
        )

    def write_start(self, generation: Generation) -> bytes:
        """The events before the first token."""
        message = AnthropicAnswer(
            id=self._id,
            model=self._name,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=usage_of(generation.usage()),
        )
        self._emit("message_start", {"message": message})
        self._emit("ping", {})
        return self._flush()

    def write_delta(self, generation: Generation, delta: CompletionDelta) -> bytes:
        """The events of one delta."""
        for event in merge_events(delta.events):
            self._add(event)
        if delta.finish_reason is not None:
            if self._index < 0:
                self._open(ContentDelta, {"type": "text", "text": ""})
            self._close()
            end = {"stop_reason": stop_reason(delta), "stop_sequence": stop_sequence(delta)}
            usage = usage_of(generation.usage())
            self._emit("message_delta", {"delta": end, "usage": usage})
        return self._flush()

    def write_end(self, generation: Generation) -> bytes:
        """The last event."""
        del generation
        self._emit("message_stop", {})
        return self._flush()

    def write_error(self, error: TiercelError) -> bytes:
        """The last event of a stream that failed."""
        return sse.encode_event(anthropic_error_body(error, self._request_id), "error")

    def write_keep_alive(self) -> bytes:
        """A `ping`, which clients ignore."""
        return sse.encode_event({"type": "ping"}, "ping")

    def _add(self, event: Event) -> None:
        if isinstance(event, ContentDelta):
            if self._kind is not ContentDelta:
                self._open(ContentDelta, {"type": "text", "text": ""})
            self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, ReasoningDelta):
            if self._kind is not ReasoningDelta:
                self._open(ReasoningDelta, {"type": "thinking", "thinking": "", "signature": ""})
            self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, ToolCallStart):
            block = {"type": "tool_use", "id": _use_id(event.id), "name": event.name, "input": {}}
            self._open(ToolCallStart, block)
        else:
            self._delta({"type": "input_json_delta", "partial_json": event.text})

    def _open(self, kind: type[Event], block: Mapping[str, object]) -> None:
        self._close()
        self._kind = kind
        self._index += 1
        self._emit("content_block_start", {"index": self._index, "content_block": block})

    def _close(self) -> None:
        if self._kind is not None:
            self._emit("content_block_stop", {"index": self._index})
            self._kind = None

    def _delta(self, delta: Mapping[str, object]) -> None:
        self._emit("content_block_delta", {"index": self._index, "delta": delta})

    def _emit(self, name: str, fields: Mapping[str, object]) -> None:
        self._events.append(sse.encode_event({"type": name, **fields}, name))

    def _flush(self) -> bytes:
        data = b"".join(self._events)
        self._events.clear()
        return data


def _blocks(events: Sequence[Event]) -> list[AnswerBlock]:
    """The blocks of a whole completion, in the order of its stream."""
    calls = iter(assemble_message(events).calls)
    blocks: list[AnswerBlock] = []
    for event in merge_events(events):
        if isinstance(event, ContentDelta):
            blocks.append(TextBlock(event.text))
        elif isinstance(event, ReasoningDelta):
            blocks.append(ThinkingBlock(event.text))
        elif isinstance(event, ToolCallStart):
            blocks.append(_tool_use(next(calls)))
    return blocks


def _use_id(call_id: str) -> str:
    return f"{_USE_PREFIX}{call_id.removeprefix(_CALL_PREFIX)}"


def _tool_use(call: AssembledToolCall) -> ToolUseBlock:
    """A call as a block; arguments that `max_tokens` has cut are not JSON and become empty."""
    try:
        given = msgspec.json.decode(call.arguments, type=dict[str, object])
    except msgspec.MsgspecError:
        given = {}
    return ToolUseBlock(_use_id(call.id), call.name, given)
