"""What the text of an answer is split into, and what a parser that splits it looks like.

Parsers are incremental: however a text is cut into pushes, the events joined are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the visible answer."""

    text: str

    @property
    def num_chars(self) -> int:
        """Characters that it holds."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's thinking."""

    text: str

    @property
    def num_chars(self) -> int:
        """Characters that it holds."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model calls a tool; its arguments follow.

    Attributes:
        index: calls of an answer are numbered from 0 up.
        id: ``call_`` and 24 characters.
        name: of the tool.
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
    """A piece of the JSON text of a call's arguments; the pieces of a call joined are the whole."""

    index: int
    text: str

    @property
    def num_chars(self) -> int:
        """Characters that it holds."""
        return len(self.text)


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class Parser(Protocol):
    """Splits one answer; it keeps the state of that answer."""

    def push(self, text: str) -> list[Event]:
        """Add text; return what is certain now."""
        ...

    def finish(self) -> list[Event]:
        """End the text: what was held back."""
        ...


class ReasoningParser(Parser, Protocol):
    """Splits thinking from the answer; gives `ReasoningDelta` and `ContentDelta` only."""

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends within the thinking."""
        ...
