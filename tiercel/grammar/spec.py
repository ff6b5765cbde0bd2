r"""From the form that an answer must have to one grammar; pure, and free of PyTorch.

The whole answer is one grammar, of up to three parts:

    thinking, up to its end marker  |  free text, up to the trigger of a tool call  |  calls or form

So the grammar itself decides where a constraint begins, byte by byte, and not the tokens that
happen to spell a marker. The grammar is compiled elsewhere (`matcher.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

from msgspec import Struct

from tiercel.grammar.json_schema import read_schema
from tiercel.grammar.lark import LarkWriter, either, escape_regex, literal
from tiercel.params import LIMITS, Limits, StructuredOutputs

# Line ends that models write after the end of their thinking.
GAP: Final = r"/\n{1,4}/?"
_USER_GRAMMAR: Final = "user"
# As in JavaScript: in Rust these also hold the digits and letters of other scripts.
_CLASSES: Final = MappingProxyType(
    {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
)


class GrammarSpec(Struct, frozen=True):
    """A grammar as text, for llguidance; it may travel between processes.

    Attributes:
        text: JSON, a list of named grammars, of which the first is the answer's.
    """

    text: str

    @property
    def digest(self) -> bytes:
        """Digest of its content."""
        return hashlib.sha256(self.text.encode()).digest()


class ThinkingForm(Struct, frozen=True):
    """How a model marks its thinking.

    Attributes:
        opening: marker that the model writes first; also with line ends after it.
        closing: marker that ends the thinking.
        is_open: whether the prompt has opened it already; else the model may open it or not.
    """

    opening: str
    closing: str
    is_open: bool


class CallForm(Struct, frozen=True):
    """How a model writes tool calls, as Lark elements.

    Attributes:
        trigger: marker in front of a block of calls; "" if calls are an answer of their own, known
            by how they begin.
        block: elements that follow the trigger.
        openings: possible starts of `block` without a trigger; no other answer may begin so.
        between: elements between two blocks; None: there is one block only.
    """

    trigger: str
    block: str
    openings: tuple[str, ...] = ()
    between: str | None = None


class CallGrammar(Protocol):
    """The tool calls that an answer may or must hold."""

    @property
    def is_required(self) -> bool:
        """Whether the answer is calls and nothing else."""
        ...

    def write(self, lark: LarkWriter) -> CallForm:
        """Add the rules of the calls."""
        ...


def compile_spec(
    outputs: StructuredOutputs | None,
    *,
    max_tokens: int,
    calls: CallGrammar | None = None,
    thinking: ThinkingForm | None = None,
    control_tokens: Mapping[str, int] | None = None,
    limits: Limits = LIMITS,
) -> GrammarSpec | None:
    """Compile the form of an answer into the text of a grammar.

    Args:
        outputs: form of the visible text; None for any text.
        max_tokens: tokens of the context, which no minimum may exceed.
        calls: tool calls that the answer may or must hold; None for none.
        thinking: markup of the thinking before the answer; None: the model does not think.
        control_tokens: id by name, to know which markers are tokens of their own.
        limits: limits of a schema's size and depth; `outputs` itself has been checked.

    Returns:
        None if anything may be written.

    Raises:
        InvalidRequestError: code `invalid_schema` or `schema_too_complex`.
    """
    if outputs is None and calls is None:
        return None
    lark = LarkWriter(control_tokens or {})
    more: list[dict[str, object]] = []
    form = None if outputs is None else _content(outputs, lark, more, max_tokens, limits)
    if calls is None:
        parts = _Parts(lark, form, None, is_required=False)
    else:
        parts = _Parts(lark, form, calls.write(lark), is_required=calls.is_required)
    text = lark.build(_with_thinking(parts, thinking))
    return GrammarSpec(json.dumps({"grammars": [{"lark_grammar": text}, *more]}))


def _content(
    outputs: StructuredOutputs,
    lark: LarkWriter,
    more: list[dict[str, object]],
    max_tokens: int,
    limits: Limits,
) -> str:
    """The element for the visible text."""
    if isinstance(outputs.json, str):
        return lark.json(read_schema(outputs.json, max_tokens, limits))
    if outputs.json_object:
        return lark.json({"type": "object"})
    if outputs.choice is not None:
        return lark.rule("CHOICE", " | ".join(literal(choice) for choice in outputs.choice))
    if outputs.regex is not None:
        return lark.rule("content", _regex(outputs.regex))
    assert outputs.grammar is not None, "one field is given"
    more.append({"name": _USER_GRAMMAR, "lark_grammar": outputs.grammar})
    return f"@{_USER_GRAMMAR}"


def _regex(source: str) -> str:
    """A regular expression between slashes; its classes are those of patterns in schemas."""
    escaped_chars = []
    chars = iter(source)
    for char in chars:
        if char == "\\":
            escaped = next(chars, "")
            escaped_chars.append(_CLASSES.get(escaped, char + escaped))
        else:
            escaped_chars.append({"/": "\\/", "\n": "\\n"}.get(char, char))
    return "/" + "".join(escaped_chars) + "/"


class _Parts:
    """The answer after the thinking: form, calls, or a choice of both."""

    def __init__(
        self, lark: LarkWriter, form: str | None, calls: CallForm | None, *, is_required: bool
    ) -> None:
        self.lark = lark
        self._form = form
        self._calls = calls
        self._is_required = is_required

    def body(self, excluded: str = "") -> str:
        """Elements of the answer; its free text does not begin with `excluded` (a regex)."""
        calls = self._calls
        if calls is None:
            assert self._form is not None, "without calls there is a form"
            return self._form
        if self._is_required:
            return self._only_calls(calls)
        if self._form is not None:
            return either([self._form, self._only_calls(calls)])
        return self._free_text_and_calls(calls, excluded)

    def _only_calls(self, calls: CallForm) -> str:
        trigger = self.lark.marker(calls.trigger)
        block = self.lark.rule("block", f"{trigger} {calls.block}")
        if calls.between is None:
            return block
        return f"{block} ({calls.between} {block})*"

    def _free_text_and_calls(self, calls: CallForm, excluded: str) -> str:
        lark = self.lark
        if not calls.trigger:
            begins = "|".join(escape_regex(opening) for opening in calls.openings)
            never = rf"\s*({begins})(?s:.*)"
            free = lark.text(f"({excluded}|{never})" if excluded else never)
            return either([self._only_calls(calls), free])
        first = lark.text(excluded)
        block = lark.rule("free_block", f"{lark.until(calls.trigger, first)} {calls.block}")
        if calls.between is None:
            return either([block, first])
        later = lark.rule("free_block", f"{lark.until(calls.trigger)} {calls.block}")
        return either([f"{block} {later}* {lark.text()}", first])


def _with_thinking(parts: _Parts, thinking: ThinkingForm | None) -> str:
    if thinking is None:
        return parts.body()
    lark = parts.lark
    thought = f"{lark.until(thinking.closing)} {GAP} {parts.body()}"
    if thinking.is_open:
        return thought
    opening = thinking.opening.rstrip("\n")
    never = rf"\s*{escape_regex(opening)}(?s:.*)"
    return either([f"{GAP} {lark.marker(opening)} {thought}", parts.body(never)])
