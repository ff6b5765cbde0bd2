"""Calls as a Python list of function calls: Llama 3.2 and 4.

    [look_up(word='tin', limit=3), now()]

Llama 4 may write it between <|python_start|> and <|python_end|>. The text is never executed:
each argument is read as a literal.

Sources: the prompt format pages of Llama 3.2 and Llama 4.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Final

from tiercel.grammar.lark import LarkWriter, either, literal
from tiercel.grammar.spec import CallForm
from tiercel.serve.generation.tools.parsers.format import ToolSpec, arguments_schema
from tiercel.serve.generation.tools.parsers.literal_grammar import LiteralGrammar, Notation
from tiercel.serve.generation.tools.parsers.reader import (
    BrokenCallError,
    CallEnd,
    CallEvents,
    CallStart,
    CallText,
    Reader,
    Reading,
)
from tiercel.serve.generation.tools.parsers.tagged_calls import properties_of

MAX_DEPTH: Final = 64
_OPEN: Final = "<|python_start|>"
_CLOSE: Final = "<|python_end|>"
_STRINGS: Final = (
    r"""/'([^'\\\n\x{0}-\x{1f}]|\\[nrt'"\\])*'/ | /"([^"\\\n\x{0}-\x{1f}]|\\[nrt'"\\])*"/"""
)
_JSON_WORDS: Final = {"true": True, "false": False, "null": None}


class PythonicFormat:
    """One list with all calls."""

    name = "pythonic"
    markers = (_OPEN, _CLOSE)
    is_anchored = True

    def triggers(self, tools: Sequence[ToolSpec], *, is_constrained: bool) -> tuple[str, ...]:
        """The bracket followed by the name of a tool."""
        del is_constrained
        return (_OPEN, *(f"[{tool.name}(" for tool in tools))

    def read_block(self, reader: Reader, tools: Sequence[ToolSpec]) -> CallEvents:
        """All calls of the completion."""
        del tools
        yield from reader.optional(_OPEN)
        yield from reader.space()
        yield from reader.literal("[")
        while True:
            yield from reader.space()
            yield CallStart((yield from reader.name("(")))
            yield from _read_arguments(reader)
            yield CallEnd()
            yield from reader.space()
            if (yield from reader.literal(",", "]")) == "]":
                break
        yield from reader.space()
        yield from reader.closing(_CLOSE)

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, is_parallel: bool) -> CallForm:
        """One block with all calls."""
        notation = Notation(
            text=lark.rule("string", _STRINGS),
            quoted=_quoted,
            words=("True", "False", "None"),
            key=lambda name: literal(f"{json.dumps(name, ensure_ascii=False)}: "),
            any_key=f'{lark.rule("string", _STRINGS)} ": "',
            comma='", "',
        )
        first, later = [], []
        for tool in tools:
            schema = arguments_schema(tool)
            values = LiteralGrammar(lark, notation, schema)
            pairs = [
                (f"{literal(f'{name}=')} {values.value(value)}", is_required)
                for name, (value, is_required) in properties_of(schema).items()
            ]
            arguments = lark.rule("arguments", f'{values.pairs(pairs)} ")"')
            # Bracket and name are one lexeme: after it no other text is possible.
            first.append(f"{literal(f'[{tool.name}(')} {arguments}")
            later.append(f"{literal(f', {tool.name}(')} {arguments}")
        calls = either(first) + (f" {either(later)}*" if is_parallel else "")
        block = f'({lark.marker(_OPEN)})? {calls} "]" ({lark.marker(_CLOSE)})?'
        return CallForm("", block, openings=tuple(f"[{tool.name}(" for tool in tools))


def _quoted(text: str) -> str:
    options = [literal(json.dumps(text, ensure_ascii=False))]
    if text.isprintable() and "'" not in text and "\\" not in text:
        options.append(literal(f"'{text}'"))
    return either(options)


def _read_arguments(reader: Reader) -> Reading[None]:
    """Keyword arguments up to the closing parenthesis, each reported when it is complete."""
    before = "{"
    while True:
        yield from reader.space()
        if (yield from reader.optional(")")):
            break
        key = yield from reader.name("=")
        text, end = yield from _until_end_of_value(reader)
        yield CallText(f"{before}{json.dumps(key)}: {_literal(text)}")
        before = ", "
        if end == ")":
            break
    yield CallText("{}" if before == "{" else "}")


def _until_end_of_value(reader: Reader) -> Reading[tuple[str, str]]:
    """The text of a value, and the comma or parenthesis after it."""
    text = ""
    depth = 0
    while True:
        char = yield from _next_char(reader)
        if depth == 0 and char in ",)":
            return text, char
        text += char
        if char in "'\"":
            text += yield from _until_quote(reader, char)
        depth += (char in "([{") - (char in ")]}")
        if depth > MAX_DEPTH:
            raise BrokenCallError("nested too deeply")


def _until_quote(reader: Reader, quote: str) -> Reading[str]:
    """The remainder of a string, with its closing quote."""
    text = ""
    while True:
        char = yield from _next_char(reader)
        text += char
        if char == "\\":
            text += yield from _next_char(reader)
        elif char == quote:
            return text


def _next_char(reader: Reader) -> Reading[str]:
    while not reader.rest:
        yield from reader.wait()
    return reader.take(1)


def _literal(text: str) -> str:
    """A Python literal as JSON."""
    text = text.strip()
    if text in _JSON_WORDS:
        return text
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise BrokenCallError("no literal") from None
