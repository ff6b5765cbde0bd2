"""Prompts: texts and conversations to token ids, without blocking the event loop.

A short text is tokenized on the event loop, a long one in a thread. A chat template renders in one
of a few processes that can be killed; a request that finds all of them busy waits on the event
loop, not in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tiercel.errors import ContextLengthError, ModelFormatError
from tiercel.params import LIMITS
from tiercel.serve.http.errors import client_error, overload_error, unsupported_parameter
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState
from tiercel.text.chat_template import ChatTemplate, check_messages, encode_chat
from tiercel.text.tokenizer import check_text

MAX_LOOP_CHARS: Final = 4 << 10  # longer text is tokenized in a thread; this much takes 1 ms


async def encode_text(
    state: ServerState, model: ServedModel, text: str, *, parse_special: bool, add_special: bool
) -> list[int]:
    """Token ids of a text.

    Args:
        state: state of this server.
        model: the served model.
        text: text of a client.
        parse_special: whether the text of a control token becomes its id.
        add_special: whether BOS and EOS are added if the model expects them.

    Raises:
        ContextLengthError: the text is too long to fit; nothing was tokenized.
        InvalidRequestError: the text is not Unicode.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    context = model.info.max_model_len
    if size > context * LIMITS.max_prompt_bytes_per_token:
        raise ContextLengthError(
            f"prompt has {size} bytes but the context holds {context} tokens, answer included.",
            hint="Shorten the prompt.",
            param="prompt",
        )
    check_text(text, "prompt")
    encode = model.tokenizer.encode
    if len(text) <= MAX_LOOP_CHARS:
        return encode(text, parse_special=parse_special, add_special_tokens=add_special)
    return await state.run_in_thread(
        encode, text, parse_special=parse_special, add_special_tokens=add_special
    )


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template; see `encode_chat`."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] | None = None
    documents: Sequence[Mapping[str, object]] | None = None
    add_generation_prompt: bool = True
    continues_final: bool = False
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    template: ChatTemplate | None = None  # instead of the model's own


async def encode_messages(
    state: ServerState, model: ServedModel, conversation: Conversation
) -> list[int]:
    """Token ids of a conversation, rendered by the chat template.

    Raises:
        InvalidRequestError: 400 `chat_template_error`, or a wrong message.
        QueueFullError: 503 `queue_timeout`, no template process became free.
    """
    async with free_template_worker(state):
        return await state.run_in_thread(
            encode_chat,
            model.tokenizer,
            conversation.template or model.template,
            conversation.messages,
            tools=conversation.tools,
            documents=conversation.documents,
            add_generation_prompt=conversation.add_generation_prompt,
            continues_final=conversation.continues_final,
            template_kwargs=conversation.template_kwargs,
        )


async def render_messages(
    state: ServerState, model: ServedModel, conversation: Conversation
) -> str:
    """The text of a conversation, rendered by the chat template.

    Raises:
        InvalidRequestError, QueueFullError: as `encode_messages`.
    """
    template = conversation.template or model.template
    if template is None:
        raise client_error(400, "chat_template_error", "this model has no chat template.")
    async with free_template_worker(state):
        return await state.run_in_thread(
            template.render,
            check_messages(conversation.messages),
            tools=conversation.tools,
            documents=conversation.documents,
            add_generation_prompt=conversation.add_generation_prompt,
            template_kwargs=conversation.template_kwargs,
        )


def knows_developer(model: ServedModel) -> bool:
    """Whether the model's template has the role `developer`."""
    return model.template is not None and "developer" in model.template.source


def request_template(
    state: ServerState, model: ServedModel, source: str | None
) -> ChatTemplate | None:
    """The chat template in a request.

    Raises:
        InvalidRequestError: the server does not accept one, or it is too long.
    """
    if source is None:
        return None
    if not state.settings.trusts_templates:
        raise unsupported_parameter(
            "chat_template", "is off on this server; it starts with --trust-request-chat-template"
        )
    try:
        return ChatTemplate.from_tokenizer(
            model.tokenizer, source=source, worker=state.template_workers
        )
    except ModelFormatError as error:
        raise client_error(400, "chat_template_error", str(error), param="chat_template") from None


@contextlib.asynccontextmanager
async def free_template_worker(state: ServerState) -> AsyncIterator[None]:
    """Wait for a free template process, and hold it.

    Raises:
        QueueFullError: 503 `queue_timeout`, no process became free in time.
    """
    slots = state.template_semaphore
    try:
        async with asyncio.timeout(state.settings.limits.max_queue_seconds):
            await slots.acquire()
    except TimeoutError:
        raise overload_error(
            "queue_timeout", "No template process became free in time.", 30
        ) from None
    try:
        yield
    finally:
        slots.release()
