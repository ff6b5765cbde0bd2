"""The inputs of scoring: from a query and items to requests, and from their values to scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tiercel.errors import ArgumentError, ContextLengthError
from tiercel.params import LIMITS, Limits, shown
from tiercel.request.inputs import InputProcessor
from tiercel.request.request import Request
from tiercel.request.score_params import ScoreParams
from tiercel.request.score_run import ScoreRun, make_run
from tiercel.request.score_task import make_trie
from tiercel.text.tokenizer import Tokenizer

Text = str | Sequence[int]
PACKED: Final = "packed"
SEPARATE: Final = "separate"


@dataclass(frozen=True, slots=True)
class ScoreUsage:
    """The tokens of a call.

    Attributes:
        prompt_tokens: tokens of the query, counted once, and of all items.
        cached_tokens: prompt tokens that were found in the prefix cache.
        mode: ``packed``, or ``separate`` where each item was a prompt of its own: with the item
            first, where the model packs no items, or where none fits.
    """

    prompt_tokens: int
    cached_tokens: int
    mode: str


class ScoreOutput(Struct, frozen=True):
    """Scores of N items and K labels.

    Attributes:
        logprobs: (N, K) float32, natural log-probabilities, normalised as requested; NaN for an
            item with an error.
        probs: (N, K) float32, exponentials of `logprobs`.
        label_mass: (N,) float32, the probability of all labels together among all possible
            continuations. A small one means that the model would have written something else.
            None where labels of one token are normalised among each other: it is not computed.
        errors: reason why an item has no scores, by the item's number.
        usage: tokens of the call.
    """

    logprobs: npt.NDArray[np.float32]
    probs: npt.NDArray[np.float32]
    label_mass: npt.NDArray[np.float32] | None
    errors: dict[int, str]
    usage: ScoreUsage


class ScoreJob(Struct, frozen=True):
    """The requests of one call, and where their values belong.

    Attributes:
        params: parameters of the call.
        num_items: number of items of the call.
        num_labels: number of labels of the call.
        numbers: numbers of the items that run, in the order of the run's sequences.
        run: requests of the items that run.
        errors: reasons why items have no scores, by number.
        prompt_tokens: see `ScoreUsage`.
        is_relative: whether labels are compared among each other only, so that no other logits
            count.
    """

    params: ScoreParams
    num_items: int
    num_labels: int
    numbers: tuple[int, ...]
    run: ScoreRun
    errors: dict[int, str]
    prompt_tokens: int
    is_relative: bool

    @property
    def requests(self) -> tuple[Request, ...]:
        """Requests to run, in any order."""
        return self.run.requests

    @property
    def num_done(self) -> int:
        """Number of items whose values are in, if the engine works on these very requests."""
        return self.run.num_done

    def output(self) -> ScoreOutput:
        """The scores; all requests have ended.

        Raises:
            InternalError: one of them ended with an error.
        """
        self.run.check_ended()
        params = self.params
        logprobs = np.full((self.num_items, self.num_labels), np.nan)
        if self.numbers:
            logprobs[list(self.numbers)] = np.stack(self.run.label_values())
        label_mass = None
        if not self.is_relative:
            label_mass = np.exp(logprobs).sum(axis=1).astype(np.float32)
        if params.label_normalization == "mean" and self.numbers:
            logprobs /= [len(label) for label in self.run.tries[0].labels]
        if params.normalize == "labels" and self.num_items:
            top = logprobs.max(axis=1, keepdims=True)
            logprobs -= top + np.log(np.exp(logprobs - top).sum(axis=1, keepdims=True))
        # With the item first nothing is shared; else the query counts once, and so does its hit.
        cached = min(self.prompt_tokens, self.run.num_cached)
        if params.item_first:
            cached = self.run.num_cached_apart
        mode = PACKED if self.run.packed else SEPARATE
        return ScoreOutput(
            logprobs=logprobs.astype(np.float32),
            probs=np.exp(logprobs).astype(np.float32),
            label_mass=label_mass,
            errors=dict(self.errors),
            usage=ScoreUsage(self.prompt_tokens, cached, mode),
        )


class ScoreInputs:
    """Makes jobs for one model."""

    def __init__(
        self,
        inputs: InputProcessor,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        max_step_tokens: int,
        max_num_seqs: int,
        packs_items: bool = True,
        limits: Limits = LIMITS,
    ) -> None:
        """Set up.

        Args:
            inputs: input processor of the model.
            tokenizer: tokenizer of the model.
            max_model_len: context length that the engine was given.
            max_step_tokens: new tokens of a step of the engine.
            max_num_seqs: requests that run together.
            packs_items: whether the model computes items after one prompt in one step; else each
                item is a prompt of its own, whose start is found in the prefix cache.
            limits: limits of items and tokens.
        """
        self._inputs = inputs
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        # Tokens left of a step in which every other request takes one: so an item always gets its
        # turn.
        self._longest_packed = max_step_tokens - max_num_seqs if packs_items else 0
        self._limits = limits

    def job(self, query: Text, items: str | Sequence[Text], params: ScoreParams) -> ScoreJob:
        """Check a call and make its requests.

        Args:
            query: the text before all items, of which control tokens become their ids, or token
                ids.
            items: texts or lists of token ids, like the query.
            params: parameters of the call.

        Raises:
            ArgumentError: see `LLM.score`; `param` names the wrong argument.
            ContextLengthError: the query, or an item after it, does not fit the context.
        """
        if not isinstance(items, Iterable):
            raise ArgumentError(f"items={shown(items)} is no list.", param="items")
        listed: list[Text] = [items] if isinstance(items, str) else list(items)
        if len(listed) > self._limits.max_score_items:
            raise ArgumentError(
                f"there are {len(listed)} items; the limit is {self._limits.max_score_items}.",
                hint="Send them in several calls.",
                param="items",
            )
        prefix, suffix, sequences = self._sequences(query, listed, params)
        trie = make_trie(self._labels(params))
        if not params.item_first and len(prefix) >= self._max_model_len:
            raise self._too_long(f"query has {len(prefix)} tokens", "query")
        errors: dict[int, str] = {}
        fitting = self._fit(params, trie.depth, prefix, suffix, sequences, errors)
        prompt_tokens = sum(map(len, fitting.values()))
        prompt_tokens += 0 if params.item_first else len(prefix)
        if prompt_tokens > self._limits.max_score_tokens:
            raise ArgumentError(
                f"query and items have {prompt_tokens} tokens; the limit is "
                f"{self._limits.max_score_tokens}.",
                hint="Send them in several calls.",
                param="items",
            )
        # The tokens of a label of several tokens are each compared with other tokens.
        is_relative = params.normalize == "labels" and not trie.depth
        run = make_run(
            self._inputs,
            [] if params.item_first else prefix,
            list(fitting.values()),
            [trie] * len(fitting),
            longest_packed=0 if params.item_first else self._longest_packed,
            is_relative=is_relative,
        )
        sizes = (len(listed), len(trie.labels))
        return ScoreJob(params, *sizes, tuple(fitting), run, errors, prompt_tokens, is_relative)

    def _sequences(
        self, query: Text, items: Sequence[Text], params: ScoreParams
    ) -> tuple[list[int], list[int], list[list[int]]]:
        """Token ids of the query, of the suffix and of the items."""
        is_text = isinstance(query, str)
        others = [(f"items[{i}]", item) for i, item in enumerate(items)]
        if len(params.suffix):
            others.append(("suffix", params.suffix))
        for name, value in others:
            if isinstance(value, str) != is_text:
                raise ArgumentError(
                    f"query is {'text' if is_text else 'token ids'} but {name} is not.",
                    hint="Give all of them as text, or all as token ids.",
                    param=name,
                )
        suffix = self._suffix_ids(params.suffix)
        if params.item_first:
            first = [self._first_ids(f"items[{i}]", x, False) for i, x in enumerate(items)]
            return self._inner_ids("query", query), suffix, first
        inner = [self._inner_ids(f"items[{i}]", item) for i, item in enumerate(items)]
        return self._first_ids("query", query, True), suffix, inner

    def _fit(
        self,
        params: ScoreParams,
        depth: int,
        prefix: list[int],
        suffix: list[int],
        items: Sequence[list[int]],
        errors: dict[int, str],
    ) -> dict[int, list[int]]:
        """The tokens between the shared prefix and the label, by item, for all items that fit.

        With the item first these are the whole prompt. `depth`: tokens that labels add at most;
        `errors`: filled with the errors of items.
        """
        fitting = {}
        tail = [*prefix, *suffix] if params.item_first else suffix
        before = 0 if params.item_first else len(prefix)
        most = self._max_model_len - before - len(tail) - depth
        for number, item in enumerate(items):
            if len(item) > most:
                message = (
                    f"items[{number}] has {len(item)} tokens, after a query of {len(prefix)} and "
                    f"with {len(suffix) + depth} of suffix and label"
                )
                error = self._too_long(message, f"items[{number}]")
                if params.long_items == "refuse":
                    raise error
                if params.long_items == "skip" or most < 1:
                    errors[number] = f"{error} {error.hint}"
                    continue
            if not before + len(item) + len(tail):
                raise ArgumentError(
                    f"items[{number}] has no tokens, nor has the query.",
                    hint="Give one of them a text.",
                    param=f"items[{number}]",
                )
            fitting[number] = [*item[: max(0, most)], *tail]
        return fitting

    def _labels(self, params: ScoreParams) -> list[list[int]]:
        if params.labels is None:
            self._check_ids("label_token_ids", params.label_token_ids or ())
            return [[int(token_id)] for token_id in params.label_token_ids or ()]
        labels = [self._tokenizer.encode_inner(label) for label in params.labels]
        seen: dict[tuple[int, ...], str] = {}
        for text, ids in zip(params.labels, labels, strict=True):
            if not ids:
                raise ArgumentError(
                    f"label {shown(text)} has no tokens.", hint="Drop it.", param="labels"
                )
            earlier = seen.setdefault(tuple(ids), text)
            if earlier is not text:
                raise ArgumentError(
                    f"labels {shown(earlier)} and {shown(text)} have the same tokens.",
                    hint="Give one of them.",
                    param="labels",
                )
        if params.strict_labels:
            self._check_closed(seen)
        return labels

    def _check_closed(self, labels: dict[tuple[int, ...], str]) -> None:
        """Refuse a label that begins another one: it is compared with something longer."""
        for ids, text in labels.items():
            for length in range(1, len(ids)):
                shorter = labels.get(ids[:length])
                if shorter is not None:
                    raise ArgumentError(
                        f"the tokens of label {shown(shorter)} begin label {shown(text)}.",
                        hint="Append what ends a label, for example a line feed, to all of them.",
                        param="labels",
                    )

    def _first_ids(self, name: str, value: Text, parse_special: bool) -> list[int]:
        """Token ids of a text that begins a sequence."""
        if not isinstance(value, str):
            return self._ids(name, value)
        self._check_size(name, value)
        ids = self._tokenizer.encode(value, parse_special=parse_special)
        return self._tokenizer.with_bos(ids)

    def _inner_ids(self, name: str, value: Text) -> list[int]:
        """Token ids of a text that follows other tokens."""
        if not isinstance(value, str):
            return self._ids(name, value)
        self._check_size(name, value)
        return self._tokenizer.encode_inner(value)

    def _suffix_ids(self, value: Text) -> list[int]:
        if not isinstance(value, str):
            return self._ids("suffix", value)
        self._check_size("suffix", value)
        return self._tokenizer.encode(value, parse_special=True)

    def _check_size(self, name: str, text: str) -> None:
        if len(text) > self._max_model_len * self._limits.max_prompt_bytes_per_token:
            raise self._too_long(f"{name} has {len(text)} characters", name)

    def _ids(self, name: str, value: object) -> list[int]:
        if not isinstance(value, Iterable):
            raise ArgumentError(
                f"{name}={shown(value)} is neither text nor token ids.",
                hint="Give a string or a list of integers.",
                param=name,
            )
        listed = list(value)
        # A list of 500 items has 15,000 ids: 8 ms one by one, 1 ms here (2 cores).
        is_plain = set(map(type, listed)) == {int}
        if is_plain and min(listed) >= 0 and max(listed) < self._tokenizer.vocab_size:
            return listed
        self._check_ids(name, listed)
        return [int(token_id) for token_id in listed]

    def _check_ids(self, name: str, ids: Sequence[Any]) -> None:
        limit = self._tokenizer.vocab_size
        for i, token_id in enumerate(ids):
            is_integer = isinstance(token_id, Integral) and not isinstance(token_id, bool)
            if not is_integer or not 0 <= int(token_id) < limit:
                raise ArgumentError(
                    f"{name}[{i}] is {shown(token_id)}.",
                    hint=f"Token ids are integers 0 to {limit - 1}; the vocabulary has {limit}.",
                    param=f"{name}[{i}]",
                )

    def _too_long(self, what: str, name: str) -> ContextLengthError:
        return ContextLengthError(
            f"{what} but the context holds {self._max_model_len} tokens.",
            hint="Shorten it, or set a larger max_model_len.",
            param=name,
        )
