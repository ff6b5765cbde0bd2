"""Calls in Gemma's notation.

    <start_function_call>call:look_up{word:<escape>tin<escape>,limit:3}<end_function_call>
    <|tool_call>call:look_up{word:<|"|>tin<|"|>,limit:3}<tool_call|>

Names have no quotes, strings are between markers without escapes, and other values are as in JSON.
The first notation is FunctionGemma's, the second Gemma 4's; earlier Gemma models have none.

Sources: "FunctionGemma formatting and best practices" and "Function calling with Gemma 4",
ai.google.dev/gemma/docs.
"""

from __future__ import annotations

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
    escape_json,
    parse_json,
)

MAX_DEPTH: Final = 64
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_KEY: Final = "/[A-Za-z0-9_.-]{1,64}/"


class GemmaFormat:
    """Blocks of one call.

    Args:
        name: name in `--tool-parser`.
        opening: marker before a call.
        closing: marker after a call.
        quote: marker on both sides of a string.
    """

    is_anchored = False

    def __init__(self, name: str, opening: str, closing: str, quote: str) -> None:
        self.name = name
        self._opening = opening
        self._closing = closing
        self._quote = quote
        self.markers = (opening, closing, quote)

    def triggers(self, tools: Sequence[ToolSpec], *, is_constrained: bool) -> tuple[str, ...]:
        """The opening marker."""
        del tools, is_constrained
        return (self._opening,)

    def read_block(self, reader: Reader, tools: Sequence[ToolSpec]) -> CallEvents:
        """One call; the end of the text may replace the closing marker."""
        del tools
        yield from reader.literal(self._opening)
        yield from reader.space()
        yield from reader.literal("call:")
        yield CallStart((yield from reader.name("{")))
        yield from self._read_object(reader, 0)
        yield from reader.space()
        yield from reader.closing(self._closing)
        yield CallEnd()

    def _read_object(self, reader: Reader, depth: int) -> Reading[None]:
        """The pairs after an opening brace, and the closing brace."""
        before = "{"
        yield from reader.space()
        while not (yield from reader.optional("}")):
            if before == ", ":
                yield from reader.literal(",")
                yield from reader.space()
            quote = yield from reader.optional(self._quote, '"')
            name = yield from reader.name(quote or ":")
            if quote:
                yield from reader.space()
                yield from reader.literal(":")
            yield CallText(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
            before = ", "
            yield from self._read_value(reader, depth + 1)
            yield from reader.space()
        yield CallText("{}" if before == "{" else "}")

    def _read_value(self, reader: Reader, depth: int) -> Reading[None]:
        if depth > MAX_DEPTH:
            raise BrokenCallError("nested too deeply")
        yield from reader.space()
        found = yield from reader.optional(self._quote, "{", "[")
        if found == self._quote:
            yield CallText('"')
            for piece in reader.stream_until(self._quote):
                yield None if piece is None else CallText(escape_json(piece))
            yield CallText('"')
        elif found == "{":
            yield from self._read_object(reader, depth)
        elif found == "[":
            yield from self._read_list(reader, depth)
        else:
            yield from _read_word(reader)

    def _read_list(self, reader: Reader, depth: int) -> Reading[None]:
        before = "["
        yield from reader.space()
        while not (yield from reader.optional("]")):
            if before == ", ":
                yield from reader.literal(",")
            yield CallText(before)
            before = ", "
            yield from self._read_value(reader, depth + 1)
            yield from reader.space()
        yield CallText("[]" if before == "[" else "]")

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, is_parallel: bool) -> CallForm:
        """Blocks of one call."""
        quote = lark.marker(self._quote)
        notation = Notation(
            text=lark.rule("string", f"{quote} {lark.until(self._quote)}"),
            quoted=lambda text: f"{quote} {literal(text)} {quote}",
            words=("true", "false", "null"),
            key=lambda name: literal(f"{name}:"),
            any_key=f'{_KEY} ":"',
            comma='","',
        )
        options = []
        for tool in tools:
            schema = arguments_schema(tool)
            values = LiteralGrammar(lark, notation, schema).value(schema)
            options.append(f"{literal(f'call:{tool.name}')} {values}")
        call = lark.rule("call", either(options))
        between = r"/\n{1,2}/?" if is_parallel else None
        return CallForm(self._opening, f"{call} {lark.marker(self._closing)}", between=between)


def _read_word(reader: Reader) -> Reading[None]:
    """A value without quotes: a number, a word of JSON or Python, else a raw string."""
    word = ""
    while True:
        rest = reader.rest
        ends = [end for end in map(rest.find, ",}]\n") if end >= 0]
        word += reader.take(min(ends) if ends else len(rest))
        if ends:
            break
        yield from reader.wait()
    word = _WORDS.get(word.strip(), word.strip())
    if not word:
        raise BrokenCallError("no value")
    try:
        parse_json(word)
    except BrokenCallError:
        word = json.dumps(word, ensure_ascii=False)
    yield CallText(word)
