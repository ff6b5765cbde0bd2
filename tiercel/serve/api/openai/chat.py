"""`/v1/chat/completions`: OpenAI's wire format around `generation/generation.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tiercel.errors import InvalidRequestError, TiercelError
from tiercel.serve.api.assembled_message import assemble_message, merge_events
from tiercel.serve.api.compat_fields import given_fields, refuse_unless_neutral, take_aliases
from tiercel.serve.api.model_routes import model_routes
from tiercel.serve.api.openai.completion_fields import (
    StreamUsage,
    finish_reason_of,
    progress_object,
    system_fingerprint,
    usage_object,
)
from tiercel.serve.api.openai.completion_types import (
    AnswerMessage,
    CalledFunction,
    CallObject,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    PromptLogprobs,
)
from tiercel.serve.api.openai.logprobs import chat_logprobs, prompt_logprobs
from tiercel.serve.api.sampling_fields import (
    GenerationFields,
    Logprobs,
    TokenBound,
    check_bound,
    check_common,
    ignored_sampling,
    make_params,
    structured_field,
    structured_outputs,
    token_bound,
)
from tiercel.serve.api.streaming_response import respond
from tiercel.serve.generation.chat_input import ChatInput, prepare_chat
from tiercel.serve.generation.chat_messages import Message, Tool, ToolName
from tiercel.serve.generation.generation import Generation, GenerationRequest
from tiercel.serve.generation.output_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallStart,
)
from tiercel.serve.generation.output_queue import CompletionDelta
from tiercel.serve.http import sse
from tiercel.serve.http.errors import error_body
from tiercel.serve.http.ignored_fields import note_ignored
from tiercel.serve.http.object_fields import created_now, new_object_id
from tiercel.serve.http.route_docs import RouteDoc
from tiercel.serve.served_model import ServedModel
from tiercel.serve.settings import ServeSettings
from tiercel.serve.state import Sender, ServerState, request_id, sender_of

# Fields that clients of this route send, and their values without effect; see `compat_fields.py`.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "best_of": (1,),
    "add_special_tokens": (False,),
}

ALIASES: Final = {"n_predict": "max_tokens", "max_new_tokens": "max_tokens"}


class NamedFunction(Struct, kw_only=True):
    """The function of a named choice."""

    name: ToolName


class NamedChoice(Struct, kw_only=True):
    """A `tool_choice` that names a function."""

    function: NamedFunction
    type: Literal["function"] = "function"


class ChatRequest(GenerationFields, kw_only=True):
    """The body of a chat completion."""

    messages: list[Message]
    max_completion_tokens: TokenBound | None = None
    max_tokens: TokenBound | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    stop_in_reasoning: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    chat_template: str | None = None
    documents: list[dict[str, object]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    functions: object = UNSET
    function_call: object = UNSET
    audio: object = UNSET
    modalities: object = UNSET
    prediction: object = UNSET
    web_search_options: object = UNSET
    moderation: object = UNSET
    verbosity: Literal["low", "medium", "high"] | None = None
    echo: object = UNSET
    best_of: object = UNSET
    add_special_tokens: object = UNSET


DOCS: Final = (
    RouteDoc(
        "/v1/chat/completions",
        "Answers a conversation.",
        ChatRequest,
        ChatCompletion,
        "post",
        streams=True,
        errors=(404, 429, 503),
    ),
)


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of this module."""
    return model_routes(state, ("/v1/chat/completions",), ChatRequest, _answer)


async def _answer(
    state: ServerState, model: ServedModel, request: Request, body: ChatRequest
) -> Response:
    model.check_name(body.model)
    check_chat(body, state.settings)
    note_ignored(request, _ignored(body))
    wanted = await chat_generation(state, model, body, sender_of(request))
    is_stream = bool(body.stream)
    generation = Generation(state, model, wanted, is_stream=is_stream)
    writer = ChatWriter(model, state.settings, body, request_id(request))
    return await respond(request, generation, writer, is_stream=is_stream)


