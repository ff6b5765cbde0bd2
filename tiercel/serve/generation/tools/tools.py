"""Tool calls: which format a model writes them in, what a request allows, the parser of an answer.

`select_tool_format` picks the format by the model's chat template; a template that knows no tools
gets Hermes' format, explained by a system text (`tool_prompt.py`), so that tools work with any chat
model. `ToolUse` is what one request makes of it: the grammar of its calls and parsers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tiercel.errors import ArgumentError, InvalidRequestError
from tiercel.grammar.lark import LarkWriter
from tiercel.grammar.spec import CallForm
from tiercel.params import LIMITS, Limits
from tiercel.serve.generation.tools.parsers.deepseek import DeepSeekFormat
from tiercel.serve.generation.tools.parsers.format import ToolFormat, ToolSpec, check_parameters
from tiercel.serve.generation.tools.parsers.gemma import GemmaFormat
from tiercel.serve.generation.tools.parsers.json_calls import HermesFormat, Llama3Format
from tiercel.serve.generation.tools.parsers.parser import CallParser, ParserSettings
from tiercel.serve.generation.tools.parsers.pythonic import PythonicFormat
from tiercel.serve.generation.tools.parsers.tagged_calls import DsmlFormat, QwenCoderFormat

_BAR: Final = "\uff5c"  # the full-width bar of DeepSeek's tokens
HERMES: Final = HermesFormat()
_ALL: Final[tuple[ToolFormat, ...]] = (
    HERMES,
    QwenCoderFormat(),
    Llama3Format(),
    PythonicFormat(),
    GemmaFormat("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    GemmaFormat("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    DeepSeekFormat(is_fenced=True),
    DeepSeekFormat(is_fenced=False),
    DsmlFormat("deepseek_v32", "function_calls"),
    DsmlFormat("deepseek_v4", "tool_calls"),
)
FORMATS: Final = MappingProxyType({entry.name: entry for entry in _ALL})
# What a template must hold, in this order of preference. Words of the template's own example of a
# call come first, since a template may also mention markers that it only reads.
_BY_TEMPLATE: Final = (
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    ((f"<{_BAR}tool▁calls▁begin{_BAR}>", "```json"), "deepseek_v3"),
    ((f"<{_BAR}tool▁calls▁begin{_BAR}>",), "deepseek_v31"),
    ((f"{_BAR}DSML{_BAR}", "function_calls"), "deepseek_v32"),
    ((f"{_BAR}DSML{_BAR}",), "deepseek_v4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>", "call:"), "gemma4"),
    (("func_name1(params_name1=",), "pythonic"),
    (("<|python_start|>",), "pythonic"),
    (('{"name": function name, "parameters"',), "llama3_json"),
    (("<|python_tag|>",), "llama3_json"),
)
# Marks of formats that would be taken for one of these.
_FOREIGN: Final = ("<arg_key>",)
_BY_ARCHITECTURE: Final = MappingProxyType({"deepseek4": "deepseek_v4", "llama4": "pythonic"})


@dataclass(frozen=True, slots=True)
class SelectedFormat:
    """The format of a model.

    Attributes:
        format: how calls look.
        is_in_template: the model's chat template writes tools and calls itself; else it is not
            given any, and `tool_prompt.py` writes them into the messages.
    """

    format: ToolFormat
    is_in_template: bool


def select_tool_format(
    template: str | None, architecture: str, name: str | None
) -> SelectedFormat | None:
    """The format that a model's calls have; pure.

    Args:
        template: source of the chat template; None if the model has none.
        architecture: as the model file names it.
        name: what `--tool-parser` says: a name, ``none``, or None to go by the model.

    Returns:
        None if tools are switched off, or the model cannot take messages.

    Raises:
        ArgumentError: no format has that name.
    """
    if name == "none" or template is None:
        return None
    if name is not None and name not in FORMATS:
        raise ArgumentError(
            f"tool_parser={name!r:.40} is unknown.", hint=f"Use none, {', '.join(FORMATS)}."
        )
    found = _BY_ARCHITECTURE.get(architecture)
    if not any(mark in template for mark in _FOREIGN):
        matches = (n for words, n in _BY_TEMPLATE if all(word in template for word in words))
        found = next(matches, found)
    takes_tools = "tools" in template
    if name is None and found is not None and takes_tools:
        return SelectedFormat(FORMATS[found], is_in_template=True)
    # Tools in a format that is unknown here would not be recognised in the answer.
    is_in_template = takes_tools and name is not None
    return SelectedFormat(FORMATS[name or HERMES.name], is_in_template=is_in_template)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The calls that one request allows; a `CallGrammar`.

    Attributes:
        format: how calls look.
        tools: that may be called.
        is_required: the answer must be calls.
        is_parallel: it may hold several.
        is_anchored: calls stand at the start of the answer only.
    """

    format: ToolFormat
    tools: tuple[ToolSpec, ...]
    is_required: bool
    is_parallel: bool
    is_anchored: bool

    def write(self, lark: LarkWriter) -> CallForm:
        """Add the rules of the calls to the grammar of an answer."""
        return self.format.write(lark, self.tools, is_parallel=self.is_parallel)

    def parser(self, *, is_constrained: bool = True) -> CallParser:
        """A parser for one answer.

        Args:
            is_constrained: the answer is held to the grammar. Without it a call is told when it is
                complete, and broken calls are content.
        """
        return CallParser(
            ParserSettings(
                triggers=self.format.triggers(self.tools, is_constrained=is_constrained),
                read_block=lambda reader: self.format.read_block(reader, self.tools),
                is_anchored=self.is_anchored,
                is_constrained=is_constrained,
            )
        )

    def needs_special(self, control_tokens: Mapping[str, int]) -> bool:
        """Whether the parser must see the names of control tokens in the text."""
        return any(
            name and name in marker for marker in self.format.markers for name in control_tokens
        )


