"""Calls between DeepSeek's tokens.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up
    ```json
    {"word": "tin"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

is how V3 and R1 write it; V3.1 writes

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>
    {"word": "tin"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

without the line end.

Sources: the chat templates of DeepSeek-V3, -R1 and -V3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tiercel.grammar.lark import LarkWriter, either, literal
from tiercel.grammar.spec import CallForm
from tiercel.serve.generation.tools.parsers.format import ToolSpec, arguments_schema
from tiercel.serve.generation.tools.parsers.reader import (
    CallEnd,
    CallEvents,
    CallStart,
    Reader,
    Reading,
    stream_object,
)

_BAR: Final = "\uff5c"  # the full-width bar of DeepSeek's tokens
CALLS_BEGIN: Final = f"<{_BAR}tool▁calls▁begin{_BAR}>"
CALLS_END: Final = f"<{_BAR}tool▁calls▁end{_BAR}>"
CALL_BEGIN: Final = f"<{_BAR}tool▁call▁begin{_BAR}>"
CALL_END: Final = f"<{_BAR}tool▁call▁end{_BAR}>"
SEPARATOR: Final = f"<{_BAR}tool▁sep{_BAR}>"
_FENCE: Final = "```json\n"
_FENCE_END: Final = "\n```"


class DeepSeekFormat:
    """One block of calls.

    Args:
        is_fenced: whether calls are written as by V3 and R1; else as by V3.1. Both are read.
    """

    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
    is_anchored = False

    def __init__(self, *, is_fenced: bool) -> None:
        self._is_fenced = is_fenced

    @property
    def name(self) -> str:
        """The name in `--tool-parser`."""
        return "deepseek_v3" if self._is_fenced else "deepseek_v31"

    def triggers(self, tools: Sequence[ToolSpec], *, is_constrained: bool) -> tuple[str, ...]:
        """The token that begins all calls."""
        del tools, is_constrained
        return (CALLS_BEGIN,)

    def read_block(self, reader: Reader, tools: Sequence[ToolSpec]) -> CallEvents:
        """All calls of the completion."""
        del tools
        yield from reader.literal(CALLS_BEGIN)
        while True:
            yield from reader.space()
            yield from reader.literal(CALL_BEGIN)
            yield from _read_call(reader)
            yield CallEnd()
            yield from reader.space()
            yield from reader.more(1)
            if not reader.rest.startswith(CALL_BEGIN[0]):
                return
            if (yield from reader.optional(CALLS_END)):
                return

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, is_parallel: bool) -> CallForm:
        """One block with all calls."""
        begin, end, separator = map(lark.marker, (CALL_BEGIN, CALL_END, SEPARATOR))
        options = []
        for tool in tools:
            arguments = lark.json(arguments_schema(tool), is_lenient=not tool.strict)
            if self._is_fenced:
                head = f'"function" {separator} {literal(tool.name + chr(10) + _FENCE)}'
                options.append(f"{head} {arguments} {literal(_FENCE_END)}")
            else:
                options.append(f"{literal(tool.name)} {separator} {arguments}")
        call = lark.rule("call", f"{begin} {either(options)} {end}")
        calls = f'{call} ("\\n"? {call})*' if is_parallel else call
        return CallForm(CALLS_BEGIN, f"{calls} {lark.marker(CALLS_END)}")


def _read_call(reader: Reader) -> Reading[None]:
    head = yield from reader.name(SEPARATOR)
    yield from reader.space()
    yield from reader.more(1)
    if head == "function" and not reader.rest.startswith("{"):
        head = yield from reader.name("\n")
        yield from reader.literal(_FENCE)
    yield CallStart(head)
    yield from stream_object(reader)
    yield from reader.space()
    yield from reader.closing(_FENCE_END.strip())
    yield from reader.space()
    yield from reader.closing(CALL_END)
