"""Calls as JSON objects: Hermes and Qwen (``<tool_call>``), Llama 3.

    <tool_call>
    {"name": "look_up", "arguments": {"word": "tin"}}
    </tool_call>

    {"name": "look_up", "parameters": {"word": "tin"}}        Llama 3, maybe after <|python_tag|>

Sources: the chat templates of Hermes 2 Pro, Qwen 2.5, Qwen 3 and Llama 3.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Final

from tiercel.grammar.lark import LarkWriter, either, literal
from tiercel.grammar.spec import CallForm
from tiercel.serve.generation.tools.parsers.format import ToolSpec, arguments_schema
from tiercel.serve.generation.tools.parsers.reader import (
    Balance,
    BrokenCallError,
    CallEnd,
    CallEvents,
    CallStart,
    CallText,
    Reader,
    Reading,
    parse_json,
    stream_object,
)

# The order in which models write the members; the object of the arguments follows.
_HEAD: Final = re.compile(
    r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MAX_HEAD_CHARS: Final = 1024
# An object with another first key is content in JSON, not a call.
_FIRST_KEY: Final = re.compile(r'\{\s*"([^"\\]*)"')
_KEYS: Final = frozenset({"name", "arguments", "parameters", "id", "type"})


def read_call(reader: Reader) -> Reading[None]:
    """Read the object of one call; with the usual order of members, its arguments as they arrive.

    Raises:
        BrokenCallError: the object is not a call.
    """
    yield from reader.more(1)
    balance, seen = Balance(), 0
    while True:
        rest = reader.rest
        if not rest.startswith("{"):
            raise BrokenCallError("expected an object")
        head = _HEAD.match(rest) if seen < _MAX_HEAD_CHARS else None
        if head is not None:
            reader.take(head.end())
            yield CallStart(head[1])
            yield from stream_object(reader)
            yield from reader.space()
            if (yield from reader.literal("}", ",")) == ",":
                yield from _skip_members(reader)
            return
        first = _FIRST_KEY.match(rest) if seen < _MAX_HEAD_CHARS else None
        if first is not None and first[1] not in _KEYS:
            raise BrokenCallError("no call")
        end = balance.feed(rest[seen:])
        if end >= 0:
            yield from _whole_call(reader.take(seen + end))
            return
        seen = len(rest)
        yield from reader.wait()


def _skip_members(reader: Reader) -> Reading[None]:
    """Read the members after the arguments, an id for instance, and the closing brace of the call.

    Raises:
        BrokenCallError: the text is not JSON, or does not end.
    """
    balance, text = Balance(), '{"arguments": {},'
    balance.feed(text)
    end = -1
    while end < 0:
        yield from reader.more(1)
        rest = reader.rest
        end = balance.feed(rest)
        text += reader.take(len(rest) if end < 0 else end)
        if end < 0:
            yield from reader.wait()
    parse_json(text)


def _whole_call(text: str) -> Iterable[CallStart | CallText]:
    value = parse_json(text)
    assert isinstance(value, dict), "it is in braces"
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        raise BrokenCallError("no call")
    return CallStart(name), CallText(json.dumps(arguments or {}, ensure_ascii=False))


def _objects(lark: LarkWriter, tools: Sequence[ToolSpec], key: str) -> str:
    """Elements for the object of a call of any of the tools, from the brace on."""
    options = []
    for tool in tools:
        arguments = lark.json(arguments_schema(tool), is_lenient=not tool.strict)
        head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        options.append(f"{literal(head)} {arguments} {literal('}')}")
    return either(options)


class HermesFormat:
    """``<tool_call>`` around the object of each call."""

    name = "hermes"
    opening = "<tool_call>"
    closing = "</tool_call>"
    markers = (opening, closing)
    is_anchored = False

    def triggers(self, tools: Sequence[ToolSpec], *, is_constrained: bool) -> tuple[str, ...]:
        """The opening marker."""
        del tools, is_constrained
        return (self.opening,)

    def read_block(self, reader: Reader, tools: Sequence[ToolSpec]) -> CallEvents:
        """One call; the end of the text may replace the closing marker."""
        del tools
        yield from reader.literal(self.opening)
        yield from reader.space()
        yield from read_call(reader)
        yield from reader.space()
        yield from reader.closing(self.closing)
        yield CallEnd()

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, is_parallel: bool) -> CallForm:
        """Blocks of one call."""
        body = lark.rule("call", _objects(lark, tools, "arguments"))
        end = lark.marker(self.closing)
        between = r"/\n{1,2}/?" if is_parallel else None
        return CallForm(self.opening, f'"\\n" {body} "\\n" {end}', between=between)


class Llama3Format:
    """The completion is the object of a call, or several with ``;`` between them."""

    name = "llama3_json"
    tag = "<|python_tag|>"
    markers = (tag,)
    is_anchored = True

    def triggers(self, tools: Sequence[ToolSpec], *, is_constrained: bool) -> tuple[str, ...]:
        """The brace, which without a grammar may also begin other JSON."""
        del tools
        return (self.tag, '{"name": "' if is_constrained else "{")

    def read_block(self, reader: Reader, tools: Sequence[ToolSpec]) -> CallEvents:
        """All calls of the completion."""
        del tools
        yield from reader.optional(self.tag)
        while True:
            yield from reader.space()
            yield from read_call(reader)
            yield CallEnd()
            yield from reader.space()
            if not (yield from reader.optional(";")):
                return

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, is_parallel: bool) -> CallForm:
        """One block with all calls."""
        body = lark.rule("call", _objects(lark, tools, "parameters"))
        block = f'{body} ("; " {body})*' if is_parallel else body
        return CallForm("", f"({lark.marker(self.tag)})? {block}", openings=('{"name": "',))
