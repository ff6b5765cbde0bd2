"""Calls as tags with one tag per argument: Qwen3-Coder, and DeepSeek from V3.2 on.

    <tool_call>
    <function=look_up>
    <parameter=word>
    tin
    </parameter>
    </function>
    </tool_call>

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="look_up">
    <｜DSML｜parameter name="word" string="true">tin</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

A string is written raw, without quotes or escapes; any other value is JSON. The tool's schema or
the attribute `string` determines which of the two a value is.

Sources: the chat template of Qwen3-Coder; the encoding notes of DeepSeek-V3.2 and -V4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tiercel.grammar.lark import LarkWriter, either, literal
from tiercel.grammar.spec import CallForm
from tiercel.serve.generation.tools.parsers.format import ToolSpec, arguments_schema
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
from tiercel.serve.generation.tools.parsers.schema_kinds import read_property, value_kind

_BAR: Final = "\uff5c"  # the full-width bar of DeepSeek's tokens
_NAME: Final = "/[A-Za-z0-9_.-]{1,64}/"


def read_text_value(reader: Reader, end: str, line_end: str) -> Reading[None]:
    """Read a string up to its closing tag; a `line_end` before the tag is not part of it."""
    yield CallText('"')
    held = ""
    for piece in reader.stream_until(end):
        if piece is None:
            yield None
            continue
        text = held + piece
        held = line_end if line_end and text.endswith(line_end) else ""
        yield CallText(escape_json(text.removesuffix(held)))
    yield CallText('"')


def read_other_value(reader: Reader, end: str, line_end: str) -> Reading[None]:
    """Read JSON up to a closing tag; other text is a string."""
    raw = yield from reader.until(end)
    try:
        parse_json(raw.strip())
    except BrokenCallError:
        yield CallText(json.dumps(raw.removesuffix(line_end), ensure_ascii=False))
    else:
        yield CallText(raw.strip())


def schema_of(tools: Sequence[ToolSpec], name: str) -> Mapping[str, Any]:
    """The schema of a tool's arguments; an empty schema for an unknown name."""
    for tool in tools:
        if tool.name == name:
            return arguments_schema(tool)
    return {}


def properties_of(schema: Mapping[str, Any]) -> dict[str, tuple[Any, bool]]:
    """Name to (schema, whether it is required) of each property."""
    properties = schema.get("properties")
    required = schema.get("required")
    names = set(required) if isinstance(required, list) else set()
    if not isinstance(properties, dict):
        return {}
    return {name: (value, name in names) for name, value in properties.items()}


class QwenCoderFormat:
    """``<function=...>`` and ``<parameter=...>``."""

    name = "qwen3_coder"
    opening = "<tool_call>"
    closing = "</tool_call>"
    markers = (opening, closing)
    is_anchored = False
    _value_end = "</parameter>"

    def triggers(self, tools: Sequence[ToolSpec], *, is_constrained: bool) -> tuple[str, ...]:
        """The opening marker."""
        del tools, is_constrained
        return (self.opening,)

    def read_block(self, reader: Reader, tools: Sequence[ToolSpec]) -> CallEvents:
        """One call."""
        yield from reader.literal(self.opening)
        yield from reader.space()
        yield from reader.literal("<function=")
        name = yield from reader.name(">")
        schema = schema_of(tools, name)
        yield CallStart(name)
        before = "{"
        while True:
            yield from reader.space()
            if (yield from reader.literal("<parameter=", "</function>")) == "</function>":
                break
            key = yield from reader.name(">")
            yield from reader.optional("\n")
            yield CallText(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            kind = value_kind(read_property(schema, key), schema)
            read = read_text_value if kind.is_text else read_other_value
            yield from read(reader, self._value_end, "\n")
        yield CallText("{}" if before == "{" else "}")
        yield from reader.space()
        yield from reader.closing(self.closing)
        yield CallEnd()

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, is_parallel: bool) -> CallForm:
        """Blocks of one call."""
        options = [
            f"{literal(chr(10) + f'<function={tool.name}>' + chr(10))} {self._values(lark, tool)}"
            for tool in tools
        ]
        call = lark.rule("call", either(options))
        end = f'"</function>\\n" {lark.marker(self.closing)}'
        between = r"/\n{1,2}/?" if is_parallel else None
        return CallForm(self.opening, f"{call} {end}", between=between)

    def _values(self, lark: LarkWriter, tool: ToolSpec) -> str:
        schema = arguments_schema(tool)
        text = f'{lark.until(self._value_end)} "\\n"'
        tail = literal(f"\n{self._value_end}\n")
        pieces = []
        for name, (value, is_required) in properties_of(schema).items():
            head = literal(f"<parameter={name}>\n")
            kind = value_kind(value, schema)
            if kind.choices:
                body = f"{either(literal(choice) for choice in kind.choices)} {tail}"
            elif kind.document is None:
                body = text
            else:
                body = f"{lark.json(kind.document, is_lenient=not tool.strict)} {tail}"
            rule = lark.rule("argument", f"{head} {body}")
            pieces.append(rule if is_required else f"{rule}?")
        if not pieces and schema.get("additionalProperties") is not False:
            pieces.append(lark.rule("argument", f'"<parameter=" {_NAME} ">\\n" {text}') + "*")
        return " ".join(pieces)


