"""A reader of text that arrives in parts, and the events that a format finds in it.

A format reads a block of calls as a generator. It yields the events that it finds, and None where
it must wait for more text; so it is written from the first character to the last, as if the whole
text were there. The result does not depend on how the text was cut: no decision is made from the
amount of text that happens to have arrived.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Final, NoReturn, TypeVar

T = TypeVar("T")
_BRACKETS: Final = re.compile(r'["{}\[\]]')
_STRING_END: Final = re.compile(r'["\\]')
_MAX_NAME_CHARS: Final = 256
_NAME: Final = re.compile(r"[^\s\x00-\x1f\"'<>(){}\[\]]+")


class BrokenCallError(Exception):
    """The text is not a call in this format."""


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallText:
    """New JSON text of its arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete."""


CallEvent = CallStart | CallText | CallEnd
CallEvents = Iterator[CallEvent | None]
Reading = Generator[CallEvent | None, None, T]


class Reader:
    """The text of one completion.

    Attributes:
        position: number of characters that were read.
        is_final: whether no more text follows.
    """

    def __init__(self) -> None:
        self._text = ""
        self._start = 0  # characters that were dropped from `_text`
        self.position = 0
        self.is_final = False

    def push(self, text: str, keep_from: int) -> None:
        """Add text; drop the text before the position `keep_from`."""
        self._text = self._text[keep_from - self._start :] + text
        self._start = keep_from

    @property
    def rest(self) -> str:
        """The text that has arrived and was not read."""
        return self._text[self.position - self._start :]

    def take(self, count: int) -> str:
        """Read `count` characters, which must be there."""
        begin = self.position - self._start
        self.position += count
        return self._text[begin : begin + count]

    def wait(self) -> Reading[None]:
        """Wait for more text.

        Raises:
            BrokenCallError: the text has ended.
        """
        if self.is_final:
            raise BrokenCallError("the text ended")
        yield None

    def more(self, count: int) -> Reading[bool]:
        """Wait until `count` characters are there; False if the text ends before."""
        while len(self.rest) < count:
            if self.is_final:
                return False
            yield None
        return True

    def optional(self, *options: str) -> Reading[str]:
        """Read the first of the options that comes next, or nothing."""
        waiting = [option for option in options if option]
        while True:
            rest = self.rest
            for option in waiting:
                if rest.startswith(option):
                    return self.take(len(option))
            if self.is_final or not any(option.startswith(rest) for option in waiting):
                return ""
            yield None

    def closing(self, marker: str) -> Reading[None]:
        """Read a closing marker, if it follows; at the end of the text also a prefix of it."""
        found = yield from self.optional(marker)
        if not found and self.is_final and marker.startswith(self.rest):
            self.take(len(self.rest))

    def literal(self, *options: str) -> Reading[str]:
        """Read one of the options.

        Raises:
            BrokenCallError: something else follows.
        """
        found = yield from self.optional(*options)
        if not found:
            raise BrokenCallError(f"expected {options[0]!r}")
        return found

    def space(self) -> Reading[str]:
        """Read whitespace, all of it."""
        found = ""
        while True:
            rest = self.rest
            found += self.take(len(rest) - len(rest.lstrip()))
            if self.rest or self.is_final:
                return found
            yield None

    def until(self, end: str) -> Reading[str]:
        """Read up to a marker, which is read too but not returned.

        Raises:
            BrokenCallError: the text ends before the marker.
        """
        while end not in self.rest:
            yield from self.wait()
        text = self.take(self.rest.find(end))
        self.take(len(end))
        return text

    def name(self, end: str) -> Reading[str]:
        """Read the name of a function or an argument, up to a marker, which is read too.

        Raises:
            BrokenCallError: there is no valid name.
        """
        while end not in self.rest[: _MAX_NAME_CHARS + len(end)]:
            if len(self.rest) >= _MAX_NAME_CHARS + len(end):
                raise BrokenCallError("no name")
            yield from self.wait()
        name = (yield from self.until(end)).strip()
        if not _NAME.fullmatch(name):
            raise BrokenCallError("no name")
        return name

    def stream_until(self, end: str) -> Iterator[str | None]:
        """Read up to a marker, which is read too; yield the text as it becomes certain.

        Raises:
            BrokenCallError: the text ends before the marker.
        """
        while end not in self.rest:
            certain = len(self.rest) - len(open_end(self.rest, (end,)))
            if certain:
                yield self.take(certain)
            if self.is_final:
                raise BrokenCallError("the text ended")
            yield None
        text = self.take(self.rest.find(end))
        self.take(len(end))
        if text:
            yield text


def open_end(text: str, markers: tuple[str, ...]) -> str:
    """The longest suffix of a text that is a proper prefix of one of the markers."""
    longest = ""
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), len(longest), -1):
            if text.endswith(marker[:length]):
                longest = marker[:length]
                break
    return longest


class Balance:
    """Finds the end of a JSON object as its text arrives; it does not check the content."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """Characters up to and with the bracket that closes the object, or -1."""
        place = 0
        if self._is_escaped and text:
            self._is_escaped = False
            place = 1
        while True:
            pattern = _STRING_END if self._in_string else _BRACKETS
            found = pattern.search(text, place)
            if found is None:
                return -1
            place = found.end()
            char = found[0]
            if char == "\\":
                self._is_escaped = place == len(text)
                place += 1
            elif char == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return place


def stream_object(reader: Reader) -> Reading[None]:
    """Read a JSON object and yield its text as it comes.

    Raises:
        BrokenCallError: no object begins here, or it does not end.
    """
    yield from reader.more(1)
    if not reader.rest.startswith("{"):
        raise BrokenCallError("expected an object")
    balance = Balance()
    while True:
        rest = reader.rest
        end = balance.feed(rest)
        if rest:
            yield CallText(reader.take(len(rest) if end < 0 else end))
        if end >= 0:
            return
        yield from reader.wait()


def escape_json(text: str) -> str:
    """Text escaped for the inside of a JSON string; parts of a text may be escaped separately."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def parse_json(text: str) -> object:
    """Decode a JSON value.

    Raises:
        BrokenCallError: the text is not JSON.
    """
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise BrokenCallError("no JSON") from None
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