def _ignored(body: ChatRequest) -> list[str]:
    """Ignored: a prediction only saves time, and verbosity follows from the model's training."""
    names = ignored_sampling(body) + given_fields(body, ("prediction",))
    return names + ["verbosity"] * (body.verbosity not in (None, "medium"))


def check_chat(body: ChatRequest, settings: ServeSettings) -> None:
    """Check what the types of the fields cannot.

    Raises:
        InvalidRequestError: naming the field.
    """
    check_common(body, settings)
    refuse_unless_neutral(body, NEUTRAL)
    take_aliases(body, ALIASES)
    if body.n_probs:
        take_aliases(body, {"n_probs": "top_logprobs"})
        body.logprobs = True
    most = settings.limits.max_logprobs
    check_bound("top_logprobs", body.top_logprobs or 0, most, "alternatives")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError(
            "top_logprobs is given without logprobs.",
            hint="Set logprobs to true.",
            param="top_logprobs",
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )


async def chat_generation(
    state: ServerState, model: ServedModel, body: ChatRequest, sender: Sender
) -> GenerationRequest:
    """The generation request of a chat request.

    Raises:
        InvalidRequestError: wrong messages, tools or structure.
    """
    default = model.sampling.max_tokens
    max_tokens = token_bound("max_tokens", body.max_tokens, default)
    if body.max_completion_tokens is not None:
        max_tokens = token_bound("max_completion_tokens", body.max_completion_tokens, default)
    params = make_params(
        body,
        model.sampling,
        n=body.n or 1,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        structured=structured_outputs(body),
    )
    choice = body.tool_choice
    chat = ChatInput(
        messages=body.messages,
        tools=[tool.function for tool in body.tools or ()],
        tool_choice=choice if isinstance(choice, str) else None,
        tool_name=choice.function.name if isinstance(choice, NamedChoice) else None,
        is_parallel=body.parallel_tool_calls is not False,
        effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs or {},
        template=body.chat_template,
        documents=body.documents,
        has_generation_prompt=body.add_generation_prompt,
        continues_final=bool(body.continue_final_message),
        stops_in_reasoning=bool(body.stop_in_reasoning),
        priority=body.priority or 0,
        structured_param=structured_field(body),
    )
    wanted = await prepare_chat(state, model, chat, params, sender)
    return replace(wanted, returns_progress=bool(body.return_progress))


