"""The tool-call parser: finds tool calls in the text of a completion, between content.

If a grammar enforces the format, a call is reported as it is generated. Without a grammar, a call
is reported when it is complete and valid; text that only resembles a call is content, with its
markup. Whitespace next to a call belongs to the markup.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from tiercel.serve.generation.output_events import (
    ContentDelta,
    Event,
    ToolCallArguments,
    ToolCallStart,
)
from tiercel.serve.generation.tools.parsers.reader import (
    BrokenCallError,
    CallEnd,
    CallEvent,
    CallEvents,
    CallStart,
    CallText,
    Reader,
    open_end,
    parse_json,
)


@dataclass(frozen=True, slots=True)
class ParserSettings:
    """How to find calls.

    Attributes:
        triggers: texts that begin a block of calls.
        read_block: function that reads a block, from its trigger on.
        is_anchored: whether a block comes only at the start of the completion or directly after
            another block.
        is_constrained: whether a grammar enforces the format.
    """

    triggers: tuple[str, ...]
    read_block: Callable[[Reader], CallEvents]
    is_anchored: bool
    is_constrained: bool


def new_call_id() -> str:
    """``call_`` and 24 characters."""
    return f"call_{secrets.token_hex(12)}"


class CallParser:
    """Parser of one completion; see `output_events.Parser`."""

    def __init__(self, settings: ParserSettings) -> None:
        self._settings = settings
        self._reader = Reader()
        self._block: CallEvents | None = None
        self._mark = 0  # start of the call that is being read
        self._space = ""  # whitespace that may turn out to precede a call
        self._space_before = ""  # whitespace before the block that is being read
        self._is_after_call = False
        self._at_start = True  # nothing but whitespace since the start or the last block
        self._num_calls = 0
        self._is_open = False  # a call was reported and has not ended
        self._is_cut = False  # a constrained call was cut: nothing more is reported
        self._pending: list[CallEvent] = []  # of a call that is not reported yet

    def push(self, text: str) -> list[Event]:
        """Add text; return the events that are certain now."""
        reader = self._reader
        may_go_back = self._block is not None and not self._is_open
        reader.push(text, self._mark if may_go_back else reader.position)
        return self._run()

    def finish(self) -> list[Event]:
        """End the text; return what was held back."""
        self._reader.is_final = True
        events = self._run()
        if self._space and not self._is_after_call:
            events.append(ContentDelta(self._space))
        self._space = ""
        return events

    def _run(self) -> list[Event]:
        events: list[Event] = []
        while True:
            if self._block is None:
                if not self._find_block(events):
                    return events
                continue
            try:
                piece = next(self._block)
                if piece is None:
                    return events
                self._tell(piece, events)
            except StopIteration:
                self._end_block()
            except BrokenCallError:
                self._give_up(events)

    def _find_block(self, events: list[Event]) -> bool:
        """Read content up to a block, and start to read the block."""
        reader, triggers = self._reader, self._settings.triggers
        if self._is_cut:
            reader.take(len(reader.rest))
        rest = reader.rest
        if self._settings.is_anchored:
            before = len(rest) - len(rest.lstrip()) if self._at_start else len(rest)
            has_block = rest[before:].startswith(triggers)
            might = any(trigger.startswith(rest[before:]) for trigger in triggers)
            held = self._held(len(rest) - before if might and self._at_start else 0)
            before = before if has_block else len(rest) - held
        else:
            places = [rest.find(trigger) for trigger in triggers if trigger in rest]
            has_block = bool(places)
            held = self._held(len(open_end(rest, triggers)))
            before = min(places) if places else len(rest) - held
        self._content(reader.take(before), events)
        if reader.is_final and not has_block:
            reader.take(held)
        if has_block:
            self._space_before, self._space = self._space, ""
            self._mark = reader.position
            self._block = self._settings.read_block(reader)
        return has_block

    def _held(self, num_chars: int) -> int:
        """How many of the last characters, the start of a trigger, are not content, or not yet.

        At the end, the token limit has cut the trigger; a single character may also be content.
        """
        is_markup = self._settings.is_constrained and num_chars > 1
        return num_chars if is_markup or not self._reader.is_final else 0

    def _content(self, text: str, events: list[Event]) -> None:
        shown = text.rstrip()
        if not shown:
            self._space += text
            return
        self._at_start = False
        first = self._space + shown
        if self._is_after_call:
            first = first.lstrip()
            self._is_after_call = False
        events.append(ContentDelta(first))
        self._space = text[len(shown) :]

    def _tell(self, piece: CallEvent, events: list[Event]) -> None:
        if isinstance(piece, CallEnd):
            if self._pending:
                self._check()
            self._flush(events)
            self._num_calls += 1
            self._is_open = False
            self._space_before = ""
            self._mark = self._reader.position
            return
        self._pending.append(piece)
        if self._settings.is_constrained:
            self._flush(events)

    def _check(self) -> None:
        """Check a complete call.

        Raises:
            BrokenCallError: its arguments are not a JSON object.
        """
        text = "".join(piece.text for piece in self._pending if isinstance(piece, CallText))
        if not isinstance(parse_json(text), dict):
            raise BrokenCallError("the arguments are no object")

    def _flush(self, events: list[Event]) -> None:
        for piece in self._pending:
            if isinstance(piece, CallStart):
                self._is_open = True
                events.append(ToolCallStart(self._num_calls, new_call_id(), piece.name))
            elif isinstance(piece, CallText) and piece.text:
                events.append(ToolCallArguments(self._num_calls, piece.text))
        self._pending.clear()

    def _end_block(self) -> None:
        self._block = None
        self._is_after_call = self._at_start = True

    def _give_up(self, events: list[Event]) -> None:
        """The text is not a block, or the block is cut."""
        reader = self._reader
        self._block = None
        self._pending.clear()
        self._at_start = False
        if self._settings.is_constrained and (self._is_open or reader.is_final):
            # Cut by the token limit: the reported part stays, and the remaining text is markup.
            self._num_calls += self._is_open
            self._is_open = False
            self._is_cut = self._is_after_call = True
            return
        reader.position = self._mark
        self._space = self._space_before
        found = [t for t in self._settings.triggers if reader.rest.startswith(t)]
        self._content(reader.take(max(map(len, found), default=0)), events)
