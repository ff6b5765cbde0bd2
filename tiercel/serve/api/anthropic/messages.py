"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's wire format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tiercel.errors import ArgumentError, InvalidRequestError
from tiercel.params import SamplingDefaults, SamplingParams, StructuredOutputs
from tiercel.serve.api.anthropic.messages_input import (
    ignored_fields,
    template_functions,
    template_input,
)
from tiercel.serve.api.anthropic.messages_output import AnthropicWriter
from tiercel.serve.api.anthropic.messages_types import (
    AnthropicAnswer,
    CountAnswer,
    CountRequest,
    MessagesRequest,
    PromptFields,
    Thinking,
)
from tiercel.serve.api.compat_fields import refuse_unless_neutral
from tiercel.serve.api.info_routes import json_response
from tiercel.serve.api.model_routes import model_routes
from tiercel.serve.api.request_body import read_body
from tiercel.serve.api.sampling_fields import (
    check_stops,
    chosen,
    make_structured,
    with_param,
)
from tiercel.serve.api.streaming_response import respond, while_connected
from tiercel.serve.generation.chat_input import ChatInput, encode_chat_input, prepare_chat
from tiercel.serve.generation.generation import Generation
from tiercel.serve.http.errors import THREADS_REFUSED, client_error
from tiercel.serve.http.ignored_fields import note_ignored
from tiercel.serve.http.route_docs import RouteDoc
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState, request_id, sender_of

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "container": (),
    "mcp_servers": ([],),
    "prefill": (),
}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}

DOCS: Final = (
    RouteDoc(
        "/v1/messages",
        "Answers a conversation, in Anthropic's format.",
        MessagesRequest,
        AnthropicAnswer,
        "post",
        streams=True,
        errors=(404, 429, 503),
        is_anthropic=True,
    ),
    RouteDoc(
        "/v1/messages/count_tokens",
        "Counts the tokens of a conversation.",
        CountRequest,
        CountAnswer,
        "post",
        errors=(404, 429, 503),
        is_anthropic=True,
    ),
)


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of this module."""

    async def count(request: Request) -> Response:
        model = state.ready_model()
        body = await read_body(request, CountRequest, state.settings.limits)
        note_ignored(request, ignored_fields(body))
        return await while_connected(request, _count(state, model, body))

    return [
        *model_routes(state, ("/v1/messages",), MessagesRequest, _answer),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]


async def _answer(
    state: ServerState, model: ServedModel, request: Request, body: MessagesRequest
) -> Response:
    model.check_name(body.model)
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and budget >= body.max_tokens:
        raise InvalidRequestError(
            f"thinking.budget_tokens={budget} leaves nothing of max_tokens={body.max_tokens}.",
            hint="Lower it.",
            param="thinking.budget_tokens",
        )
    note_ignored(request, ignored_fields(body))
    check_stops("stop_sequences", body.stop_sequences, state.settings.limits)
    params = _params(body, model.sampling)
    wanted = await prepare_chat(state, model, chat_input(body), params, sender_of(request))
    is_stream = bool(body.stream)
    generation = Generation(state, model, wanted, is_stream=is_stream)
    writer = AnthropicWriter(model.name, request_id(request))
    return await respond(request, generation, writer, is_stream=is_stream)


async def _count(state: ServerState, model: ServedModel, body: CountRequest) -> Response:
    model.check_name(body.model)
    ids = await encode_chat_input(state, model, chat_input(body))
    return json_response(CountAnswer(len(ids)))


def chat_input(body: PromptFields) -> ChatInput:
    """The conversation of a request.

    Raises:
        InvalidRequestError: naming the field.
    """
    refuse_unless_neutral(body, NEUTRAL)
    if body.thread is not UNSET and body.thread is not None:
        raise client_error(
            400,
            THREADS_REFUSED,
            "thread is not supported: nothing is kept between requests.",
            hint="Send the whole conversation.",
            param="thread",
        )
    choice = body.tool_choice
    if choice is not None and choice.type == "tool" and choice.name is None:
        raise InvalidRequestError("tool_choice.name must be given.", param="tool_choice.name")
    thinking = body.thinking
    kwargs = {} if thinking is None else {"enable_thinking": thinking.type != "disabled"}
    if thinking is not None:
        _check_thinking(thinking)
    effort = None if body.output_config is None else body.output_config.effort
    return ChatInput(
        messages=template_input(body),
        tools=template_functions(body.tools or ()),
        tool_choice=None if choice is None else _CHOICES.get(choice.type),
        tool_name=choice.name if choice is not None and choice.type == "tool" else None,
        is_parallel=choice is None or not choice.disable_parallel_tool_use,
        effort=effort,
        template_kwargs=kwargs,
        max_thinking=None if thinking is None else thinking.budget_tokens,
        continues_final=body.messages[-1].role == "assistant",
        structured_param="output_config.format",
    )


def _check_thinking(thinking: Thinking) -> None:
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise InvalidRequestError(
            "thinking.budget_tokens must be given.", param="thinking.budget_tokens"
        )
    if thinking.type != "enabled" and thinking.budget_tokens is not None:
        raise InvalidRequestError(
            f"thinking.budget_tokens has no place where thinking is {thinking.type}.",
            param="thinking.budget_tokens",
        )


def _params(body: MessagesRequest, defaults: SamplingDefaults) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=chosen(body.temperature, defaults.temperature, 1.0),
            top_p=chosen(body.top_p, defaults.top_p, 1.0),
            top_k=chosen(body.top_k, defaults.top_k, 0),
            min_p=defaults.min_p or 0.0,
            repetition_penalty=defaults.repetition_penalty or 1.0,
            stop=body.stop_sequences or (),
            max_tokens=body.max_tokens,
            structured_outputs=_structured(body),
        )
    except ArgumentError as error:
        raise with_param(error, "stop_sequences" if str(error).startswith("stop") else "") from None


def _structured(body: MessagesRequest) -> StructuredOutputs | None:
    config = body.output_config
    if config is None or config.format is None:
        return None
    given: dict[str, Any] = {"json": config.format.schema}
    return make_structured("output_config.format", given)
