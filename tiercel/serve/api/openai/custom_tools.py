"""Custom (freeform) tools of the Responses API: their input is a text, not JSON.

The prompt describes a custom tool as a function with one string, and the text of that string goes
to the client as the input of a `custom_tool_call`. `CustomInputParser` extracts the text from the
arguments while they are generated: `{"input": "*** Begin` gives `*** Begin`.
"""

from __future__ import annotations

import json
import re
from typing import Final

import msgspec

from tiercel.serve.generation.partial_json import whole_prefix

INPUT: Final = "input"
PARAMETERS: Final[dict[str, object]] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_HEAD: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')


def write_arguments(text: str) -> str:
    """The arguments of the function that represents a custom tool, as JSON text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class CustomInputParser:
    """Extracts the input of one call from the JSON text of its arguments as the text arrives."""

    def __init__(self) -> None:
        self._raw = ""  # not parsed yet
        self._is_inside = False
        self._has_read = False

    def push(self, text: str) -> str:
        """Add JSON text; return the part of the input that is certain now."""
        self._raw += text
        if not self._is_inside:
            head = _HEAD.match(self._raw)
            if head is None or self._has_read:
                return ""
            self._raw = self._raw[head.end() :]
            self._is_inside = self._has_read = True
        whole = whole_prefix(self._raw)
        self._raw = self._raw[len(whole) :]
        self._is_inside = not self._raw.startswith('"')
        return msgspec.json.decode(f'"{_escaped(whole)}"', type=str)

    def finish(self) -> str:
        """End the text; arguments of another shape, without a grammar, are returned whole."""
        return "" if self._has_read else self._raw


def _escaped(text: str) -> str:
    """Escape line ends for JSON; a model without a grammar may write them raw."""
    return "".join(char if char >= " " else f"\\u{ord(char):04x}" for char in text)
