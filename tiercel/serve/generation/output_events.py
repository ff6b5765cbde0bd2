"""Events of a model's output, and the interface of the parsers that split its text into them.

Parsers are incremental: however a text is cut into pushes, the joined events are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """New text of the visible output."""

    text: str

    @property
    def num_chars(self) -> int:
        """Characters that it holds."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of the model's reasoning."""

    text: str

    @property
    def num_chars(self) -> int:
        """Characters that it holds."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a tool call; its arguments follow.

    Attributes:
        index: number of the call in its completion, from 0.
        id: ``call_`` and 24 characters.
        name: name of the tool.
    """

    index: int
    id: str
    name: str

    @property
    def num_chars(self) -> int:
        """Characters that it holds."""
        return len(self.id) + len(self.name)


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """New JSON text of a call's arguments; all texts of a call joined are the whole."""

    index: int
    text: str

    @property
    def num_chars(self) -> int:
        """Characters that it holds."""
        return len(self.text)


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class Parser(Protocol):
    """A parser of one completion; it keeps the state of that completion."""

    def push(self, text: str) -> list[Event]:
        """Add text; return the events that are certain now."""
        ...

    def finish(self) -> list[Event]:
        """End the text; return what was held back."""
        ...


class ReasoningParser(Parser, Protocol):
    """A parser that separates reasoning from content: it returns no tool calls."""

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        ...
