"""The input processor: checks, tokenizes and bounds prompts, and makes requests of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from tiercel.errors import (
    ArgumentError,
    ContextLengthError,
    InvalidRequestError,
    UnsupportedModelError,
)
from tiercel.grammar.spec import GrammarSpec, compile_spec
from tiercel.params import LIMITS, SamplingParams, StructuredOutputs, shown
from tiercel.request.request import Request
from tiercel.request.score_task import ScoreTask
from tiercel.seeds import mix_key
from tiercel.text.tokenizer import Tokenizer


class InputProcessor:
    """Makes requests for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_position: int,
        max_model_len: int,
        seed: int,
    ) -> None:
        """Set up.

        Args:
            tokenizer: tokenizer of the model.
            vocab_size: rows of the output matrix; token ids are below it.
            max_position: context length that the model itself allows.
            max_model_len: context length that the engine was given.
            seed: seed of requests without one.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_position = max_position
        self._max_model_len = max_model_len
        self._seed = seed
        self._ids = itertools.count()
        self._compiled: tuple[StructuredOutputs, GrammarSpec] | None = None  # the last one

    def prompt_ids(self, prompt: object, *, parse_special: bool) -> list[int]:
        """Turn a prompt into ids; `request` checks whether they fit.

        Args:
            prompt: a string, or ``{"prompt_token_ids": [...]}``.
            parse_special: whether the text of a control token becomes its id.

        Raises:
            ContextLengthError: its text is so long that no tokens of it could fit.
            ArgumentError, InvalidRequestError: it cannot be read, or holds a wrong id.
        """
        limit = self._max_model_len
        if isinstance(prompt, str):
            size = len(prompt.encode("utf-8", "surrogatepass"))
            if size > limit * LIMITS.max_prompt_bytes_per_token:
                raise self._too_long(f"prompt has {size} bytes")
            ids = self._tokenizer.encode(
                prompt, parse_special=parse_special, add_special_tokens=True
            )
        elif isinstance(prompt, Mapping) and isinstance(prompt.get("prompt_token_ids"), Iterable):
            listed = list(prompt["prompt_token_ids"])
            self._check_ids("prompt_token_ids", listed)
            ids = [int(token_id) for token_id in listed]  # of numpy's integers too
        else:
            raise ArgumentError(
                f"a prompt of type {type(prompt).__name__} cannot be read.",
                hint='Pass a string or {"prompt_token_ids": [...]}.',
            )
        return ids

    def check_length(self, num_tokens: int, num_new: int = 1) -> None:
        """Refuse a prompt that leaves no room for `num_new` tokens.

        Raises:
            ContextLengthError: the message has both numbers.
        """
        if num_tokens + num_new > self._max_model_len:
            raise self._too_long(f"prompt has {num_tokens} tokens")

    def _too_long(self, what: str) -> ContextLengthError:
        limit, most = self._max_model_len, self._max_position
        longer = f" or set max_model_len up to {most}" if most > limit else ""
        return ContextLengthError(
            f"{what} but the context holds {limit} tokens, answer included.",
            hint=f"Shorten the prompt{longer}.",
            param="prompt",
        )

    def _check_ids(self, name: str, ids: Sequence[Any]) -> None:
        limit = self._vocab_size
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < limit:
            return  # the usual case; checking one by one costs ten times as much
        for token_id in ids:
            is_integer = isinstance(token_id, Integral) and not isinstance(token_id, bool)
            if not is_integer or not 0 <= token_id < limit:
                raise InvalidRequestError(
                    f"{name} holds {shown(token_id)}.",
                    hint=f"Token ids are 0 to {limit - 1}.",
                    param=name,
                )

    def request(
        self,
        ids: list[int],
        params: SamplingParams,
        stream: int,
        *,
        max_tokens: int | None = None,
        wants_logits: bool = False,
        grammar: GrammarSpec | None = None,
    ) -> Request:
        """Make the request of one answer.

        Args:
            ids: token ids of the prompt.
            params: sampling parameters; their token ids are checked here against the vocabulary.
            stream: number of the answer among `n`.
            max_tokens: limit of new tokens; None for that of `params`, cut to the context's rest.
            wants_logits: see `Request`.
            grammar: grammar that the answer must match, with tool calls and thinking; None: that
                of `params.structured_outputs`.

        Raises:
            ContextLengthError: no token of an answer fits after the prompt, or the prompt itself
                does not fit if no answer is requested; the message has both numbers.
            InvalidRequestError: no prompt, a parameter names a token id outside the vocabulary or
                needs text that the model lacks, or the form of the answer breaks a limit
                (`compile_spec`).
        """
        if not ids:
            raise InvalidRequestError(
                "the prompt is empty.", hint="Give at least one token.", param="prompt"
            )
        self.check_length(len(ids), 1 if max_tokens is None else max_tokens)
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                self._tokenizer.require_text(name)
        self._check_ids("logit_bias", list(params.logit_bias))
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        if max_tokens is None:
            left = self._max_model_len - len(ids)
            max_tokens = left if params.max_tokens is None else min(left, params.max_tokens)
        grammar = grammar or self._grammar(params.structured_outputs)
        number = next(self._ids)
        # A grammar ends the answer where it says, and a model says so with a stop token.
        has_stops = grammar is not None or not params.ignore_eos
        own_stops = self._tokenizer.stop_ids if has_stops else ()
        return Request(
            request_id=f"request-{number}",
            prompt_token_ids=ids,
            params=params,
            seed=mix_key(self._seed, 0, number) if params.seed is None else params.seed,
            stream=stream,
            stop_ids=frozenset((*own_stops, *params.stop_token_ids)),
            max_tokens=max_tokens,
            wants_logits=wants_logits,
            grammar=grammar,
        )

    def score_request(self, ids: list[int], task: ScoreTask) -> Request:
        """Make a request that scores items after a prompt, or the prompt's own end.

        Args:
            ids: token ids of the prompt; may be empty if there are items.
            task: task whose items fit the context after the prompt.
        """
        return Request(
            request_id=f"request-{next(self._ids)}",
            prompt_token_ids=ids,
            params=SamplingParams(),
            seed=0,
            stream=0,
            stop_ids=frozenset(),
            max_tokens=0,
            score=task,
        )

    def _grammar(self, outputs: StructuredOutputs | None) -> GrammarSpec | None:
        if outputs is None:
            return None
        self._tokenizer.require_text("structured_outputs")
        if not self._tokenizer.stop_ids:
            raise InvalidRequestError(
                "this model has no token that ends an answer, so its form cannot be enforced.",
                param="structured_outputs",
            )
        known = self._compiled  # read once: threads share this object
        if known is not None and known[0] == outputs:
            return known[1]
        try:
            spec = compile_spec(outputs, max_tokens=self._max_model_len)
        except InvalidRequestError as error:
            error.param = "structured_outputs"
            raise
        assert spec is not None, "there is a form"
        self._compiled = (outputs, spec)
        return spec

    def embedding_request(self, text: str, pooling: str | None) -> Request:
        """Make the request of one vector.

        Args:
            text: text of any length that the context holds.
            pooling: pooling of the model; None if it is no embedding model.

        Raises:
            UnsupportedModelError: it is no embedding model.
            ContextLengthError, InvalidRequestError: the text is too long, or empty.
        """
        if pooling is None:
            raise UnsupportedModelError(
                "this model is no embedding model.", hint="Use one whose file says how to pool."
            )
        ids = self.prompt_ids(text, parse_special=False)
        request = self.request(ids, SamplingParams(), 0, max_tokens=0)
        request.pooling = pooling
        return request
