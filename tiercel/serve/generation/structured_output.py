"""Structured output: one grammar for thinking, tool calls and schema, checked before its use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tiercel.errors import InvalidRequestError
from tiercel.grammar.json_schema import refuse
from tiercel.grammar.spec import GrammarSpec, ThinkingForm, compile_spec
from tiercel.params import Limits, StructuredOutputs
from tiercel.serve.generation.tools.tool_choice import ToolConstraints
from tiercel.serve.http.errors import client_error
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState

_TOO_COMPLEX: Final = "schema_too_complex"


@dataclass(frozen=True, slots=True)
class OutputConstraints:
    """Constraints on a completion, which become one grammar.

    Attributes:
        structured: structure of the visible text; None for any text.
        tools: tool calls that it may hold.
        thinking: thinking before the visible text.
        param: request field that sets the constraint, for errors.
        client: client that sends the request; grammars of different clients are compiled in turn.
    """

    structured: StructuredOutputs | None
    tools: ToolConstraints | None = None
    thinking: ThinkingForm | None = None
    param: str = "response_format"
    client: str = ""


async def compile_grammar(
    state: ServerState, model: ServedModel, constraints: OutputConstraints
) -> GrammarSpec | None:
    """The grammar of a completion; None if it may be any text.

    Raises:
        InvalidRequestError: code `invalid_schema` or `schema_too_complex`; or the model has no
            end token, and the constraint must hold.
        QueueFullError: too many grammars wait to be compiled, or for too long.
    """
    structured, tools = constraints.structured, constraints.tools
    if structured is None and tools is None:
        return None
    model.tokenizer.require_text(constraints.param)
    if model.grammars is None:
        if structured is None and tools is not None and not tools.is_required:
            return None  # the parser finds the calls that the model writes of its own accord
        raise InvalidRequestError(
            "this model has no token that ends an answer, so its form cannot be enforced.",
            param=constraints.param,
        )
    try:
        check_size(structured, state.settings.limits)
        spec = await state.run_in_thread(
            compile_spec,
            structured,
            max_tokens=model.info.max_model_len,
            calls=tools,
            thinking=constraints.thinking,
            control_tokens=model.tokenizer.control_tokens,
            limits=state.settings.limits,
        )
        if spec is not None:
            await model.grammars.check(spec, constraints.client)
    except InvalidRequestError as error:
        if error.param is not None:
            raise
        message = f"{constraints.param}: {error}"
        raise client_error(
            400, error.code, message, hint=error.hint, param=constraints.param
        ) from None
    return spec


def check_size(structured: StructuredOutputs | None, limits: Limits) -> None:
    """Check a structure against the limits of this server, which may be lower than its type's.

    Raises:
        InvalidRequestError: code `schema_too_complex`.
    """
    if structured is None:
        return
    for what, text, limit in (
        ("the schema", structured.json, limits.max_schema_bytes),
        ("choice", "".join(structured.choice or ()), limits.max_schema_bytes),
        ("regex", structured.regex, limits.max_regex_bytes),
        ("grammar", structured.grammar, limits.max_grammar_bytes),
    ):
        size = len(text.encode()) if isinstance(text, str) else 0
        if size > limit:
            raise refuse(_TOO_COMPLEX, f"{what} has {size} bytes.", f"This server takes {limit}.")
    num_choices = len(structured.choice or ())
    if num_choices > limits.max_schema_nodes:
        most = f"This server takes {limits.max_schema_nodes}."
        raise refuse(_TOO_COMPLEX, f"choice has {num_choices} strings.", most)