def make_tool_use(
    selected: SelectedFormat | None,
    tools: Sequence[ToolSpec],
    *,
    choice: str,
    named: str | None,
    is_parallel: bool,
    has_form: bool,
    max_tokens: int,
    limits: Limits = LIMITS,
) -> ToolUse | None:
    """What a request's `tools`, `tool_choice` and `parallel_tool_calls` ask for.

    Args:
        selected: of the model.
        tools: with distinct names.
        choice: ``none``, ``auto`` or ``required``.
        named: the tool that must be called; None: any.
        is_parallel: whether several calls are welcome; a named choice is one call.
        has_form: the answer must otherwise have a form (a schema, ...), so that calls stand in its
            place and not within text.
        max_tokens: tokens of the context.
        limits: of this server.

    Returns:
        None if no call may come.

    Raises:
        InvalidRequestError: naming the field.
    """
    if named is not None and named not in {tool.name for tool in tools}:
        raise InvalidRequestError(
            f"tool_choice names {named!r:.80}, which is none of the tools.", param="tool_choice"
        )
    if choice == "required" and not tools:
        raise InvalidRequestError(
            "tool_choice is required but there are no tools.", param="tool_choice"
        )
    check_parameters(tools, max_tokens, limits)
    if not tools or (choice == "none" and named is None):
        return None
    if selected is None:
        raise InvalidRequestError(
            "tools are switched off here, or this model takes no messages.", param="tools"
        )
    must = choice == "required" or named is not None
    if selected.format.is_anchored and has_form and not must:
        raise InvalidRequestError(
            "this model's calls cannot be told from an answer of that form.",
            hint="Set tool_choice to required or none.",
            param="tool_choice",
        )
    return ToolUse(
        format=selected.format,
        tools=tuple(tool for tool in tools if named in (None, tool.name)),
        is_required=must,
        is_parallel=is_parallel and named is None,
        is_anchored=selected.format.is_anchored or must or has_form,
    )
