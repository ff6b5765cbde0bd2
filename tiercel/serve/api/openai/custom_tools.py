"""Freeform tools of the Responses API: their input is a text, not JSON.

The model is offered such a tool as a function with one string, and the text of that string goes
back to the client as the input of a `custom_tool_call`. `InputReader` takes the text out of the
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
    """The arguments of the function that stands for a freeform tool, as JSON text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputReader:
    """Takes the input of one call out of the JSON text of its arguments, piece by piece."""

    def __init__(self) -> None:
        self._raw = ""  # not yet read
        self._is_inside = False
        self._has_read = False

    def push(self, text: str) -> str:
        """Add JSON text; returns what is certain of the input now."""
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
        """End the text; arguments of another shape, of a model without a grammar, come whole."""
        return "" if self._has_read else self._raw


def _escaped(text: str) -> str:
    """Line ends as JSON holds them; a model without a grammar may write them raw."""
    return "".join(char if char >= " " else f"\\u{ord(char):04x}" for char in text)
