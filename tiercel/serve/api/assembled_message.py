"""Events of a completion assembled: neighbours merged into one, or all into a whole message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tiercel.serve.generation.output_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass(slots=True)
class AssembledToolCall:
    """A whole tool call."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class AssembledMessage:
    """The whole message of a completion."""

    content: str = ""
    reasoning: str = ""
    calls: list[AssembledToolCall] = field(default_factory=list)


def merge_events(events: Iterable[Event]) -> list[Event]:
    """The same events, with neighbours of one kind (and of one call) merged."""
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


def assemble_message(events: Iterable[Event]) -> AssembledMessage:
    """Assemble the whole message of a completion."""
    content, reasoning = [], []
    result = AssembledMessage()
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, ContentDelta):
            content.append(event.text)
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, ToolCallStart):
            result.calls.append(AssembledToolCall(event.id, event.name))
        else:
            arguments.setdefault(event.index, []).append(event.text)
    for index, texts in arguments.items():
        result.calls[index].arguments = "".join(texts)
    result.content, result.reasoning = "".join(content), "".join(reasoning)
    return result
