"""`/v1/responses`: OpenAI's Responses API, stateless: nothing is stored between requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tiercel.errors import InvalidRequestError
from tiercel.params import StructuredOutputs
from tiercel.serve.api.compat_fields import IGNORED as ENGINE_IGNORED
from tiercel.serve.api.compat_fields import given_fields, refuse_unless_neutral, take_aliases
from tiercel.serve.api.model_routes import model_routes
from tiercel.serve.api.openai.responses_input import (
    HONOURED_TOOLS,
    ignored_input,
    input_messages,
    input_tools,
)
from tiercel.serve.api.openai.responses_output import ResponsesWriter, new_response
from tiercel.serve.api.openai.responses_types import (
    ResponseObject,
    ResponsesRequest,
    ResponseToolChoice,
)
from tiercel.serve.api.sampling_fields import (
    check_bound,
    check_sampling,
    make_params,
    make_structured,
    token_bound,
)
from tiercel.serve.api.streaming_response import respond
from tiercel.serve.generation.chat_input import ChatInput, prepare_chat
from tiercel.serve.generation.generation import Generation, GenerationRequest
from tiercel.serve.http.errors import unsupported_parameter
from tiercel.serve.http.ignored_fields import note_ignored
from tiercel.serve.http.route_docs import RouteDoc
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import Sender, ServerState, request_id, sender_of

LOGPROBS: Final = "message.output_text.logprobs"
# Fields that need stored responses, or have another name here; see `compat_fields.py`.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "moderation": (),
    "add_special_tokens": (False,),
    "n": (1,),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "response_format": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
}
ALIASES: Final = dict.fromkeys(
    ("n_predict", "max_new_tokens", "max_tokens", "max_completion_tokens"), "max_output_tokens"
)
# Fields that limit the work of OpenAI's hosted tools and stored conversations.
IGNORED: Final = ("max_tool_calls", "context_management")

DOCS: Final = (
    RouteDoc(
        "/v1/responses",
        "Answers an input of items.",
        ResponsesRequest,
        ResponseObject,
        "post",
        streams=True,
        errors=(404, 429, 503),
    ),
)


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of this module."""
    return model_routes(state, ("/v1/responses",), ResponsesRequest, _answer)


async def _answer(
    state: ServerState, model: ServedModel, request: Request, body: ResponsesRequest
) -> Response:
    model.check_name(body.model)
    _check(body, state)
    note_ignored(request, _ignored(body))
    wanted = await _generation(state, model, body, sender_of(request))
    is_stream = bool(body.stream)
    generation = Generation(state, model, wanted, is_stream=is_stream)
    writer = ResponsesWriter(
        model.tokenizer,
        new_response(body, model.name, model.sampling),
        request_id(request),
        num_top=_num_top(body),
    )
    return await respond(request, generation, writer, is_stream=is_stream)


def _check(body: ResponsesRequest, state: ServerState) -> None:
    check_sampling(body, state.settings)
    refuse_unless_neutral(body, NEUTRAL)
    take_aliases(body, ALIASES)
    if body.n_probs:
        take_aliases(body, {"n_probs": "top_logprobs"})
    most = state.settings.limits.max_logprobs
    check_bound("top_logprobs", body.top_logprobs or 0, most, "alternatives")
    choice = body.tool_choice
    if isinstance(choice, ResponseToolChoice):
        if choice.type not in HONOURED_TOOLS or not choice.name:
            raise unsupported_parameter(
                "tool_choice", "must be none, auto, required or name a tool"
            )
        if choice.name not in {t.name for t in body.tools or () if t.type == choice.type}:
            raise InvalidRequestError(
                f"tool_choice names {choice.name!r:.80}, which is none of the tools.",
                param="tool_choice",
            )


def _ignored(body: ResponsesRequest) -> list[str]:
    """The ignored fields of a request, which change no completion here."""
    names = given_fields(body, (*IGNORED, *ENGINE_IGNORED))
    names += ["include"] * any(name != LOGPROBS for name in body.include or ())
    if body.text is not None:
        names += ["text.verbosity"] * (body.text.verbosity not in (None, "medium"))
    for name in ("summary", "generate_summary") if body.reasoning is not None else ():
        value = getattr(body.reasoning, name)
        names += [f"reasoning.{name}"] * (value not in (None, "auto"))
    return names + ignored_input(body)


def _num_top(body: ResponsesRequest) -> int | None:
    """The number of alternatives; None if log-probabilities are not requested by either field."""
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        return body.top_logprobs or 0
    return None


async def _generation(
    state: ServerState, model: ServedModel, body: ResponsesRequest, sender: Sender
) -> GenerationRequest:
    defaults = model.sampling
    params = make_params(
        body,
        defaults,
        n=1,
        max_tokens=token_bound("max_output_tokens", body.max_output_tokens, defaults.max_tokens),
        logprobs=_num_top(body),
        prompt_logprobs=None,
        structured=_structured(body),
    )
    choice = body.tool_choice
    chat = ChatInput(
        messages=input_messages(body),
        tools=input_tools(body.tools or ()),
        tool_choice=choice if isinstance(choice, str) else None,
        tool_name=choice.name if isinstance(choice, ResponseToolChoice) else None,
        is_parallel=body.parallel_tool_calls is not False,
        effort=None if body.reasoning is None else body.reasoning.effort,
        template_kwargs=body.chat_template_kwargs or {},
        drops_oldest=body.truncation == "auto",
        priority=body.priority or 0,
        param="input",
        structured_param="text.format",
    )
    return await prepare_chat(state, model, chat, params, sender)


def _structured(body: ResponsesRequest) -> StructuredOutputs | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return make_structured("text.format", {"json_object": True})
    return make_structured("text.format", {"json": form.schema})
