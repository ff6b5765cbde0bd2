r"""Writes a grammar in llguidance's dialect of Lark.

The functions return strings of Lark elements, to be put into a rule. There are two kinds of markup:
the name of a control token is one token that no text can spell, ``<[id]>``; any other marker is
text, whatever tokens spell it. Text never holds a control token.

Source: docs/syntax.md of github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

# Whitespace between two tokens of a JSON document: as compact or as indented as a model likes, but
# bounded (a small model can write newlines until it runs out of tokens).
WHITESPACE: Final = r" |\r?\n[ \t]{0,16}"
ANY_TEXT: Final = "/(?s:.*)/"


class LarkWriter:
    """Collects rules under names of their own.

    Args:
        control_tokens: id by name of the model's control tokens.
    """

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self._control_tokens = {name: i for name, i in control_tokens.items() if name}
        names = sorted(self._control_tokens, key=len, reverse=True)
        self._finder = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._lines: list[str] = []
        self._names: dict[tuple[str, str, str], str] = {}

    def rule(self, stem: str, body: str, options: str = "") -> str:
        """Add a rule, or find the same one; returns its name.

        Args:
            stem: lower case for a rule, upper case for a terminal.
            body: Lark elements.
            options: such as ``[lazy]``.
        """
        key = (stem, body, options)
        if key not in self._names:
            self._names[key] = name = f"{stem}_{len(self._names)}"
            self._lines.append(f"{name}{options}: {body}")
        return self._names[key]

    def reserve(self, stem: str) -> str:
        """Reserve a name for a rule that `define` gives later: rules may refer to themselves."""
        key = (stem, "", str(len(self._names)))
        self._names[key] = name = f"{stem}_{len(self._names)}"
        return name

    def define(self, name: str, body: str) -> None:
        """Give a reserved name its rule."""
        self._lines.append(f"{name}: {body}")

    def json(self, schema: Mapping[str, Any] | bool, *, is_lenient: bool = False) -> str:
        """A rule for the JSON documents of a schema.

        Args:
            schema: checked by `check_schema`.
            is_lenient: whether keywords that cannot be enforced are ignored instead of refused.
        """
        options: dict[str, object] = {"whitespace_pattern": WHITESPACE}
        if is_lenient:
            options["lenient"] = True
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        whole = {**schema, "x-guidance": options}
        return self.rule("json", f"%json {json.dumps(whole)}")

    def text(self, excluded: str = "") -> str:
        """A terminal for any text except text that a regular expression matches as a whole."""
        body = ANY_TEXT
        if excluded:
            body += f" & ~/{excluded}/"
        return self.rule("TEXT", body)

    def marker(self, text: str) -> str:
        """Elements for a marker: control tokens by id, all else as text."""
        elements = self._split(text)
        return " ".join(f"<[{p}]>" if isinstance(p, int) else literal(p) for p in elements)

    def until(self, text: str, before: str | None = None) -> str:
        """Elements for any text up to the first marker, and the marker.

        Args:
            text: the marker.
            before: terminal of the text before the marker; None for any text.
        """
        before = before or self.text()
        first, *rest = self._split(text)
        tail = " ".join(f"<[{p}]>" if isinstance(p, int) else literal(p) for p in rest)
        if isinstance(first, int):
            return f"{before} <[{first}]> {tail}"
        if not rest:
            return self.rule("until", f"{before} {literal(first)}", "[lazy]")
        opening = self.rule("OPENING", f"{before} {literal(first)}")
        return f"{opening} {tail}"

    def _split(self, text: str) -> list[str | int]:
        """Split a marker into texts and ids of control tokens."""
        elements: list[str | int] = []
        position = 0
        for found in self._finder.finditer(text):
            if found.start() > position:
                elements.append(text[position : found.start()])
            elements.append(self._control_tokens[found[0]])
            position = found.end()
        if position < len(text):
            elements.append(text[position:])
        return elements

    def build(self, start: str) -> str:
        """The whole grammar; start: body of its rule `start`."""
        return "\n".join([f"start: {start}", *self._lines])


def literal(text: str) -> str:
    """The element for a literal text."""
    return json.dumps(text, ensure_ascii=False)


def either(options: Iterable[str]) -> str:
    """The element for one of several options."""
    return "(" + " | ".join(options) + ")"


def escape_regex(text: str) -> str:
    """Text as a part of a regular expression between slashes."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
