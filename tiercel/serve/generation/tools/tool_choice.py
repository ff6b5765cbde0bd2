"""The tools that a request lets a model call: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiercel.errors import InvalidRequestError
from tiercel.grammar.lark import LarkWriter
from tiercel.grammar.spec import CallForm
from tiercel.params import LIMITS, Limits
from tiercel.serve.generation.tools.parsers.format import ToolFormat, ToolSpec, check_parameters
from tiercel.serve.generation.tools.parsers.parser import CallParser, ParserSettings
from tiercel.serve.generation.tools.tool_formats import SelectedFormat


@dataclass(frozen=True, slots=True)
class ToolConstraints:
    """The tool calls that one request allows; a `CallGrammar`.

    Attributes:
        format: tool-call format of the model.
        tools: tools that may be called.
        is_required: whether a completion must be tool calls.
        is_parallel: whether it may hold several.
        is_anchored: whether calls come only at the start of a completion.
    """

    format: ToolFormat
    tools: tuple[ToolSpec, ...]
    is_required: bool
    is_parallel: bool
    is_anchored: bool

    def write(self, lark: LarkWriter) -> CallForm:
        """Add the rules of the calls to the grammar of a completion."""
        return self.format.write(lark, self.tools, is_parallel=self.is_parallel)

    def parser(self, *, is_constrained: bool = True) -> CallParser:
        """A parser for one completion.

        Args:
            is_constrained: whether a grammar constrains the completion. Without one a call is
                reported when it is complete, and a malformed call is content.
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


def make_tool_constraints(
    selected: SelectedFormat | None,
    tools: Sequence[ToolSpec],
    *,
    choice: str,
    named: str | None,
    is_parallel: bool,
    is_structured: bool,
    max_tokens: int,
    limits: Limits = LIMITS,
) -> ToolConstraints | None:
    """The constraints that a request's tools and tool choice set.

    Args:
        selected: tool-call format of the model.
        tools: `tools` of the request, with distinct names.
        choice: `tool_choice`: ``none``, ``auto`` or ``required``.
        named: the tool that must be called; None: any.
        is_parallel: `parallel_tool_calls`; a named choice is one call in any case.
        is_structured: whether the text must otherwise match a structure (a schema, ...), so that
            calls replace it and do not come within text.
        max_tokens: tokens of the context.
        limits: limits of this server.

    Returns:
        None if no call is allowed.

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
    if selected.format.is_anchored and is_structured and not must:
        raise InvalidRequestError(
            "this model's calls cannot be told from an answer of that form.",
            hint="Set tool_choice to required or none.",
            param="tool_choice",
        )
    return ToolConstraints(
        format=selected.format,
        tools=tuple(tool for tool in tools if named in (None, tool.name)),
        is_required=must,
        is_parallel=is_parallel and named is None,
        is_anchored=selected.format.is_anchored or must or is_structured,
    )
