"""From token ids to what a caller gets: text as it becomes certain, and the final result."""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.params import SamplingParams
from tiercel.request.request import Request, TokenLogprobs
from tiercel.text.detokenize import Detokenizer
from tiercel.text.stop_strings import StopStrings
from tiercel.text.tokenizer import Tokenizer


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


class OutputText:
    """The text of one answer as it grows.

    Attributes:
        num_tokens: that were pushed, up to the one that completed a stop string.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params: SamplingParams = request.params
        self._request = request
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include_stop_str=params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.matched

    def push(self, token_ids: tuple[int, ...]) -> str:
        """Add new tokens, the last of which may have ended the request; return what is certain.

        Where a stop string is complete before the last of them, the request is cut behind the token
        that completed it: what a step drew beyond never shows.
        """
        request = self._request
        singles: list[tuple[int, ...]] = [(token_id,) for token_id in token_ids] or [()]
        piece = ""
        for place, single in enumerate(singles, 1):
            self.num_tokens += len(single)
            piece += self._push(single, is_last=place == len(singles))
            if self._stops.matched is not None:
                del request.output_token_ids[self.num_tokens :]
                del request.logprobs[self.num_tokens :]
                break
        self._pieces.append(piece)
        return piece

    def _push(self, token_ids: tuple[int, ...], *, is_last: bool) -> str:
        """Add a token or none; `is_last` if the request stands where it stands behind them."""
        params = self._request.params
        finish_reason = self._request.finish_reason if is_last else None
        if not params.detokenize:
            return ""
        if finish_reason == "stop" and not params.include_stop_str_in_output:
            token_ids = ()  # a stop token is not shown
        text = self._detokenizer.push(token_ids)
        if self.num_tokens <= params.min_tokens:
            piece = text  # stop strings count from min_tokens on
        else:
            piece, _ = self._stops.push(text)
        if finish_reason is not None and self._stops.matched is None:
            tail, _ = self._stops.push(self._detokenizer.finish())
            rest, _ = self._stops.finish()
            piece += tail + rest
        return piece
