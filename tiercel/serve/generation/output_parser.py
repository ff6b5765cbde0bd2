"""The tokens of one completion to events: reasoning, content and tool calls.

    token -> bytes -> text -> reasoning | content -> stop strings -> tool calls

Tokens are pushed one at a time, because a step may bring several and a stop string may end the
completion between two of them: the tokens generated after it are neither shown nor counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.request.request import Request
from tiercel.request.text_stream import TextStream
from tiercel.serve.generation.output_events import ContentDelta, Event, Parser, ReasoningParser
from tiercel.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of one completion; they keep its state.

    Attributes:
        reasoning: parser that separates reasoning from content; None for a model without reasoning.
        tools: parser that finds tool calls in the content; None for a request without tools.
        stops_in_reasoning: whether stop strings also end a completion inside its reasoning.
        needs_special: whether a parser reads the names of control tokens.
    """

    reasoning: ReasoningParser | None = None
    tools: Parser | None = None
    stops_in_reasoning: bool = False
    needs_special: bool = False


class OutputParser:
    """The parser of one completion as its tokens arrive.

    Attributes:
        num_reasoning_tokens: tokens of the reasoning so far, its markers included.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, parsers: Parsers) -> None:
        self._stream = TextStream(request, tokenizer, keeps_special=parsers.needs_special)
        self._parsers = parsers
        self.num_reasoning_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far, those of a matched stop string included."""
        return self._stream.num_tokens

    @property
    def matched(self) -> str | None:
        """The stop string that ended the completion."""
        return self._stream.matched

    @property
    def is_thinking(self) -> bool:
        """Whether the completion so far ends within the reasoning."""
        return self._parsers.reasoning is not None and self._parsers.reasoning.is_inside

    def close_thinking(self, closing: str) -> list[Event]:
        """End the reasoning with a marker that the model did not write."""
        # A character that is cut here stays cut: the text that follows is another generation.
        return self._reason(self._stream.finish_decoding() + closing)

    def push(self, token_id: int, *, is_stopped: bool) -> list[Event]:
        """Add a token; return the events that are certain now.

        Args:
            token_id: the token.
            is_stopped: whether the engine ended the completion here, for the reason ``stop``.
        """
        text = self._stream.decode(token_id, is_stopped=is_stopped)
        reasoning = self._parsers.reasoning
        if reasoning is None:
            return self._content(text) if text else []
        was_inside = reasoning.is_inside
        events = self._split(text) if text else []
        if was_inside or reasoning.is_inside:
            self.num_reasoning_tokens = self.num_tokens  # reasoning comes first
        return events

    def finish(self) -> list[Event]:
        """End the completion: return what was held back, unless a stop string cut it."""
        tail = "" if self.matched is not None else self._stream.finish_decoding()
        reasoning, tools = self._parsers.reasoning, self._parsers.tools
        if self._parsers.stops_in_reasoning:
            tail = self._stream.until_stop(tail) + self._stream.finish_stops()
        events = self._reason(tail)
        if reasoning is not None:
            events += self._route(reasoning.finish())
        if not self._parsers.stops_in_reasoning:
            events += self._after_stops(self._stream.finish_stops())
        if tools is not None:
            events += tools.finish()
        return events

    def _split(self, text: str) -> list[Event]:
        if self._parsers.stops_in_reasoning:
            return self._reason(self._stream.until_stop(text))
        return self._reason(text)

    def _reason(self, text: str) -> list[Event]:
        if self._parsers.reasoning is None:
            return self._content(text)
        return self._route(self._parsers.reasoning.push(text))

    def _route(self, parsed: list[Event]) -> list[Event]:
        """Pass the content of parsed events on to stop strings and tool calls."""
        events: list[Event] = []
        for event in parsed:
            if isinstance(event, ContentDelta):
                events += self._content(event.text)
            else:
                events.append(event)
        return events

    def _content(self, text: str) -> list[Event]:
        if not self._parsers.stops_in_reasoning:
            text = self._stream.until_stop(text)
        return self._after_stops(text)

    def _after_stops(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._parsers.tools is None:
            return [ContentDelta(text)]
        return self._parsers.tools.push(text)
