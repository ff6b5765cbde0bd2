"""Shield that keeps the text of clients from becoming control tokens during rendering."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping


class ControlFinder:
    """Finder of control tokens in text, the longest at each position."""

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self._tokens = frozenset(token for token in control_tokens if token)
        lengths: dict[str, set[int]] = {}
        for token in self._tokens:
            lengths.setdefault(token[0], set()).add(len(token))
        self._lengths = {char: sorted(found, reverse=True) for char, found in lengths.items()}
        self._longest = max(map(len, self._tokens), default=0)
        starts = "".join(re.escape(char) for char in lengths)
        self._start = re.compile(f"[{starts}]") if starts else re.compile(r"(?!)")

    def find_all(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, end) of each, from left to right."""
        position = 0
        while found := self._start.search(text, position):
            start = position = found.start()
            for length in self._lengths[text[start]]:
                token = text[start : start + length]
                if token in self._tokens:
                    position = start + len(token)  # near the end it may be shorter than `length`
                    yield start, position
                    break
            else:
                position += 1

    def find_open_end(self, text: str) -> tuple[int, int] | None:
        """(start, end) of the last characters, whitespace aside, that could begin a token."""
        end = len(text.rstrip())
        for found in self._start.finditer(text, max(0, end - self._longest), end):
            tail = text[found.start() : end]
            if any(token.startswith(tail) for token in self._tokens):
                return found.start(), end
        return None


class Shield:
    """Replaces control tokens by sentinels, and sentinels by the text that they stand for.

    A sentinel has digits only, so changes of case, JSON and trimming in a template do not alter it:
    40 random digits, which no user can guess, and the number of the text.
    """

    def __init__(self, finder: ControlFinder) -> None:
        self._finder = finder
        self._key = "".join(secrets.choice("0123456789") for _ in range(40))
        self._texts: list[str] = []
        self._numbers: dict[str, str] = {}
        self._pattern = re.compile(self._key + r"(\d{6})")

    @property
    def end_mark(self) -> str:
        """The mark of the end of a message that is to be continued."""
        return self._sentinel("")

    def cover(self, text: str) -> str:
        """The text with a sentinel for each control token and for an open end."""
        pieces = []
        position = 0
        for start, end in self._finder.find_all(text):
            pieces += [text[position:start], self._sentinel(text[start:end])]
            position = end
        rest = text[position:]
        open_end = self._finder.find_open_end(rest)
        if open_end is not None:
            start, end = open_end
            rest = rest[:start] + self._sentinel(rest[start:end]) + rest[end:]
        return "".join([*pieces, rest])

    def uncover(self, text: str) -> str:
        """The text with every sentinel resolved."""
        if not self._texts:
            return text
        return self._pattern.sub(self._resolve, text)

    def _resolve(self, found: re.Match[str]) -> str:
        number = int(found[1])  # a template may have changed the digits
        return self._texts[number] if number < len(self._texts) else found[0]

    def _sentinel(self, text: str) -> str:
        if text not in self._numbers:
            self._numbers[text] = f"{self._key}{len(self._texts):06}"
            self._texts.append(text)
        return self._numbers[text]
