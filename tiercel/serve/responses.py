"""`/v1/responses`: OpenAI's Responses API, without state: nothing is kept between requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tiercel.params import StructuredOutputs
from tiercel.serve.chat_input import ChatInput, prepare_chat
from tiercel.serve.errors import escaped, unsupported
from tiercel.serve.fields import (
    check_bound,
    check_sampling,
    make_params,
    make_structured,
    refuse_unless_neutral,
)
from tiercel.serve.generation import Generation, GenerationRequest
from tiercel.serve.model_route import model_routes
from tiercel.serve.respond import respond
from tiercel.serve.responses_input import input_messages, input_tools
from tiercel.serve.responses_types import ResponseObject, ResponsesRequest, ResponseToolChoice
from tiercel.serve.responses_writer import ResponsesWriter, new_response
from tiercel.serve.route_docs import RouteDoc
from tiercel.serve.state import Sender, ServedModel, ServerState, request_id, sender_of

LOGPROBS: Final = "message.output_text.logprobs"
# What needs answers that are kept, or tools of a vendor; see `fields.NEUTRAL`.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "max_tool_calls": (),
    "moderation": (),
    "context_management": (),
    "add_special_tokens": (False,),
}

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
    most = state.settings.limits.max_logprobs
    check_bound("top_logprobs", body.top_logprobs or 0, most, "alternatives")
    for name in body.include or ():
        if name != LOGPROBS:
            raise unsupported("include", f"holds {escaped(repr(name), 80)}, which is not supported")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity")
    reasoning = body.reasoning
    if reasoning is not None:
        for name in ("summary", "generate_summary"):
            if getattr(reasoning, name) not in (None, "auto"):
                raise unsupported(f"reasoning.{name}", "is not supported: reasoning is shown whole")
    choice = body.tool_choice
    if isinstance(choice, ResponseToolChoice) and (choice.type != "function" or not choice.name):
        raise unsupported("tool_choice", "must be none, auto, required or name a function")


def _num_top(body: ResponsesRequest) -> int | None:
    """Log-probabilities are shown if the field or the number asks for them."""
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
        max_tokens=(
            defaults.max_tokens if body.max_output_tokens is None else body.max_output_tokens
        ),
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
        form_param="text.format",
    )
    return await prepare_chat(state, model, chat, params, sender)


def _structured(body: ResponsesRequest) -> StructuredOutputs | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return make_structured("text.format", {"json_object": True})
    return make_structured("text.format", {"json": form.schema})
