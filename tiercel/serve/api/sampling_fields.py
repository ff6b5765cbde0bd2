"""Sampling fields that the generating routes share, their limits, and the `SamplingParams` of them.

A documented field is honoured or refused by name. A field that cannot change the completion
(`user`, `metadata`, ...) is declared here so that it does not count as unknown. `null` means that a
field is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from msgspec import UNSET, Meta, Struct

from tiercel.errors import ArgumentError, InvalidRequestError
from tiercel.params import LIMITS, Limits, SamplingDefaults, SamplingParams, StructuredOutputs
from tiercel.serve.api.compat_fields import (
    ALIASES,
    IGNORED,
    NEUTRAL,
    CompatFields,
    given_fields,
    refuse_unless_neutral,
    refuse_windows,
    take_aliases,
)
from tiercel.serve.http.body import Int64, TokenId
from tiercel.serve.http.errors import client_error, unsupported_parameter
from tiercel.serve.settings import ServeSettings

T = TypeVar("T")

NO_BOUND: Final = -1  # of `max_tokens`: the rest of the context

Count = Annotated[int, Meta(ge=0, le=LIMITS.max_tokens)]
PositiveCount = Annotated[int, Meta(ge=1, le=LIMITS.max_tokens)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenBound = Annotated[int, Meta(ge=NO_BOUND, le=LIMITS.max_tokens)]
Answers = Annotated[int, Meta(ge=1, le=LIMITS.max_n)]
Temperature = Annotated[float, Meta(ge=0, le=LIMITS.max_temperature)]
Share = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=LIMITS.max_tokens)]
MinShare = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
Logprobs = Annotated[int, Meta(ge=0, le=LIMITS.max_logprobs)]
StopText = Annotated[str, Meta(min_length=1, max_length=LIMITS.max_stop_chars)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=LIMITS.max_stop_strings)]
TokenIds = list[TokenId]
Bias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=LIMITS.max_logit_bias)
]

# Names of older vLLM, llama-server and SGLang -> field of `StructuredOutputs`.
_STRUCTURED_NAMES: Final[Mapping[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
}
_FIELD: Final = re.compile(r"\w+")


class StreamOptions(Struct, kw_only=True):
    """How a stream reports its usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Struct, kw_only=True):
    """The `json_schema` of a response format."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """The structure of the output; llama-server's clients write `schema` without a name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, object] | bool | None = None


class StructuredFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one of them."""

    json: dict[str, object] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(CompatFields, kw_only=True):
    """How tokens are sampled and where a completion stops."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: MinShare | None = None
    repetition_penalty: Repetition | None = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[StopText], Meta(max_length=LIMITS.max_logit_bias)] | None = None
    num_spec_tokens: Count | None = None
    logit_bias: Bias | None = None
    priority: Priority | None = None
    n_predict: TokenBound | None = None
    max_new_tokens: TokenBound | None = None
    n_probs: Logprobs | None = None
    # These change no completion.
    user: object = UNSET
    metadata: object = UNSET
    safety_identifier: object = UNSET
    prompt_cache_key: object = UNSET
    prompt_cache_retention: object = UNSET
    service_tier: object = UNSET
    store: bool | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """Fields that chat and raw completions share."""

    model: str
    n: Answers | None = None
    prompt_logprobs: Logprobs | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: dict[str, object] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, object] | str | None = None
    regex: str | None = None


def check_sampling(body: SamplingFields, settings: ServeSettings) -> None:
    """Check what the types cannot: values that depend on other fields or on the server.

    Args:
        body: body of a request; its fields get the values of their aliases.
        settings: settings of the server.

    Raises:
        InvalidRequestError: naming the field.
    """
    refuse_unless_neutral(body, NEUTRAL)
    take_aliases(body, ALIASES)
    check_stops("stop", body.stop, settings.limits)
    check_bound("logit_bias", len(body.logit_bias or ()), settings.limits.max_logit_bias, "entries")
    if body.priority is not None and not settings.has_priority_field:
        raise unsupported_parameter(
            "priority", "is off on this server; it starts with --priority-field"
        )


def check_bound(param: str, found: int, limit: int, what: str) -> None:
    """Check a limit of this server, which may be lower than that of the type.

    Raises:
        InvalidRequestError: with both numbers.
    """
    if found > limit:
        raise InvalidRequestError(
            f"{param} has {found} {what}.", hint=f"This server takes {limit}.", param=param
        )


def check_stops(param: str, stop: str | list[str] | None, limits: Limits) -> None:
    """Check stop strings against the limits of this server.

    Raises:
        InvalidRequestError: too many, or one is too long.
    """
    texts = [stop] if isinstance(stop, str) else stop or []
    check_bound(param, len(texts), limits.max_stop_strings, "strings")
    for text in texts:
        check_bound(param, len(text), limits.max_stop_chars, "characters")


def check_common(body: GenerationFields, settings: ServeSettings) -> None:
    """Check the fields that chat and raw completions share; see `check_sampling`.

    Raises:
        InvalidRequestError: naming the field.
    """
    check_sampling(body, settings)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options is given without stream.",
            hint="Set stream to true.",
            param="stream_options",
        )
    most = settings.limits.max_logprobs
    check_bound("prompt_logprobs", body.prompt_logprobs or 0, most, "alternatives")


def ignored_sampling(body: SamplingFields) -> list[str]:
    """Fields of a request that are ignored although its client may expect an effect."""
    return given_fields(body, IGNORED) + ["store"] * bool(body.store)


