"""Results of the Python API: the deltas of a stream, and the final output of a request."""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.request.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds since the request was made, on the monotonic clock.

    Attributes:
        first_token_s: until its first token; None if it made none.
        finished_s: until it ended.
        num_prompt_tokens: of its prompt.
        num_output_tokens: of all its answers.
        num_cached_tokens: of its prompt, found in the prefix cache by its first answer.
    """

    first_token_s: float | None
    finished_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of `n`.
        text: detokenised, stop string cut.
        token_ids: as generated, with the stop token if one ended it.
        cumulative_logprob: sum over `token_ids`; None unless log-probabilities were asked for.
        logprobs: one entry per token id; None unless asked for.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        stop_reason: the stop string or token id, or the name of the error.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt.

    Attributes:
        request_id: unique in the engine.
        prompt: its text, or None if ids were given.
        prompt_token_ids: what the model saw.
        prompt_logprobs: per prompt token, None for the first; None unless asked for, or after an
            error.
        outputs: `n` answers, by index.
        finished: always True for what `generate` returns.
        metrics: times and counts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """A piece of an answer.

    Attributes:
        index: which of `n`.
        text: what became certain; may be empty.
        token_ids: new token ids.
        logprobs: of `token_ids`; None unless asked for.
        finish_reason: set on the last piece only.
        stop_reason: with it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
