"""The interface of a tool-call format: it reads calls and writes their grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from tiercel.errors import InvalidRequestError
from tiercel.grammar.json_schema import check_schema, refuse
from tiercel.grammar.lark import LarkWriter
from tiercel.grammar.spec import CallForm
from tiercel.params import Limits
from tiercel.serve.generation.tools.parsers.reader import CallEvents, Reader

# Keywords by which a schema may name properties outside of `properties`.
_OPEN: Final = frozenset(
    {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
)
MAX_TOOLS_SIZE: Final = 4  # values of all tools together, as a multiple of one schema's limit


class ToolSpec(Protocol):
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments; None: it has no arguments.
        strict: whether a keyword of the schema that cannot be enforced refuses the request; else
            such a keyword is ignored.
    """

    name: str
    description: str | None
    parameters: dict[str, object] | None
    strict: bool | None


class ToolFormat(Protocol):
    """A tool-call format.

    Attributes:
        name: name in `--tool-parser`.
        markers: texts around calls; control tokens in some vocabularies.
        is_anchored: whether calls come only at the start of a completion.
    """

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    @property
    def is_anchored(self) -> bool: ...

    def triggers(self, tools: Sequence[ToolSpec], *, is_constrained: bool) -> tuple[str, ...]:
        """Texts that begin a block of calls."""
        ...

    def read_block(self, reader: Reader, tools: Sequence[ToolSpec]) -> CallEvents:
        """Read a block of calls, from its trigger to its end."""
        ...

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, is_parallel: bool) -> CallForm:
        """Add the rules of calls of these tools, of one call if not `is_parallel`."""
        ...


def arguments_schema(tool: ToolSpec) -> Mapping[str, Any]:
    """The schema of a tool's arguments; it excludes properties that it does not name."""
    given = tool.parameters or {}
    schema: dict[str, Any] = {"type": "object", "properties": {}, **given}
    if not _OPEN & given.keys():
        schema["additionalProperties"] = bool(given) and "properties" not in given
    return schema


def check_parameters(tools: Sequence[ToolSpec], max_tokens: int, limits: Limits) -> None:
    """Refuse schemas of arguments that are too large, or do not describe an object.

    Args:
        tools: tools of a request.
        max_tokens: tokens of the context.
        limits: limits of this server.

    Raises:
        InvalidRequestError: code `invalid_schema` or `schema_too_complex`; `param` names the tool.
    """
    num_values = 0
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function.parameters"
        try:
            num_values += check_schema(tool.parameters or {}, max_tokens, limits)
            kind = (tool.parameters or {}).get("type", "object")
            if kind != "object":
                raise refuse("invalid_schema", f"the arguments have the type {kind!r:.40}.")
        except InvalidRequestError as error:
            raised = refuse(error.code, f"{where}: {error}", error.hint)
            raised.param = where
            raise raised from None
    most = MAX_TOOLS_SIZE * limits.max_schema_nodes
    if num_values > most:
        too_many = refuse(
            "schema_too_complex",
            f"the schemas of tools have {num_values} values together.",
            f"Use at most {most}.",
        )
        too_many.param = "tools"
        raise too_many
