"""The form of an answer: one grammar for thinking, calls and schema, checked before it is used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from tiercel.errors import InvalidRequestError
from tiercel.grammar.json_schema import refuse
from tiercel.grammar.spec import GrammarSpec, ThinkingForm, compile_spec
from tiercel.params import Limits, StructuredOutputs
from tiercel.serve.generation.answer import ThinkingBound
from tiercel.serve.generation.tools.tools import ToolUse
from tiercel.serve.http.errors import refusal
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState

_TOO_COMPLEX: Final = "schema_too_complex"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer must look like.

    Attributes:
        outputs: the form of its visible text; None for any.
        use: the calls that it may hold.
        thinking: how it thinks before it answers.
        param: the field that asks for the form.
        client: who asks for it; forms of different clients are compiled in turn.
    """

    outputs: StructuredOutputs | None
    use: ToolUse | None = None
    thinking: ThinkingForm | None = None
    param: str = "response_format"
    client: str = ""


async def compile_grammar(
    state: ServerState, model: ServedModel, form: AnswerForm
) -> GrammarSpec | None:
    """The grammar of an answer; None if it may be anything.

    Raises:
        InvalidRequestError: code `invalid_schema` or `schema_too_complex`; or the model has no
            token that ends an answer, and the form must be kept.
        QueueFullError: too many forms wait to be compiled, or for too long.
    """
    if form.outputs is None and form.use is None:
        return None
    if model.grammars is None:
        if form.outputs is None and form.use is not None and not form.use.is_required:
            return None  # calls are then found in what the model writes of its own accord
        raise InvalidRequestError(
            "this model has no token that ends an answer, so its form cannot be enforced.",
            param=form.param,
        )
    try:
        check_size(form.outputs, state.settings.limits)
        spec = await state.off_loop(
            compile_spec,
            form.outputs,
            max_tokens=model.info.max_model_len,
            calls=form.use,
            thinking=form.thinking,
            control_tokens=model.tokenizer.control_tokens,
            limits=state.settings.limits,
        )
        if spec is not None:
            await model.grammars.check(spec, form.client)
    except InvalidRequestError as error:
        if error.param is not None:
            raise
        message = f"{form.param}: {error}"
        raise refusal(400, error.code, message, hint=error.hint, param=form.param) from None
    return spec


def check_size(outputs: StructuredOutputs | None, limits: Limits) -> None:
    """Hold a form to the bounds of this server, which may be lower than those of its type.

    Raises:
        InvalidRequestError: code `schema_too_complex`.
    """
    if outputs is None:
        return
    for what, text, limit in (
        ("the schema", outputs.json, limits.max_schema_bytes),
        ("choice", "".join(outputs.choice or ()), limits.max_schema_bytes),
        ("regex", outputs.regex, limits.max_regex_bytes),
        ("grammar", outputs.grammar, limits.max_grammar_bytes),
    ):
        size = len(text.encode()) if isinstance(text, str) else 0
        if size > limit:
            raise refuse(_TOO_COMPLEX, f"{what} has {size} bytes.", f"This server takes {limit}.")
    num_choices = len(outputs.choice or ())
    if num_choices > limits.max_schema_nodes:
        most = f"This server takes {limits.max_schema_nodes}."
        raise refuse(_TOO_COMPLEX, f"choice has {num_choices} strings.", most)


async def bound_thinking(
    state: ServerState, model: ServedModel, form: AnswerForm, max_tokens: int | None
) -> ThinkingBound | None:
    """The bound on an answer's thinking; None if there is none, or no thinking.

    Raises:
        InvalidRequestError: as `compile_grammar`.
    """
    if form.thinking is None or max_tokens is None:
        return None
    closing = f"\n{form.thinking.closing}\n\n"
    return ThinkingBound(
        max_tokens=max_tokens,
        closing=closing,
        closing_ids=tuple(model.tokenizer.encode(closing, parse_special=True)),
        grammar=await compile_grammar(state, model, replace(form, thinking=None)),
    )
