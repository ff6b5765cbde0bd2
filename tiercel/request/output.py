"""Results of the Python API: the deltas of a stream, and the final output of a request."""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.request.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds since the request was made, on the monotonic clock.

    Attributes:
        first_token_s: seconds until its first token; None if it made none.
        finished_s: seconds until it ended.
        num_prompt_tokens: tokens of its prompt.
        num_output_tokens: tokens of all its answers.
        num_cached_tokens: tokens of its prompt that its first answer found in the prefix cache.
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
        index: number of the answer among `n`.
        text: detokenised text, stop string cut.
        token_ids: token ids as generated, with the stop token if one ended the answer.
        cumulative_logprob: sum of the log-probabilities; None unless they were requested.
        logprobs: one entry per token id; None unless requested.
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
        request_id: id, unique in the engine.
        prompt: text of the prompt, or None if ids were given.
        prompt_token_ids: token ids that the model saw.
        prompt_logprobs: one entry per prompt token, None for the first; None unless requested, or
            after an error.
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
    """The part of an answer that one update adds.

    Attributes:
        index: number of the answer among `n`.
        text: text that became certain; may be empty.
        token_ids: new token ids.
        logprobs: log-probabilities of `token_ids`; None unless requested.
        finish_reason: reason of the end, in the last delta only.
        stop_reason: the stop string or token id, or the name of the error; in the last delta only.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
