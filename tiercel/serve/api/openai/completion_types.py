"""Responses of OpenAI's chat and raw completions as types, for encoding and for `/openapi.json`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptDetails(Struct, frozen=True):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    """Completion tokens that are reasoning."""

    reasoning_tokens: int


class UsageObject(Struct, frozen=True):
    """Tokens of a request; a prompt counts once, each of its completions counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class LogprobEntry(Struct, frozen=True):
    """A token and its log-probability; a control token has no bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, frozen=True):
    """A generated token, and the most likely tokens at its position, best first."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[LogprobEntry]


class ChatLogprobs(Struct, frozen=True):
    """Log-probabilities of every generated token."""

    content: list[TokenLogprob]
    refusal: None = None


class RankedLogprob(Struct, frozen=True):
    """An entry of `prompt_logprobs`; the rank is null for a token that is not among the best."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]


class CalledFunction(Struct, frozen=True):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str


class CallObject(Struct, frozen=True):
    """A tool call."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(Struct, frozen=True):
    """The message of the model."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallObject] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One completion."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The response to a chat request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class PromptProgressObject(Struct, frozen=True):
    """Progress of a prompt in a stream with `return_progress`, in tokens; as llama-server has it.

    Of `total`, `processed` tokens are computed or were found in the prefix cache (`cache`);
    `time_ms` counts from the prompt's first step.
    """

    total: int
    cache: int
    processed: int
    time_ms: int


class CompletionLogprobs(Struct, frozen=True):
    """Four lists of equal lengths; the first token of an echoed prompt has null entries."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One completion, or the new part of it in a chunk."""

    index: int
    text: str = ""
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True):
    """The response to a request for raw completions; choice = prompt * n + completion."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageObject | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    prompt_progress: PromptProgressObject | UnsetType = UNSET
