"""Partial JSON: the certain part of a string, and objects that were cut."""

from __future__ import annotations

import re
from typing import Final

import msgspec

# Whole characters and escapes; the halves of a surrogate pair belong together. Possessive: linear.
_WHOLE: Final = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?:[0-9abcefABCEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))*+"
)
_TOKEN: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+\\?+"?+|[{}\[\],]', re.DOTALL)
_LITERAL: Final = r"(?:[-+.\deE]+|t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?)?"
# What may follow the last whole member: nothing, a comma, or the start of another member.
_CUT_MEMBER: Final = re.compile(
    rf'[\s,]*(?:"[^"\\]*+(?:\\.[^"\\]*+)*+(?:\\|"\s*(?::\s*{_LITERAL})?)?|{_LITERAL})\s*', re.DOTALL
)
_CLOSERS: Final = {"{": "}", "[": "]"}


def whole_prefix(text: str) -> str:
    """The content of a JSON string, up to its end or to an incomplete character."""
    found = _WHOLE.match(text)
    assert found is not None, "it matches the empty text"
    return found[0]


def close_object(text: str) -> dict[str, object] | None:
    """The object of a JSON text that was cut.

    A string that was cut keeps its first part; any other member that was cut is left out.

    Returns:
        None if the text is not the start of a JSON object.
    """
    if not text.strip():
        return {}
    closers, end, end_closers = "", 0, ""  # of what is open now, and at the last whole member
    is_open = False
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in _CLOSERS:
            closers = _CLOSERS[mark] + closers
            end, end_closers = token.end(), closers
        elif mark == ",":
            end, end_closers = token.start(), closers
        elif mark in "}]":
            closers = closers[1:]
            end, end_closers = token.end(), closers
        else:
            inside = mark[1:]
            is_open = len(whole_prefix(inside)) == len(inside) or not mark.endswith('"')
            if is_open:
                text = text[: token.start() + 1] + whole_prefix(inside)
    if not closers:
        return None
    found = _decode(f'{text}"{closers}' if is_open else text + closers)
    if found is None and _CUT_MEMBER.fullmatch(text, end):
        found = _decode(text[:end] + end_closers)
    return found


def _decode(text: str) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        return None
