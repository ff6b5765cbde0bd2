"""The completions of one call: from its requests to the results that the caller gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tiercel.errors import ArgumentError, InternalError
from tiercel.params import SamplingParams, shown
from tiercel.request.inputs import InputProcessor
from tiercel.request.output import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
from tiercel.request.request import Request
from tiercel.request.text_stream import TextStream
from tiercel.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Sequence[int]]


class Completion(Struct):
    """One completion of a prompt, while its request runs and after it.

    Attributes:
        request: the request; its `stream` says which of `n` completions it is.
        text: text so far, as far as it is certain.
        prompt_index: index of the prompt among the call's prompts.
        first_token_s: seconds from the start of the call to the first token; None before it.
        finished_s: seconds from the start of the call to the last update.
    """

    request: Request
    text: TextStream
    prompt_index: int
    first_token_s: float | None = None
    finished_s: float = 0.0

    def note_time(self, seconds: float, *, has_tokens: bool) -> None:
        """Note that an update came `seconds` after the start of the call."""
        self.finished_s = seconds
        if self.first_token_s is None and has_tokens:
            self.first_token_s = seconds

    def delta(self, new_text: str, new_ids: tuple[int, ...]) -> StreamDelta:
        """The delta that the reader of a stream gets for one update."""
        request = self.request
        has_logprobs = request.params.logprobs is not None and bool(new_ids)
        return StreamDelta(
            index=request.stream,
            text=new_text,
            token_ids=list(new_ids),
            logprobs=request.logprobs[-len(new_ids) :] if has_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )


def list_prompts(
    prompts: Prompt | Sequence[Prompt], params: object
) -> tuple[list[Prompt], list[SamplingParams]]:
    """List a call's prompts, and the parameters of each.

    Args:
        prompts: one prompt or several.
        params: parameters for all prompts, one set for each, or None for the defaults.

    Raises:
        ArgumentError: `prompts` or `params` has a wrong type, or their lengths differ.
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
    """Choose the parameters of a call with one prompt.

    Raises:
        ArgumentError: `params` has a wrong type.
    """
    if params is None:
        return default
    if not isinstance(params, SamplingParams):
        raise ArgumentError(f"params={shown(params)} is no SamplingParams.")
    return params


def make_completions(
    inputs: InputProcessor,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[list[int]],
    params: Sequence[SamplingParams],
) -> list[Completion]:
    """Make the requests of a call: `n` for each prompt.

    Raises:
        ContextLengthError, InvalidRequestError: see `InputProcessor.request`.
    """
    completions = []
    for index, (ids, wanted) in enumerate(zip(prompt_ids, params, strict=True)):
        for stream in range(wanted.n):
            request = inputs.request(ids, wanted, stream)
            completions.append(Completion(request, TextStream(request, tokenizer), index))
    return completions


def collect_outputs(
    texts: Sequence[str | None], completions: Sequence[Completion]
) -> list[RequestOutput]:
    """Collect the results of a call whose requests have ended.

    Args:
        texts: text of each prompt; None where ids were given.
        completions: completions of `make_completions`.
    """
    by_prompt: list[list[Completion]] = [[] for _ in texts]
    for completion in completions:
        by_prompt[completion.prompt_index].append(completion)
    return [_request_output(text, members) for text, members in zip(texts, by_prompt, strict=True)]


def _request_output(prompt: str | None, completions: list[Completion]) -> RequestOutput:
    first = completions[0].request
    outputs = [_completion_output(completion) for completion in completions]
    times = [c.first_token_s for c in completions if c.first_token_s is not None]
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
            finished_s=max(completion.finished_s for completion in completions),
            num_prompt_tokens=len(first.prompt_token_ids),
            num_cached_tokens=first.num_cached,
            num_output_tokens=sum(len(output.token_ids) for output in outputs),
        ),
    )


def _completion_output(completion: Completion) -> CompletionOutput:
    request = completion.request
    logprobs = None if request.params.logprobs is None else request.logprobs
    return CompletionOutput(
        index=request.stream,
        text=completion.text.text,
        token_ids=request.output_token_ids,
        cumulative_logprob=None if logprobs is None else sum(e.logprob for e in logprobs),
        logprobs=logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def unit_vectors(requests: Sequence[Request], size: int) -> npt.NDArray[np.float32]:
    """Normalise the vectors of finished requests with `pooling`: (requests, size), length 1 each.

    Raises:
        InternalError: the model's hidden states were not finite.
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
