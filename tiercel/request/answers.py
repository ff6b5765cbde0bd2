"""From the requests of one call to what the caller gets: shared by every front of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiercel.errors import ArgumentError, InternalError
from tiercel.params import SamplingParams, shown
from tiercel.request.inputs import InputProcessor
from tiercel.request.output import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
from tiercel.request.request import Request
from tiercel.request.text_stream import TextStream
from tiercel.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Sequence[int]]


@dataclass(slots=True)
class Answer:
    """One request of a call: which prompt it answers, its text, when it came.

    Attributes:
        request: its `stream` says which of `n` it is.
        text: as far as it is certain.
        prompt_index: of the call's prompts.
        first_token_s: seconds from the start of the call; None before the first token.
        finished_s: seconds until its last update.
    """

    request: Request
    text: TextStream
    prompt_index: int
    first_token_s: float | None = None
    finished_s: float = 0.0

    def note_time(self, seconds: float, *, has_tokens: bool) -> None:
        """Note that an update came so long after the start of the call."""
        self.finished_s = seconds
        if self.first_token_s is None and has_tokens:
            self.first_token_s = seconds

    def delta(self, piece: str, new_ids: tuple[int, ...]) -> StreamDelta:
        """What the caller of a stream gets for one update."""
        request = self.request
        has_logprobs = request.params.logprobs is not None and bool(new_ids)
        return StreamDelta(
            index=request.stream,
            text=piece,
            token_ids=list(new_ids),
            logprobs=request.logprobs[-len(new_ids) :] if has_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )


def list_prompts(
    prompts: Prompt | Sequence[Prompt], params: object
) -> tuple[list[Prompt], list[SamplingParams]]:
    """A call's prompts as a list, and the parameters of each.

    Args:
        prompts: one or several.
        params: one for all, one each, or None for the defaults.

    Raises:
        ArgumentError: `prompts` or `params` is none of these, or their lengths differ.
    """
    listed: list[Prompt]
    if isinstance(prompts, str | Mapping):
        listed = [prompts]
    elif isinstance(prompts, Iterable):
        listed = list(prompts)
    else:
        raise ArgumentError(
            f"prompts of type {type(prompts).__name__} cannot be read.",
            hint='Pass a string, {"prompt_token_ids": [...]}, or a list of these.',
        )
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return listed, [params] * len(listed)
    if not isinstance(params, Sequence) or not all(
        isinstance(entry, SamplingParams) for entry in params
    ):
        raise ArgumentError(f"params={shown(params)} is no SamplingParams nor a list of them.")
    if len(params) != len(listed):
        raise ArgumentError(
            f"{len(listed)} prompts but {len(params)} sampling parameters.",
            hint="Pass one for all, or one each.",
        )
    return listed, list(params)


def pick_params(params: SamplingParams | None, default: SamplingParams) -> SamplingParams:
    """The parameters of a call with one prompt.

    Raises:
        ArgumentError: `params` is something else.
    """
    if params is None:
        return default
    if not isinstance(params, SamplingParams):
        raise ArgumentError(f"params={shown(params)} is no SamplingParams.")
    return params


def make_answers(
    inputs: InputProcessor,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[list[int]],
    params: Sequence[SamplingParams],
) -> list[Answer]:
    """The requests of a call: `n` for each prompt.

    Raises:
        ContextLengthError, InvalidRequestError: see `InputProcessor.request`.
    """
    answers = []
    for index, (ids, wanted) in enumerate(zip(prompt_ids, params, strict=True)):
        for stream in range(wanted.n):
            request = inputs.request(ids, wanted, stream)
            answers.append(Answer(request, TextStream(request, tokenizer), index))
    return answers


def collect(texts: Sequence[str | None], answers: Sequence[Answer]) -> list[RequestOutput]:
    """The results of a call whose requests have ended.

    Args:
        texts: of each prompt; None where ids were given.
        answers: of `make_answers`.
    """
    by_prompt: list[list[Answer]] = [[] for _ in texts]
    for answer in answers:
        by_prompt[answer.prompt_index].append(answer)
    return [_result(text, members) for text, members in zip(texts, by_prompt, strict=True)]


def _result(prompt: str | None, answers: list[Answer]) -> RequestOutput:
    first = answers[0].request
    outputs = [_completion(answer) for answer in answers]
    times = [answer.first_token_s for answer in answers if answer.first_token_s is not None]
    return RequestOutput(
        request_id=first.request_id,
        prompt=prompt,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=(
            None
            if first.params.prompt_logprobs is None or first.finish_reason == "error"
            else [None, *first.prompt_logprobs]
        ),
        outputs=outputs,
        finished=True,
        metrics=RequestMetrics(
            first_token_s=min(times, default=None),
            finished_s=max(answer.finished_s for answer in answers),
            num_prompt_tokens=len(first.prompt_token_ids),
            num_cached_tokens=first.num_cached,
            num_output_tokens=sum(len(output.token_ids) for output in outputs),
        ),
    )


def _completion(answer: Answer) -> CompletionOutput:
    request = answer.request
    logprobs = None if request.params.logprobs is None else request.logprobs
    return CompletionOutput(
        index=request.stream,
        text=answer.text.text,
        token_ids=request.output_token_ids,
        cumulative_logprob=None if logprobs is None else sum(e.logprob for e in logprobs),
        logprobs=logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def unit_vectors(requests: Sequence[Request], size: int) -> npt.NDArray[np.float32]:
    """The vectors of finished requests with `pooling`, (requests, size), each of length 1.

    Raises:
        InternalError: the model's numbers were not finite.
    """
    vectors = np.zeros((len(requests), size), np.float32)
    for vector, request in zip(vectors, requests, strict=True):
        if request.finish_reason == "error":
            raise InternalError(f"a text has no vector: {request.stop_reason}.")
        assert request.embedding is not None, "a request with pooling ends with its vector"
        vector[:] = request.embedding
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors /= np.where(lengths == 0.0, np.float32(1.0), lengths)
    return vectors