def token_bound(param: str, value: int | None, default: int | None) -> int | None:
    """The token limit of a completion.

    Args:
        param: field name, for the error.
        value: value of the request; `NO_BOUND` overrides the default.
        default: default of the server.

    Returns:
        At least 1; None for the rest of the context.

    Raises:
        InvalidRequestError: the limit is 0.
    """
    if value == 0:
        raise InvalidRequestError(
            f"{param}=0 leaves no room for an answer.",
            hint=f"Use 1 or more, or {NO_BOUND} for the rest of the context.",
            param=param,
        )
    if value is None:
        return default
    return None if value == NO_BOUND else value


def chosen(value: T | None, default: T | None, last: T) -> T:
    """The value of the request, else of the server's options, else the API's default."""
    if value is not None:
        return value
    return last if default is None else default


def make_params(
    body: SamplingFields,
    defaults: SamplingDefaults,
    *,
    n: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured: StructuredOutputs | None,
) -> SamplingParams:
    """The sampling parameters of a request.

    Args:
        body: body of the request.
        defaults: defaults of this server.
        n: completions of each prompt.
        max_tokens: limit, at least 1; None for the rest of the context.
        logprobs: number of alternatives; None for no log-probabilities.
        prompt_logprobs: number of alternatives of prompt tokens; None for none.
        structured: structure of the output.

    Raises:
        InvalidRequestError: fields contradict each other; `param` names one.
    """
    try:
        params = SamplingParams(
            n=n,
            temperature=chosen(body.temperature, defaults.temperature, 1.0),
            top_p=chosen(body.top_p, defaults.top_p, 1.0),
            top_k=chosen(body.top_k, defaults.top_k, 0),
            min_p=chosen(body.min_p, defaults.min_p, 0.0),
            seed=body.seed,
            stop=body.stop or (),
            stop_token_ids=body.stop_token_ids or (),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            ignore_eos=bool(body.ignore_eos),
            min_tokens=body.min_tokens or 0,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=chosen(body.repetition_penalty, defaults.repetition_penalty, 1.0),
            logit_bias=body.logit_bias or {},
            bad_words=body.bad_words or (),
            allowed_token_ids=body.allowed_token_ids,
            skip_special_tokens=body.skip_special_tokens is not False,
            structured_outputs=structured,
            num_spec_tokens=body.num_spec_tokens,
        )
    except ArgumentError as error:
        raise with_param(error) from None
    if params.has_penalties:
        refuse_windows(body)
    return params


def with_param(error: ArgumentError, param: str = "") -> InvalidRequestError:
    """The HTTP error of an argument that the Python API refuses.

    Args:
        error: error whose message begins with the name of the argument.
        param: field name, if it differs from the argument's.
    """
    found = _FIELD.match(str(error))
    return client_error(
        400,
        InvalidRequestError.code if error.code == ArgumentError.code else error.code,
        str(error),
        hint=error.hint,
        param=param or (found[0] if found else None),
    )


def structured_outputs(body: GenerationFields) -> StructuredOutputs | None:
    """The structure of the output, from whichever field sets it.

    Raises:
        InvalidRequestError: two fields set one, or a field is incomplete.
    """
    found = {
        "response_format": _of_format(body.response_format),
        "structured_outputs": _of_fields(body.structured_outputs),
    }
    for name, kind in _STRUCTURED_NAMES.items():
        value = getattr(body, name)
        found[name] = None if value is None else make_structured(name, {kind: value})
    given = [name for name, value in found.items() if value is not None]
    if len(given) > 1:
        raise InvalidRequestError(
            f"{given[0]} and {given[1]} both say what form the answer must have.",
            hint="Use one of them.",
            param=given[1],
        )
    return found[given[0]] if given else None


def structured_field(body: GenerationFields) -> str:
    """The field that sets the structure of the output."""
    names = ("structured_outputs", *_STRUCTURED_NAMES)
    return next((name for name in names if getattr(body, name) is not None), "response_format")


def _of_format(form: ResponseFormat | None) -> StructuredOutputs | None:
    if form is None or form.type == "text":
        return None
    schema = form.schema if form.json_schema is None else form.json_schema.schema
    if schema is not None:
        return make_structured("response_format", {"json": schema})
    if form.type == "json_object":
        return make_structured("response_format", {"json_object": True})
    raise InvalidRequestError(
        "response_format has the type json_schema but no json_schema.schema.",
        param="response_format.json_schema",
    )


def _of_fields(fields: StructuredFields | None) -> StructuredOutputs | None:
    if fields is None:
        return None
    given = {name: getattr(fields, name) for name in fields.__struct_fields__}
    if given["json_object"] is False:
        given["json_object"] = None
    return make_structured("structured_outputs", given)


def make_structured(param: str, given: Mapping[str, Any]) -> StructuredOutputs:
    """The structure of the output.

    Args:
        param: field of the request that sets it.
        given: fields of `StructuredOutputs`.

    Raises:
        InvalidRequestError: not exactly one of them, or it exceeds a limit.
    """
    try:
        return StructuredOutputs(
            json=given.get("json"),
            regex=given.get("regex"),
            choice=given.get("choice"),
            grammar=given.get("grammar"),
            json_object=given.get("json_object"),
        )
    except ArgumentError as error:
        raise with_param(error, param) from None
