"""From the tokens of one answer to what a client may see: reasoning, content, tool calls.

    token -> bytes -> text -> reasoning | content -> stop strings -> tool calls

Tokens go through one at a time, because a step may bring several and a stop string may end the
answer between two of them: what was generated behind it is neither shown nor counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.request.request import Request
from tiercel.serve.generation.events import ContentDelta, Event, Parser, ReasoningParser
from tiercel.text.detokenize import Detokenizer
from tiercel.text.stop_strings import StopStrings
from tiercel.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of one answer; they keep its state.

    Attributes:
        reasoning: splits the model's thinking from its answer; None where it does not think.
        tools: finds calls in the content; None where no tools were given.
        stops_in_reasoning: whether stop strings also end an answer inside its reasoning.
        needs_special: whether a parser reads the names of control tokens.
    """

    reasoning: ReasoningParser | None = None
    tools: Parser | None = None
    stops_in_reasoning: bool = False
    needs_special: bool = False


class AnswerText:
    """The text of one answer as it grows.

    Attributes:
        num_tokens: tokens taken so far, those of a matched stop string included.
        num_reasoning_tokens: of these, tokens of the reasoning, its markers included.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, parsers: Parsers) -> None:
        params = request.params
        self._stop_ids = request.stop_ids
        self._min_tokens = params.min_tokens
        self._shows_stop = params.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens and not parsers.needs_special,
        )
        self._stops = StopStrings(params.stop, include_stop_str=params.include_stop_str_in_output)
        self._parsers = parsers
        self.num_tokens = 0
        self.num_reasoning_tokens = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.matched

    @property
    def is_thinking(self) -> bool:
        """Whether the answer so far ends within the reasoning."""
        return self._parsers.reasoning is not None and self._parsers.reasoning.is_inside

    def close_thinking(self, closing: str) -> list[Event]:
        """End the reasoning with a marker that the model did not write."""
        # A character that was cut there ends there too: what follows is another text.
        return self._reason(self._detokenizer.finish() + closing)

    def push(self, token_id: int, *, ends: bool) -> list[Event]:
        """Add a token; returns what is certain now.

        Args:
            token_id: the token.
            ends: the engine ended the answer here, for the reason ``stop``.
        """
        self.num_tokens += 1
        is_hidden = ends and token_id in self._stop_ids and not self._shows_stop
        text = "" if is_hidden else self._detokenizer.push((token_id,))
        reasoning = self._parsers.reasoning
        if reasoning is None:
            return self._content(text) if text else []
        was_inside = reasoning.is_inside
        events = self._split(text) if text else []
        if was_inside or reasoning.is_inside:
            self.num_reasoning_tokens = self.num_tokens  # it comes first, its marker included
        return events

    def finish(self) -> list[Event]:
        """End the answer: what was held back, unless a stop string cut it."""
        tail = "" if self.matched is not None else self._detokenizer.finish()
        reasoning, tools = self._parsers.reasoning, self._parsers.tools
        if self._parsers.stops_in_reasoning:
            tail = self._until_stop(tail) + self._stops.finish()[0]
        events = self._reason(tail)
        if reasoning is not None:
            events += self._route(reasoning.finish())
        if not self._parsers.stops_in_reasoning:
            events += self._after_stops(self._stops.finish()[0])
        if tools is not None:
            events += tools.finish()
        return events

    def _split(self, text: str) -> list[Event]:
        if self._parsers.stops_in_reasoning:
            return self._reason(self._until_stop(text))
        return self._reason(text)

    def _reason(self, text: str) -> list[Event]:
        if self._parsers.reasoning is None:
            return self._content(text)
        return self._route(self._parsers.reasoning.push(text))

    def _route(self, parsed: list[Event]) -> list[Event]:
        events: list[Event] = []
        for event in parsed:
            if isinstance(event, ContentDelta):
                events += self._content(event.text)
            else:
                events.append(event)
        return events

    def _content(self, text: str) -> list[Event]:
        if not self._parsers.stops_in_reasoning:
            text = self._until_stop(text)
        return self._after_stops(text)

    def _until_stop(self, text: str) -> str:
        if self.num_tokens <= self._min_tokens:
            return text  # stop strings count from min_tokens on
        return self._stops.push(text)[0]

    def _after_stops(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._parsers.tools is None:
            return [ContentDelta(text)]
        return self._parsers.tools.push(text)