class ChatWriter:
    """The wire format of one chat completion."""

    def __init__(
        self, model: ServedModel, settings: ServeSettings, body: ChatRequest, request_id: str
    ) -> None:
        self._tokenizer = model.tokenizer
        self._body = body
        self._request_id = request_id
        self._is_mirrored = settings.is_reasoning_mirrored
        self._id = new_object_id("chatcmpl-")
        self._created = created_now()
        self._model = model.name
        self._fingerprint = system_fingerprint(model)
        self._usage = StreamUsage(body.stream_options)
        self._begun: set[int] = set()

    def make_body(self, generation: Generation, completions: Sequence[CompletionDelta]) -> object:
        """The body of a plain response."""
        body = self._body
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=[self._choice(delta) for delta in completions],
            usage=usage_object(generation.usage()),
            prompt_logprobs=self._prompt_logprobs(generation),
            prompt_token_ids=(
                generation.completions[0].request.prompt_token_ids
                if body.return_token_ids
                else UNSET
            ),
        )

    def write_start(self, generation: Generation) -> bytes:
        """Nothing: the first chunk comes with the first token."""
        del generation
        return b""

    def write_delta(self, generation: Generation, delta: CompletionDelta) -> bytes:
        """The chunks of one delta."""
        self._usage.count(delta)
        chunks: list[bytes] = []
        if delta.progress is not None:
            more = {"prompt_progress": progress_object(delta.progress)}
            chunks.append(self._chunk(generation, delta.index, {}, {}, more))
        if delta.is_progress_alone:
            return b"".join(chunks)
        if delta.index not in self._begun:
            chunks.append(self._first_chunk(generation, delta.index))
        # Log-probabilities and ids of the tokens go into one chunk, whatever their text became.
        extra = self._token_fields(delta)
        for event in merge_events(delta.events):
            chunks.append(self._chunk(generation, delta.index, self._delta(event), extra))
            extra = {}
        if delta.finish_reason is not None:
            extra["finish_reason"] = delta.finish_reason
            extra["stop_reason"] = delta.stop_reason
            chunks.append(self._chunk(generation, delta.index, {}, extra))
        elif extra:
            chunks.append(self._chunk(generation, delta.index, {"content": ""}, extra))
        return b"".join(chunks)

    def write_end(self, generation: Generation) -> bytes:
        """Usage, if requested, and `[DONE]`."""
        usage = self._usage.total(generation)
        if usage is None:
            return sse.DONE
        return sse.encode_event({**self._head(), "choices": [], "usage": usage}) + sse.DONE

    def write_error(self, error: TiercelError) -> bytes:
        """The last event of a stream that failed."""
        return sse.encode_event(error_body(error, self._request_id))

    def write_keep_alive(self) -> bytes:
        """A keep-alive comment."""
        return sse.KEEP_ALIVE

    def _head(self) -> dict[str, object]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def _first_chunk(self, generation: Generation, index: int) -> bytes:
        more: dict[str, object] = {}
        if not self._begun and self._body.prompt_logprobs is not None:
            more["prompt_logprobs"] = self._prompt_logprobs(generation)
        if not self._begun and self._body.return_token_ids:
            more["prompt_token_ids"] = generation.completions[0].request.prompt_token_ids
        self._begun.add(index)
        return self._chunk(generation, index, {"role": "assistant", "content": ""}, {}, more)

    def _chunk(
        self,
        generation: Generation,
        index: int,
        delta: Mapping[str, object],
        extra: Mapping[str, object],
        more: Mapping[str, object] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._head()
        chunk["choices"] = [{**choice, **extra}]
        usage = self._usage.so_far(generation)
        if usage is not UNSET:
            chunk["usage"] = usage
        return sse.encode_event({**chunk, **more} if more else chunk)

    def _token_fields(self, delta: CompletionDelta) -> dict[str, object]:
        fields: dict[str, object] = {}
        if self._body.logprobs and delta.logprobs:
            fields["logprobs"] = self._logprobs(delta)
        if self._body.return_token_ids and delta.token_ids:
            fields["token_ids"] = delta.token_ids
        return fields

    def _delta(self, event: Event) -> dict[str, object]:
        if isinstance(event, ContentDelta):
            return {"content": event.text}
        if isinstance(event, ReasoningDelta):
            if self._is_mirrored:
                return {"reasoning_content": event.text, "reasoning": event.text}
            return {"reasoning_content": event.text}
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    def _choice(self, delta: CompletionDelta) -> ChatChoice:
        whole = assemble_message(delta.events)
        message = AnswerMessage(
            content=None if whole.calls and not whole.content else whole.content,
            reasoning_content=whole.reasoning or UNSET,
            reasoning=whole.reasoning if whole.reasoning and self._is_mirrored else UNSET,
            tool_calls=[
                CallObject(call.id, CalledFunction(call.name, call.arguments))
                for call in whole.calls
            ]
            or UNSET,
        )
        return ChatChoice(
            index=delta.index,
            message=message,
            logprobs=self._logprobs(delta) if self._body.logprobs else None,
            finish_reason=finish_reason_of(delta),
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._body.return_token_ids else UNSET,
        )

    def _logprobs(self, delta: CompletionDelta) -> ChatLogprobs:
        num_top = self._body.top_logprobs or 0
        return ChatLogprobs(chat_logprobs(self._tokenizer, delta.logprobs, num_top))

    def _prompt_logprobs(self, generation: Generation) -> PromptLogprobs | UnsetType:
        num_top = self._body.prompt_logprobs
        if num_top is None:
            return UNSET
        entries = generation.completions[0].request.prompt_logprobs
        return prompt_logprobs(self._tokenizer, entries, num_top)
