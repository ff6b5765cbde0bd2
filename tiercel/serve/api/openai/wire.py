"""What OpenAI's chat and raw completions have in common on the wire."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import UNSET, UnsetType

from tiercel.serve.api.fields import StreamOptions
from tiercel.serve.api.openai.types import (
    CompletionDetails,
    FinishReason,
    PromptDetails,
    PromptProgressObject,
    UsageObject,
)
from tiercel.serve.generation.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from tiercel.serve.generation.generation import Generation
from tiercel.serve.generation.pieces import Piece, PromptProgress, Usage
from tiercel.serve.served_model import ServedModel
from tiercel.version import __version__


@dataclass(slots=True)
class Call:
    """A whole tool call."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Said:
    """What an answer says, whole."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(16)}"


def fingerprint(model: ServedModel) -> str:
    """Names what equal seeds need for equal answers: build, model file, device and dtype."""
    info = model.info
    parts = (__version__, info.model_name, info.architecture, info.device, info.dtype)
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def usage_object(usage: Usage) -> UsageObject:
    """The `usage` of a whole answer."""
    return UsageObject(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        total_tokens=usage.prompt + usage.completion,
        prompt_tokens_details=PromptDetails(usage.cached),
        completion_tokens_details=CompletionDetails(usage.reasoning),
    )


def progress_object(progress: PromptProgress) -> PromptProgressObject:
    """The `prompt_progress` of a chunk."""
    return PromptProgressObject(
        total=progress.total,
        cache=progress.cached,
        processed=progress.processed,
        time_ms=round(1000 * progress.seconds),
    )


class UsageMeter:
    """What a stream says of its usage, chunk by chunk."""

    def __init__(self, options: StreamOptions | None) -> None:
        self._has_total = options is not None and bool(options.include_usage)
        self._is_continuous = options is not None and bool(options.continuous_usage_stats)
        self._num_tokens: dict[int, int] = {}

    def count(self, piece: Piece) -> None:
        """Note the tokens of a piece that is about to be sent."""
        self._num_tokens[piece.index] = piece.num_tokens

    def so_far(self, generation: Generation) -> UsageObject | UnsetType | None:
        """The `usage` of a chunk with choices."""
        if self._is_continuous:
            # The engine may be ahead of the reader: only what was sent counts.
            usage = replace(generation.usage(), completion=sum(self._num_tokens.values()))
            return usage_object(usage)
        return None if self._has_total else UNSET

    def total(self, generation: Generation) -> UsageObject | None:
        """The `usage` of the chunk behind all choices; None if it was not asked for."""
        return usage_object(generation.usage()) if self._has_total else None


_ENDS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
}


def end_of(piece: Piece) -> FinishReason:
    """Why a whole answer ended."""
    return _ENDS[piece.finish_reason or ""]


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbours of one kind, and of one call, made one."""
    runs: list[list[Event]] = []
    for event in events:
        if runs and _belongs(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [run[0] if len(run) == 1 else _merged(run) for run in runs]


def _belongs(earlier: Event, event: Event) -> bool:
    if type(earlier) is not type(event) or isinstance(event, ToolCallStart):
        return False
    return getattr(earlier, "index", None) == getattr(event, "index", None)


def _merged(run: list[Event]) -> Event:
    text = "".join(event.text for event in run if not isinstance(event, ToolCallStart))
    if isinstance(run[0], ToolCallArguments):
        return ToolCallArguments(run[0].index, text)
    return ReasoningDelta(text) if isinstance(run[0], ReasoningDelta) else ContentDelta(text)


def said(events: Iterable[Event]) -> Said:
    """Put an answer together."""
    content, reasoning = [], []
    result = Said()
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, ContentDelta):
            content.append(event.text)
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, ToolCallStart):
            result.calls.append(Call(event.id, event.name))
        else:
            arguments.setdefault(event.index, []).append(event.text)
    for index, pieces in arguments.items():
        result.calls[index].arguments = "".join(pieces)
    result.content, result.reasoning = "".join(content), "".join(reasoning)
    return result
