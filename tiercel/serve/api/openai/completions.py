"""`/v1/completions`: raw prompts in OpenAI's wire format, as evaluation harnesses use it.

What lm-eval builds on: with `echo` and `logprobs` the lists cover every token of the prompt and
every generated one, end of text included; the first entry is null; a token that is the most likely
has the very number that is the largest in its `top_logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import Meta, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tiercel.errors import InvalidRequestError, TiercelError
from tiercel.params import LIMITS
from tiercel.request.request import TokenLogprobs
from tiercel.serve.api.compat_fields import take_aliases
from tiercel.serve.api.model_routes import model_routes
from tiercel.serve.api.openai.completion_fields import (
    StreamUsage,
    finish_reason_of,
    progress_object,
    system_fingerprint,
    usage_object,
)
from tiercel.serve.api.openai.completion_types import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    UsageObject,
)
from tiercel.serve.api.openai.logprobs import completion_top, finite, prompt_logprobs, token_name
from tiercel.serve.api.sampling_fields import (
    NO_BOUND,
    GenerationFields,
    Logprobs,
    TokenBound,
    check_bound,
    check_common,
    chosen,
    ignored_sampling,
    make_params,
    structured_field,
    structured_outputs,
)
from tiercel.serve.api.split_prompts import Prompt, check_token_ids, split_prompts
from tiercel.serve.api.streaming_response import respond
from tiercel.serve.generation.admission import check_counts
from tiercel.serve.generation.generation import Generation, GenerationRequest
from tiercel.serve.generation.output_events import ContentDelta
from tiercel.serve.generation.output_queue import CompletionDelta
from tiercel.serve.generation.prompts import encode_text
from tiercel.serve.generation.structured_output import OutputConstraints, compile_grammar
from tiercel.serve.http import sse
from tiercel.serve.http.errors import error_body, unsupported_parameter
from tiercel.serve.http.ignored_fields import note_ignored
from tiercel.serve.http.object_fields import created_now, new_object_id
from tiercel.serve.http.route_docs import RouteDoc
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import Sender, ServerState, request_id, sender_of
from tiercel.text.detokenize import Detokenizer
from tiercel.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS: Final = 16
ALIASES: Final = {"n_predict": "max_tokens", "max_new_tokens": "max_tokens"}
# Markers of prefix, suffix and middle of models that fill in the middle (FIM): Qwen2.5-Coder,
# StarCoder, CodeGemma.
FIM_MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
)


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of a raw completion."""

    prompt: Prompt
    max_tokens: TokenBound | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None
    best_of: Annotated[int, Meta(ge=1, le=LIMITS.max_n)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


DOCS: Final = (
    RouteDoc(
        "/v1/completions",
        "Continues raw prompts.",
        CompletionRequest,
        Completion,
        "post",
        streams=True,
        errors=(404, 429, 503),
    ),
)


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of this module."""
    return model_routes(state, ("/v1/completions",), CompletionRequest, _answer)


async def _answer(
    state: ServerState, model: ServedModel, request: Request, body: CompletionRequest
) -> Response:
    model.check_name(body.model)
    check_completion(body, state)
    note_ignored(request, ignored_sampling(body))
    prompts = split_prompts(body.prompt, "prompt")
    check_counts(len(prompts), body.n or 1, state.settings.limits)
    wanted = await completion_generation(state, model, body, prompts, sender_of(request))
    is_stream = bool(body.stream)
    generation = Generation(state, model, wanted, is_stream=is_stream)
    if len(prompts) > 1 and wanted.params.n == 1:
        await generation.share_prefixes()
    writer = CompletionWriter(model, body, prompts, request_id(request))
    return await respond(request, generation, writer, is_stream=is_stream)


def check_completion(body: CompletionRequest, state: ServerState) -> None:
    """Check what the types of the fields cannot.

    Raises:
        InvalidRequestError: naming the field.
    """
    check_common(body, state.settings)
    take_aliases(body, ALIASES)
    if body.n_probs:
        take_aliases(body, {"n_probs": "logprobs"})
    most = state.settings.limits.max_logprobs
    check_bound("logprobs", body.logprobs or 0, most, "alternatives")
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequestError(
            f"best_of={body.best_of} with n={n}: answers are not ranked here.",
            hint="Leave best_of out, or set it to n.",
            param="best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError(
            "max_tokens=0 is for scoring a prompt, with echo.",
            hint="Use 1 or more, or set echo to true.",
            param="max_tokens",
        )
    if body.suffix is not None and body.echo:
        raise unsupported_parameter("suffix", "does not go with echo")


async def completion_generation(
    state: ServerState,
    model: ServedModel,
    body: CompletionRequest,
    prompts: Sequence[str | list[int]],
    sender: Sender,
) -> GenerationRequest:
    """The generation request of a completion request.

    Raises:
        InvalidRequestError: a wrong prompt or structure.
    """
    structured = structured_outputs(body)
    max_tokens = chosen(body.max_tokens, model.sampling.max_tokens, DEFAULT_MAX_TOKENS)
    of_prompt = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        of_prompt = max(of_prompt or 0, body.logprobs)
    params = make_params(
        body,
        model.sampling,
        n=body.n or 1,
        max_tokens=None if max_tokens == NO_BOUND else max(1, max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=of_prompt,
        structured=structured,
    )
    form = OutputConstraints(structured, param=structured_field(body), client=sender.client)
    ids = [await _prompt_ids(state, model, prompt, body) for prompt in prompts]
    return GenerationRequest(
        prompts=tuple(ids),
        params=params,
        max_tokens=0 if max_tokens == 0 else None,
        grammar=await compile_grammar(state, model, form),
        priority=body.priority or 0,
        sender=sender,
        returns_progress=bool(body.return_progress),
    )


async def _prompt_ids(
    state: ServerState, model: ServedModel, prompt: str | list[int], body: CompletionRequest
) -> list[int]:
    adds = body.add_special_tokens is not False
    if body.suffix is not None:
        ids = await _infill_ids(state, model, prompt, body.suffix)
        return model.tokenizer.with_bos(ids) if adds else ids
    if isinstance(prompt, str):
        special = state.settings.parse_special
        return await encode_text(state, model, prompt, parse_special=special, add_special=adds)
    check_token_ids(model, prompt, "prompt")
    return prompt


async def _infill_ids(
    state: ServerState, model: ServedModel, prompt: str | list[int], suffix: str
) -> list[int]:
    """The fill-in-the-middle prompt: prefix, suffix, then the middle to generate."""
    control = model.tokenizer.control_tokens
    marks = next((marks for marks in FIM_MARKS if all(mark in control for mark in marks)), None)
    if marks is None or not isinstance(prompt, str):
        why = "needs a model that was trained to fill in" if marks is None else "needs a text"
        raise unsupported_parameter("suffix", why)
    parts = [
        await encode_text(state, model, text, parse_special=False, add_special=False)
        for text in (prompt, suffix)
    ]
    first, second, middle = (control[mark] for mark in marks)
    return [first, *parts[0], second, *parts[1], middle]


class CompletionWriter:
    """The wire format of one request for completions."""

    def __init__(
        self,
        model: ServedModel,
        body: CompletionRequest,
        prompts: Sequence[str | list[int]],
        request_id: str,
    ) -> None:
        self._tokenizer = model.tokenizer
        self._body = body
        self._prompts = prompts
        self._request_id = request_id
        self._id = new_object_id("cmpl-")
        self._created = created_now()
        self._model = model.name
        self._fingerprint = system_fingerprint(model)
        self._usage = StreamUsage(body.stream_options)
        self._offsets: dict[int, _TextOffsets] = {}

    def make_body(self, generation: Generation, completions: Sequence[CompletionDelta]) -> object:
        """The body of a plain response."""
        choices = [self._choice(generation, delta) for delta in completions]
        return self._completion(choices, usage_object(generation.usage()))

    def write_start(self, generation: Generation) -> bytes:
        """Nothing: the first chunk comes with the first token."""
        del generation
        return b""

    def write_delta(self, generation: Generation, delta: CompletionDelta) -> bytes:
        """The chunk of one delta; empty if there is nothing to report."""
        progress = self._progress(delta, generation)
        if delta.is_progress_alone:
            return progress
        self._usage.count(delta)
        choice = self._choice(generation, delta)
        shows_tokens = self._body.logprobs is not None or self._body.return_token_ids
        if not (choice.text or choice.finish_reason or (shows_tokens and delta.token_ids)):
            return progress
        chunk = self._completion([choice], self._usage.so_far(generation))
        return progress + sse.encode_event(chunk)

    def write_end(self, generation: Generation) -> bytes:
        """Usage, if requested, and `[DONE]`."""
        usage = self._usage.total(generation)
        if usage is None:
            return sse.DONE
        return sse.encode_event(self._completion([], usage)) + sse.DONE

    def _progress(self, delta: CompletionDelta, generation: Generation) -> bytes:
        """The chunk with the progress of a prompt, if there is any."""
        if delta.progress is None:
            return b""
        choices = [CompletionChoice(delta.index)]
        chunk = self._completion(choices, self._usage.so_far(generation))
        return sse.encode_event(replace(chunk, prompt_progress=progress_object(delta.progress)))

    def _completion(
        self, choices: list[CompletionChoice], usage: UsageObject | UnsetType | None
    ) -> Completion:
        return Completion(self._id, self._created, self._model, self._fingerprint, choices, usage)

    def write_error(self, error: TiercelError) -> bytes:
        """The last event of a stream that failed."""
        return sse.encode_event(error_body(error, self._request_id))

    def write_keep_alive(self) -> bytes:
        """A keep-alive comment."""
        return sse.KEEP_ALIVE

    def _choice(self, generation: Generation, delta: CompletionDelta) -> CompletionChoice:
        body = self._body
        choice = CompletionChoice(delta.index, stop_reason=delta.stop_reason)
        lists = None if body.logprobs is None else _LogprobLists(self._tokenizer, body.logprobs)
        if delta.index not in self._offsets:
            self._begin(generation, choice, lists)
        choice.text += "".join(e.text for e in delta.events if isinstance(e, ContentDelta))
        if lists is not None:
            offsets = self._offsets[delta.index]
            for entry in delta.logprobs:
                lists.add(entry, offsets.next(entry.token_id))
            choice.logprobs = lists.lists
        if delta.finish_reason is not None:
            choice.finish_reason = finish_reason_of(delta)
        if body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _begin(
        self, generation: Generation, choice: CompletionChoice, lists: _LogprobLists | None
    ) -> None:
        """Add the fields of a choice that come once: echo, ids and logprobs of its prompt."""
        body = self._body
        n = body.n or 1
        ids = generation.completions[choice.index].request.prompt_token_ids
        first = generation.completions[choice.index // n * n].request  # it reads the prompt for all
        entries = (
            generation.completions[choice.index].request.prompt_logprobs or first.prompt_logprobs
        )
        prompt = self._prompts[choice.index // n]
        if body.echo:
            choice.text = prompt if isinstance(prompt, str) else self._decode(ids)
        if body.echo and lists is not None:
            offsets = self._prompt_offsets(prompt, ids)
            for token_id, entry, offset in zip(ids, (None, *entries), offsets, strict=True):
                lists.add(entry or token_id, offset)
        if body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, entries, body.prompt_logprobs)
        if body.return_token_ids:
            choice.prompt_token_ids = ids
        self._offsets[choice.index] = _TextOffsets(
            self._tokenizer,
            len(choice.text),
            skips_special=self._skips_special,
            is_continuation=True,
        )

    @property
    def _skips_special(self) -> bool:
        return self._body.skip_special_tokens is not False

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)

    def _prompt_offsets(self, prompt: str | list[int], ids: list[int]) -> list[int]:
        """The text offsets of the tokens of an echo.

        A text is echoed as the client sent it: with the names of control tokens, without a BOS.
        """
        tokenizer, num_added, skips = self._tokenizer, 0, self._skips_special
        if isinstance(prompt, str):
            skips = False
            has_bos = ids[0] == tokenizer.bos_id
            num_added = has_bos and not prompt.startswith(tokenizer.token_text(ids[0]))
        offsets = _TextOffsets(tokenizer, 0, skips_special=skips, is_continuation=False)
        return [0] * num_added + [offsets.next(token_id) for token_id in ids[num_added:]]


class _TextOffsets:
    """Counts the characters before each token of one text."""

    def __init__(
        self, tokenizer: Tokenizer, start: int, *, skips_special: bool, is_continuation: bool
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=skips_special, is_continuation=is_continuation
        )
        self._offset = start

    def next(self, token_id: int) -> int:
        """The offset at which the token begins."""
        offset = self._offset
        self._offset += len(self._detokenizer.push((token_id,)))
        return offset


class _LogprobLists:
    """The four lists of `logprobs`, of equal lengths."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self.lists = CompletionLogprobs([], [], [], [])

    def add(self, entry: TokenLogprobs | int, offset: int) -> None:
        """Add a token; one without log-probabilities, the first of a prompt, is an id."""
        lists = self.lists
        if isinstance(entry, int):
            lists.tokens.append(token_name(self._tokenizer, entry))
            lists.token_logprobs.append(None)
            lists.top_logprobs.append(None)
        else:
            lists.tokens.append(token_name(self._tokenizer, entry.token_id))
            lists.token_logprobs.append(finite(entry.logprob))
            lists.top_logprobs.append(completion_top(self._tokenizer, entry, self._num_top))
        lists.text_offset.append(offset)