class DsmlFormat:
    """DeepSeek's markup language.

    Args:
        name: name in `--tool-parser`.
        group: tag around all calls; both existing tags are read.
    """

    is_anchored = False
    _groups = ("tool_calls", "function_calls")

    def __init__(self, name: str, group: str) -> None:
        self.name = name
        self._group = group
        self.markers = (self._tag("invoke"), *map(self._tag, self._groups))

    @staticmethod
    def _tag(name: str, *, closes: bool = False) -> str:
        return f"<{'/' if closes else ''}{_BAR}DSML{_BAR}{name}" + (">" if closes else "")

    def triggers(self, tools: Sequence[ToolSpec], *, is_constrained: bool) -> tuple[str, ...]:
        """The tag around all calls."""
        del tools, is_constrained
        return tuple(f"{self._tag(group)}>" for group in self._groups)

    def read_block(self, reader: Reader, tools: Sequence[ToolSpec]) -> CallEvents:
        """All calls of the completion."""
        del tools  # each value has its type in an attribute
        group = yield from reader.literal(*self.triggers((), is_constrained=True))
        ends: tuple[str, ...] = ()  # a group holds one call at least
        while True:
            yield from reader.space()
            if (yield from reader.literal(self._tag("invoke"), *ends)) in ends:
                return
            ends = (f"</{group[1:]}",)
            yield from reader.literal(' name="')
            name = yield from reader.name('"')
            yield from reader.literal(">")
            yield CallStart(name)
            yield from self._read_values(reader)
            yield CallEnd()

    def _read_values(self, reader: Reader) -> Reading[None]:
        before = "{"
        end = self._tag("invoke", closes=True)
        while True:
            yield from reader.space()
            if (yield from reader.literal(end, self._tag("parameter"))) == end:
                break
            yield from reader.literal(' name="')
            key = yield from reader.name('"')
            yield CallText(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            kind = yield from reader.literal(' string="true">', ' string="false">')
            read = read_text_value if "true" in kind else read_other_value
            yield from read(reader, self._tag("parameter", closes=True), "")
        yield CallText("{}" if before == "{" else "}")

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, is_parallel: bool) -> CallForm:
        """One block with all calls."""
        begin, end = lark.marker(self._tag("invoke")), self._tag("invoke", closes=True)
        options = [
            f"{literal(f' name={json.dumps(tool.name)}>' + chr(10))} {self._values(lark, tool)}"
            for tool in tools
        ]
        call = lark.rule("call", f'{begin} {either(options)} {lark.marker(end)} "\\n"')
        calls = f"{call}+" if is_parallel else call
        closing = lark.marker(self._tag(f"{self._group}", closes=True))
        return CallForm(f"{self._tag(self._group)}>", f'"\\n" {calls} {closing}')

    def _values(self, lark: LarkWriter, tool: ToolSpec) -> str:
        schema = arguments_schema(tool)
        begin, end = self._tag("parameter"), self._tag("parameter", closes=True)
        tail = f'{lark.marker(end)} "\\n"'
        text = f'" string=\\"true\\">" {lark.until(end)} "\\n"'
        pieces = []
        for name, (value, is_required) in properties_of(schema).items():
            head = f"{lark.marker(begin)} {literal(f' name={json.dumps(name)}')}"
            kind = value_kind(value, schema)
            if kind.choices:
                choice = either(literal(choice) for choice in kind.choices)
                body = f'" string=\\"true\\">" {choice} {tail}'
            elif kind.document is None:
                body = text
            else:
                found = lark.json(kind.document, is_lenient=not tool.strict)
                body = f'" string=\\"false\\">" {found} {tail}'
            rule = lark.rule("argument", f"{head} {body}")
            pieces.append(rule if is_required else f"{rule}?")
        if all(piece.endswith("?") for piece in pieces):
            pieces.append('"\\n"?')  # the encoding writes an empty line for no arguments
        return " ".join(pieces)
