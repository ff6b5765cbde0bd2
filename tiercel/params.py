"""The parameters of a generation, checked when they are made.

`SamplingParams` mirrors vLLM's names, so that scripts carry over. It is immutable and validated at
construction: a wrong value is found at the line that wrote it, not in the middle of a batch.
`LIMITS` is the one table of bounds; no other file has numbers of its own.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from tiercel.errors import ArgumentError

# Below this temperature the distribution is a point to every float32 digit: treat it as greedy.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that hold for the API, the command line and the server alike.

    The first group bounds sampling parameters wherever they are made; a server may lower them. The
    others are the server's: what one request, one connection and the queue may hold. `None` means
    no bound.
    """

    max_n: int = 16
    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    max_logit_bias: int = 1024
    max_logprobs: int = 20
    max_temperature: float = 2.0
    max_tokens: int = 2**31 - 1
    max_prompt_bytes_per_token: int = 64
    max_score_items: int = 4096
    max_score_tokens: int = 1_000_000  # of one request: the prefix and all items

    max_body_bytes: int = 32 << 20
    max_json_depth: int = 64
    max_json_members: int = 200_000
    max_prompts: int = 256
    max_answers: int = 1024  # prompts times n
    max_messages: int = 2048
    max_tools: int = 128
    max_tool_name_chars: int = 128  # as at Anthropic; names of MCP tools pass 64
    max_schema_bytes: int = 256 << 10
    max_schema_depth: int = 32
    max_schema_nodes: int = 5000
    max_regex_bytes: int = 4 << 10
    max_grammar_bytes: int = 64 << 10
    max_grammar_seconds: float = 2.0

    max_waiting_requests: int = 512
    max_queue_seconds: float = 120.0
    max_request_seconds: float | None = None

    max_connections: int = 2048
    max_header_bytes: int = 64 << 10
    max_headers: int = 100
    max_head_seconds: float = 10.0
    max_body_gap_seconds: float = 30.0  # without a byte of a body that is not complete
    max_body_seconds: float = 300.0


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an answer must have; exactly one field is given.

    Whether the form can be enforced is found where the request is made: see
    `tiercel/grammar/spec.py`.

    Attributes:
        json: JSON schema, as an object or as JSON text; kept as text.
        regex: the whole answer matches it; Rust's syntax, so no look-around and no back-references.
        choice: the answer is one of these strings.
        grammar: Lark grammar, with the rule `start`.
        json_object: True: the answer is a JSON object of any kind.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        """Check the types, and that one field is given.

        Raises:
            ArgumentError: naming the field and the rule; with the code `schema_too_complex` where a
                limit is passed.
        """
        names = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ArgumentError(
                f"structured_outputs has {' and '.join(given) or 'no field'}.",
                hint=f"Give exactly one of {', '.join(names)}.",
            )
        put = object.__setattr__  # the dataclass is frozen
        if self.json is not None:
            put(self, "json", _schema_text(self.json))
        elif self.choice is not None:
            put(self, "choice", _choices(self.choice))
        elif self.json_object is not None:
            if self.json_object is not True:
                raise ArgumentError(f"json_object={shown(self.json_object)} is not True.")
        else:
            _source("regex", self.regex, LIMITS.max_regex_bytes)
            _source("grammar", self.grammar, LIMITS.max_grammar_bytes)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of sampling: how tokens are chosen, and what ends an answer.

    Attributes:
        n: answers to one prompt, 1 to 16; answer i samples from random stream (seed, i).
        temperature: divisor of the logits, up to 2; 0 is greedy (the lowest id wins a tie).
        top_p: probability that the smallest set of most likely tokens to keep reaches, (0, 1].
        top_k: number of most likely tokens to keep; 0 or -1 keeps all.
        min_p: fraction of the highest probability below which tokens are dropped, [0, 1].
        seed: 64-bit seed of the random stream; None: derived from the engine's seed.
        stop: up to 16 strings that end the answer; they are cut from it.
        stop_token_ids: token ids that end the answer, besides the model's own.
        include_stop_str_in_output: whether a matched stop string is kept.
        ignore_eos: whether to continue past the model's own stop tokens.
        min_tokens: number of tokens before which nothing ends the answer.
        max_tokens: largest number of tokens; None: as many as the context has left.
        logprobs: number of most likely tokens to report with their natural log-probabilities,
            besides the chosen token; None reports nothing.
        prompt_logprobs: the same number for each prompt token.
        presence_penalty: number subtracted from the logit of each token in the answer, [-2, 2].
        frequency_penalty: number subtracted for each occurrence of a token in the answer, [-2, 2].
        repetition_penalty: factor by which positive logits of tokens in prompt or answer are
            divided and negative ones multiplied, (0, 10]; 1 is off.
        logit_bias: token id to a number in [-100, 100] added to its logit; -100 bans it.
        bad_words: strings that must not be generated.
        allowed_token_ids: the only token ids that may be generated; None for all.
        skip_special_tokens: whether control tokens are left out of the text.
        detokenize: whether text is made; without it, stop strings cannot be used.
        structured_outputs: form that the answer must have; the answer ends with the form, whatever
            `ignore_eos` is.
        num_spec_tokens: draft tokens in a step at most; 0 switches speculation off, None leaves it
            as the engine has it. It never changes an answer.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    num_spec_tokens: int | None = None

    def __post_init__(self) -> None:
        """Normalise sequences to tuples and check every field.

        Raises:
            ArgumentError: naming field, value and range.
        """
        put = object.__setattr__  # the dataclass is frozen
        put(self, "stop", _strings("stop", self.stop))
        put(self, "bad_words", _strings("bad_words", self.bad_words))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ArgumentError("allowed_token_ids=() is empty.", hint="Name at least one id.")
        put(self, "logit_bias", _logit_bias(self.logit_bias))
        self._check_numbers()
        self._check_stops()
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "detokenize",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ArgumentError(f"{name}={shown(value)} is neither True nor False.")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise ArgumentError(
                f"structured_outputs={shown(self.structured_outputs)} is no StructuredOutputs."
            )

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1, LIMITS.max_n)
        _number("temperature", self.temperature, 0.0, LIMITS.max_temperature, "0.0 (greedy) to 2.0")
        _number("top_p", self.top_p, 0.0, 1.0, "above 0.0, up to 1.0", is_open=True)
        _integer("top_k", self.top_k, -1, LIMITS.max_tokens)
        _number("min_p", self.min_p, 0.0, 1.0, "0.0 to 1.0")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        _integer("min_tokens", self.min_tokens, 0, LIMITS.max_tokens)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, LIMITS.max_tokens)
            if self.min_tokens > self.max_tokens:
                raise ArgumentError(
                    f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}.",
                    hint="Lower min_tokens.",
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, LIMITS.max_logprobs)
        if self.num_spec_tokens is not None:
            _integer("num_spec_tokens", self.num_spec_tokens, 0, LIMITS.max_tokens)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "-2.0 to 2.0")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "-2.0 to 2.0")
        _number(
            "repetition_penalty", self.repetition_penalty, 0.0, 10.0, "above 0, to 10", is_open=True
        )

    def _check_stops(self) -> None:
        if len(self.stop) > LIMITS.max_stop_strings:
            raise ArgumentError(
                f"stop has {len(self.stop)} strings.",
                hint=f"Use at most {LIMITS.max_stop_strings}.",
            )
        if self.stop and not self.detokenize:
            raise ArgumentError(
                f"stop={shown(self.stop)} needs text but detokenize=False.",
                hint="Use stop_token_ids instead.",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without drawing."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def has_edits(self) -> bool:
        """Whether tokens are banned or biased."""
        has_bans = self.allowed_token_ids is not None or bool(self.bad_words or self.min_tokens)
        return has_bans or bool(self.logit_bias)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters of requests that do not say; None: not set here.

    `SamplingParams` gives the meanings.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        """The values that are set, by field."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, others: SamplingDefaults) -> SamplingDefaults:
        """These values, and for fields without one those of `others`."""
        return replace(others, **self.given())


def _number(
    name: str, value: object, low: float, high: float, allowed: str, *, is_open: bool = False
) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_inside = low < value <= high if is_open else low <= value <= high
        if is_inside:
            return
    raise ArgumentError(f"{name}={shown(value)} is out of range.", hint=f"Use {allowed}.")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ArgumentError(
            f"{name}={shown(value)} is out of range.", hint=f"Use an integer {low} to {high}."
        )


def shown(value: object) -> str:
    """A value as a message may repeat it."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "(a huge integer)"


def _strings(name: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str):
        values = (values,)
    if not isinstance(values, Sequence) or not all(isinstance(value, str) for value in values):
        raise ArgumentError(
            f"{name}={shown(values)} is not a list of strings.",
            hint="Pass a string or a list of them.",
        )
    for text in values:
        if not 0 < len(text) <= LIMITS.max_stop_chars:
            raise ArgumentError(
                f"{name} holds {shown(text)}, which has {len(text)} characters.",
                hint=f"Use 1 to {LIMITS.max_stop_chars} characters.",
            )
        _unicode(name, text)
    return tuple(values)


def _unicode(name: str, text: str) -> int:
    """The bytes that a text takes.

    Raises:
        ArgumentError: it holds a lone surrogate.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ArgumentError(
            f"{name} holds {shown(text)}, which is no Unicode text.",
            hint="A surrogate pair must be complete.",
        ) from None


def _too_complex(message: str, hint: str) -> ArgumentError:
    error = ArgumentError(message, hint=hint)
    error.code = "schema_too_complex"
    return error


def _source(name: str, text: object, limit: int) -> None:
    """Check a regular expression or a grammar; None is not given."""
    if text is None:
        return
    if not isinstance(text, str) or not text:
        raise ArgumentError(f"{name}={shown(text)} is no text, or empty.")
    size = _unicode(name, text)
    if size > limit:
        raise _too_complex(f"{name} has {size} bytes.", f"Use at most {limit}.")


def _choices(values: object) -> tuple[str, ...]:
    if (
        not isinstance(values, Sequence)
        or isinstance(values, str)
        or not all(isinstance(value, str) and value for value in values)
    ):
        raise ArgumentError(
            f"choice={shown(values)} is not a list of strings.",
            hint="Pass at least one; none may be empty.",
        )
    if not values:
        raise ArgumentError("choice=[] is empty.", hint="Pass at least one string.")
    size = sum(_unicode("choice", value) for value in values)
    if len(values) > LIMITS.max_schema_nodes or size > LIMITS.max_schema_bytes:
        raise _too_complex(
            f"choice has {len(values)} strings of {size} bytes together.",
            f"Use at most {LIMITS.max_schema_nodes} and {LIMITS.max_schema_bytes} bytes.",
        )
    return tuple(values)


def _schema_text(schema: object) -> str:
    """A schema as JSON text.

    Raises:
        ArgumentError: it is no JSON, or neither an object nor a boolean.
    """
    try:
        if isinstance(schema, str):
            text = schema
        else:
            text = json_module.dumps(schema, ensure_ascii=False, allow_nan=False)
        size = _unicode("json", text)
        if size > LIMITS.max_schema_bytes:
            raise _too_complex(
                f"json has {size} bytes.", f"Use a schema of at most {LIMITS.max_schema_bytes}."
            )
        value = json_module.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_complex(
            "json is nested too deeply.", f"Use at most {LIMITS.max_schema_depth} levels."
        ) from None
    except ArgumentError:
        raise
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"json={shown(schema)} is no JSON: {error!s:.100}.", hint="Pass a JSON schema."
        ) from None
    if not isinstance(value, dict | bool):
        raise ArgumentError(f"json={shown(schema)} is no JSON schema.", hint="Pass an object.")
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ArgumentError(
            f"{name}={shown(values)} is not a list of token ids.", hint="Pass a list of integers."
        )
    for value in values:
        _integer(name, value, 0, LIMITS.max_tokens)
    return tuple(values)


def _logit_bias(values: object) -> Mapping[int, float]:
    if not isinstance(values, Mapping):
        raise ArgumentError(
            f"logit_bias={shown(values)} is not a mapping.", hint="Map token ids to numbers."
        )
    if len(values) > LIMITS.max_logit_bias:
        raise ArgumentError(
            f"logit_bias has {len(values)} entries.", hint=f"Use at most {LIMITS.max_logit_bias}."
        )
    for token_id, bias in values.items():
        _integer("logit_bias key", token_id, 0, LIMITS.max_tokens)
        _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0, "-100 to 100")
    return dict(values)
