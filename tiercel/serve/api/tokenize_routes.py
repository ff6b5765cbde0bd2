"""Routes of the tokenizer: text to ids, ids to text, messages to their prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tiercel.errors import InvalidRequestError
from tiercel.serve.api.info_routes import json_response, token_name
from tiercel.serve.api.request_body import read_body
from tiercel.serve.generation.chat_input import (
    ChatInput,
    encode_chat_input,
    make_conversation,
    prepare_tools,
)
from tiercel.serve.generation.chat_messages import Message, Tool
from tiercel.serve.generation.prompts import encode_text, render_messages
from tiercel.serve.http.body import TokenId
from tiercel.serve.http.route_docs import RouteDoc
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState

MAX_LOOP_IDS: Final = 4 << 10  # longer lists are decoded in a thread


class TemplateFields(Struct, kw_only=True):
    """The fields of a conversation, as chat completions take them."""

    model: str | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    chat_template: str | None = None


class TokenizeRequest(TemplateFields, kw_only=True):
    """A raw prompt, or a conversation."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(Struct, frozen=True):
    """Token ids."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(Struct, kw_only=True):
    """Token ids; those of control tokens become their names."""

    tokens: list[TokenId]
    model: str | None = None


class DetokenizeAnswer(Struct, frozen=True):
    """Text."""

    prompt: str


class ApplyTemplateRequest(TemplateFields, kw_only=True):
    """A conversation."""

    messages: list[Message]


class TokenizerInfo(Struct, frozen=True):
    """The tokenizer; a special token that it lacks is null."""

    tokenizer_class: str
    vocab_size: Annotated[int, Meta(ge=1)]
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    add_bos_token: bool
    add_eos_token: bool
    model_max_length: int


DOCS: Final = (
    RouteDoc("/tokenize", "Token ids of a raw prompt or of a conversation.", TokenizeRequest,
             TokenizeAnswer, "post", ("/v1/tokenize",), errors=(404, 429, 503)),
    RouteDoc("/detokenize", "The text of token ids.", DetokenizeRequest, DetokenizeAnswer,
             "post", ("/v1/detokenize",), errors=(404, 503)),
    RouteDoc("/tokenizer_info", "The tokenizer.", answer=TokenizerInfo,
             aliases=("/v1/tokenizer_info",), errors=(503,)),
    RouteDoc("/apply-template", "The prompt that a conversation becomes.", ApplyTemplateRequest,
             DetokenizeAnswer, "post", errors=(404, 429, 503)),
)  # fmt: skip


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of this module."""
    limits = state.settings.limits

    async def tokenize(request: Request) -> Response:
        model = state.ready_model()
        body = await read_body(request, TokenizeRequest, limits)
        _check_model(model, body.model)
        ids = await _token_ids(state, model, body)
        names = await _names(state, model, ids) if body.return_token_strs else UNSET
        return json_response(TokenizeAnswer(ids, len(ids), model.info.max_model_len, names))

    async def detokenize(request: Request) -> Response:
        model = state.ready_model()
        body = await read_body(request, DetokenizeRequest, limits)
        _check_model(model, body.model)
        return json_response(DetokenizeAnswer(await _text(state, model, body.tokens)))

    async def apply_template(request: Request) -> Response:
        model = state.ready_model()
        body = await read_body(request, ApplyTemplateRequest, limits)
        _check_model(model, body.model)
        chat = _chat(body, body.messages)
        tools = prepare_tools(state, model, chat, is_structured=False)
        conversation = make_conversation(state, model, chat, tools)
        return json_response(DetokenizeAnswer(await render_messages(state, model, conversation)))

    async def info(_request: Request) -> Response:
        return json_response(_info(state.ready_model()))

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/v1/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/v1/detokenize", detokenize, methods=["POST"]),
        Route("/apply-template", apply_template, methods=["POST"]),
        Route("/tokenizer_info", info),
        Route("/v1/tokenizer_info", info),
    ]


def _check_model(model: ServedModel, name: str | None) -> None:
    if name is not None:
        model.check_name(name)


async def _token_ids(state: ServerState, model: ServedModel, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages.", param="prompt")
    if body.prompt is not None:
        return await encode_text(
            state,
            model,
            body.prompt,
            parse_special=state.settings.parse_special,
            add_special=body.add_special_tokens is not False,
        )
    ids = await encode_chat_input(state, model, _chat(body, body.messages or ()))
    tokenizer = model.tokenizer
    eos_id = tokenizer.eos_id
    if not body.add_special_tokens or not tokenizer.add_eos or eos_id is None:
        return ids
    return ids if ids[-1:] == [eos_id] else [*ids, eos_id]


def _chat(body: TemplateFields, messages: Sequence[Message]) -> ChatInput:
    """The chat input of a chat completion with the same fields."""
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    return ChatInput(
        messages=messages,
        tools=[tool.function for tool in body.tools or ()],
        template_kwargs=body.chat_template_kwargs or {},
        template=body.chat_template,
        has_generation_prompt=body.add_generation_prompt,
        continues_final=bool(body.continue_final_message),
    )


async def _names(state: ServerState, model: ServedModel, ids: list[int]) -> list[str]:
    def names() -> list[str]:
        return [token_name(model, token_id) or "" for token_id in ids]

    return names() if len(ids) <= MAX_LOOP_IDS else await state.run_in_thread(names)


async def _text(state: ServerState, model: ServedModel, ids: list[int]) -> str:
    model.tokenizer.require_text("tokens")
    vocab_size = model.tokenizer.vocab_size
    wrong = next((place for place, token_id in enumerate(ids) if token_id >= vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"tokens[{wrong}] is {ids[wrong]}.",
            hint=f"Token ids are 0 to {vocab_size - 1}.",
            param="tokens",
        )
    if len(ids) <= MAX_LOOP_IDS:
        return model.tokenizer.decode(ids, skip_special_tokens=False)
    return await state.run_in_thread(model.tokenizer.decode, ids, skip_special_tokens=False)


def _info(model: ServedModel) -> TokenizerInfo:
    tokenizer = model.tokenizer
    return TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",
        vocab_size=tokenizer.vocab_size,
        bos_token=token_name(model, tokenizer.bos_id),
        eos_token=token_name(model, tokenizer.eos_id),
        pad_token=token_name(model, tokenizer.pad_id),
        chat_template=model.info.chat_template,
        add_bos_token=tokenizer.add_bos,
        add_eos_token=tokenizer.add_eos,
        model_max_length=model.info.max_model_len,
    )
