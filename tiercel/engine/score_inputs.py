"""From a query and items to requests, and from their values to scores: shared by every front.

All items that fit a step go into one request behind the query. The others take requests of their
own, in which they belong to the prompt: an item longer than a step, an empty one (its score is read
at the query's last token), and every item that stands before the query. These share the query by
the prefix cache as far as it comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tiercel.engine.inputs import InputProcessor
from tiercel.engine.request import Request
from tiercel.engine.score import LabelTrie, Node, ScoreRead, ScoreTask, make_trie
from tiercel.engine.score_params import ScoreParams
from tiercel.errors import ArgumentError, ContextLengthError, InternalError
from tiercel.params import LIMITS, Limits, shown
from tiercel.text.tokenizer import Tokenizer

Text = str | Sequence[int]
PACKED: Final = "packed"
SEPARATE: Final = "separate"


@dataclass(frozen=True, slots=True)
class ScoreUsage:
    """What a call cost.

    Attributes:
        prompt_tokens: of the query, once, and all items.
        cached_tokens: of these, found in the prefix cache.
        mode: ``packed``, or ``separate`` where each item had a query of its own.
    """

    prompt_tokens: int
    cached_tokens: int
    mode: str


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """Scores of N items and K labels.

    Attributes:
        logprobs: (N, K) float32, natural; normalised as asked. NaN for an item with an error.
        probs: (N, K) float32, their exponentials.
        label_mass: (N,) float32, the probability of all labels together among everything that
            could follow. A small one means that the model would have written something else.
            None where labels of one token are normalised among each other: it is not computed.
        errors: by the number of an item, why it has no scores.
        usage: tokens.
    """

    logprobs: npt.NDArray[np.float32]
    probs: npt.NDArray[np.float32]
    label_mass: npt.NDArray[np.float32] | None
    errors: dict[int, str]
    usage: ScoreUsage


@dataclass(slots=True)
class ScoreJob:
    """The requests of one call, and where their values belong.

    Attributes:
        params: what was asked.
        trie: of the labels.
        num_items: of the call.
        requests: to run, in any order.
        packed: which items the first of them holds; none: all requests are separate.
        places: of each separate request, its item and node.
        errors: by item.
        prompt_tokens: see `ScoreUsage`.
    """

    params: ScoreParams
    trie: LabelTrie
    num_items: int
    requests: list[Request] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)
    places: list[tuple[int, Node]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0

    @property
    def is_relative(self) -> bool:
        """Whether labels need only be compared: theirs are all the logits that count."""
        return self.params.normalize == "labels" and not self.trie.depth

    @property
    def num_done(self) -> int:
        """Items whose values are in, where the engine works on these very requests."""
        done = self.requests[0].num_items_done // len(self.trie.paths) if self.packed else 0
        separate = self.requests[bool(self.packed) :]
        pairs = zip(separate, self.places, strict=True)
        return done + sum(r.finish_reason is not None for r, (_, node) in pairs if not node)

    def output(self) -> ScoreOutput:
        """The scores; all requests have ended.

        Raises:
            InternalError: one of them ended with an error.
        """
        for request in self.requests:
            if request.finish_reason != "length":
                why = request.stop_reason or request.finish_reason
                raise InternalError(f"the items have no scores: {why}.")
        logprobs = self._label_logprobs()
        label_mass = None
        if not self.is_relative:
            label_mass = np.exp(logprobs).sum(axis=1).astype(np.float32)
        if self.params.label_normalization == "mean":
            logprobs /= [len(label) for label in self.trie.labels]
        if self.params.normalize == "labels" and self.num_items:
            top = logprobs.max(axis=1, keepdims=True)
            logprobs -= top + np.log(np.exp(logprobs - top).sum(axis=1, keepdims=True))
        return ScoreOutput(
            logprobs=logprobs.astype(np.float32),
            probs=np.exp(logprobs).astype(np.float32),
            label_mass=label_mass,
            errors=dict(self.errors),
            usage=ScoreUsage(self.prompt_tokens, self._num_cached(), self._mode),
        )

    @property
    def _mode(self) -> str:
        return SEPARATE if self.params.item_first else PACKED

    def _num_cached(self) -> int:
        separate = self.requests[bool(self.packed) :]
        roots = [r for r, (_, node) in zip(separate, self.places, strict=True) if not node]
        if self._mode == SEPARATE:
            return sum(request.num_cached for request in roots)
        # The query counts once, so what was found of it does.
        first = self.requests[:1] if self.packed else roots[:1]
        return min(self.prompt_tokens, sum(request.num_cached for request in first))

    def _label_logprobs(self) -> npt.NDArray[np.float64]:
        """(N, K), over the vocabulary or relative, tokens of a label summed up."""
        edges = self.trie.edges
        values = np.full((self.num_items, len(edges)), np.nan)
        if self.packed:
            own = np.frombuffer(self.requests[0].scores, "<f4")
            values[self.packed] = own.reshape(len(self.packed), len(edges))
        separate = self.requests[bool(self.packed) :]
        for request, (item, node) in zip(separate, self.places, strict=True):
            columns = [i for i, (at, _) in enumerate(edges) if at == node]
            values[item, columns] = np.frombuffer(request.scores, "<f4")
        return np.stack([values[:, list(label)].sum(axis=1) for label in self.trie.labels], axis=1)


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
        limits: Limits = LIMITS,
    ) -> None:
        """Set up.

        Args:
            inputs: of the model.
            tokenizer: of the model.
            max_model_len: the context that the engine was given.
            max_step_tokens: new tokens of a step of the engine.
            max_num_seqs: requests that run at once.
            limits: of items and tokens.
        """
        self._inputs = inputs
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        # What is left of a step when every other request takes a token of it: so an item always
        # gets its turn.
        self._longest_packed = max_step_tokens - max_num_seqs
        self._limits = limits

    def job(self, query: Text, items: str | Sequence[Text], params: ScoreParams) -> ScoreJob:
        """Check a call and make its requests.

        Args:
            query: the text before all items, of which control tokens become their ids, or token
                ids.
            items: of the same kind.
            params: the rest.

        Raises:
            ArgumentError: see `LLM.score`; `param` names the place.
            ContextLengthError: the query, or an item behind it, does not fit the context.
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
        job = ScoreJob(params, make_trie(self._labels(params)), len(listed))
        if not params.item_first and len(prefix) >= self._max_model_len:
            raise self._too_long(f"query has {len(prefix)} tokens", "query")
        fitting = self._fit(job, prefix, suffix, sequences)
        job.prompt_tokens = sum(map(len, fitting.values()))
        job.prompt_tokens += 0 if params.item_first else len(prefix)
        if job.prompt_tokens > self._limits.max_score_tokens:
            raise ArgumentError(
                f"query and items have {job.prompt_tokens} tokens; the limit is "
                f"{self._limits.max_score_tokens}.",
                hint="Send them in several calls.",
                param="items",
            )
        self._add_requests(job, [] if params.item_first else prefix, fitting)
        return job

    def _sequences(
        self, query: Text, items: Sequence[Text], params: ScoreParams
    ) -> tuple[list[int], list[int], list[list[int]]]:
        """Query, what follows every item, and the items as token ids."""
        is_text = isinstance(query, str)
        others = [(f"items[{i}]", item) for i, item in enumerate(items)]
        if len(params.suffix):
            others.append(("suffix", params.suffix))
        for place, value in others:
            if isinstance(value, str) != is_text:
                raise ArgumentError(
                    f"query is {'text' if is_text else 'token ids'} but {place} is not.",
                    hint="Give all of them as text, or all as token ids.",
                    param=place,
                )
        suffix = self._suffix_ids(params.suffix)
        if params.item_first:
            first = [self._first_ids(f"items[{i}]", x, False) for i, x in enumerate(items)]
            return self._inner_ids("query", query), suffix, first
        inner = [self._inner_ids(f"items[{i}]", item) for i, item in enumerate(items)]
        return self._first_ids("query", query, True), suffix, inner

    def _fit(
        self, job: ScoreJob, prefix: list[int], suffix: list[int], items: Sequence[list[int]]
    ) -> dict[int, list[int]]:
        """By item, what stands between the shared prefix and the label; too long ones are judged.

        With the item first this is the whole prompt.
        """
        params, fitting = job.params, {}
        tail = [*prefix, *suffix] if params.item_first else suffix
        before = 0 if params.item_first else len(prefix)
        most = self._max_model_len - before - len(tail) - job.trie.depth
        for number, item in enumerate(items):
            if len(item) > most:
                message = (
                    f"items[{number}] has {len(item)} tokens, behind a query of {len(prefix)} and "
                    f"with {len(suffix) + job.trie.depth} of suffix and label"
                )
                error = self._too_long(message, f"items[{number}]")
                if params.long_items == "refuse":
                    raise error
                if params.long_items == "skip" or most < 1:
                    job.errors[number] = f"{error} {error.hint}"
                    continue
            if not before + len(item) + len(tail):
                raise ArgumentError(
                    f"items[{number}] has no tokens, nor has the query.",
                    hint="Give one of them a text.",
                    param=f"items[{number}]",
                )
            fitting[number] = [*item[: max(0, most)], *tail]
        return fitting

    def _add_requests(
        self, job: ScoreJob, prefix: list[int], fitting: dict[int, list[int]]
    ) -> None:
        trie = job.trie
        # Of labels of several tokens each token is compared with others.
        is_relative = job.is_relative

        def is_packed(sequence: list[int]) -> bool:
            return 0 < len(sequence) <= self._longest_packed - trie.depth

        if not job.params.item_first:
            job.packed += [number for number, own in fitting.items() if is_packed(own)]
        if job.packed:
            packed = tuple((*fitting[n], *path) for n in job.packed for path in trie.paths)
            task = ScoreTask(packed, trie.reads, is_relative)
            job.requests.append(self._inputs.score_request(prefix, task))
        for number in sorted(fitting.keys() - set(job.packed)):
            for node, token_ids in trie.nodes.items():
                task = ScoreTask((), ((ScoreRead(0, token_ids),),), is_relative)
                ids = [*prefix, *fitting[number], *node]
                job.requests.append(self._inputs.score_request(ids, task))
                job.places.append((number, node))

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
            twin = seen.setdefault(tuple(ids), text)
            if twin is not text:
                raise ArgumentError(
                    f"labels {shown(twin)} and {shown(text)} have the same tokens.",
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

    def _first_ids(self, place: str, value: Text, parse_special: bool) -> list[int]:
        """Ids of what begins a sequence."""
        if not isinstance(value, str):
            return self._ids(place, value)
        self._check_size(place, value)
        ids = self._tokenizer.encode(value, parse_special=parse_special)
        return self._tokenizer.with_bos(ids)

    def _inner_ids(self, place: str, value: Text) -> list[int]:
        """Ids of what follows other tokens."""
        if not isinstance(value, str):
            return self._ids(place, value)
        self._check_size(place, value)
        return self._tokenizer.encode_inner(value)

    def _suffix_ids(self, value: Text) -> list[int]:
        if not isinstance(value, str):
            return self._ids("suffix", value)
        self._check_size("suffix", value)
        return self._tokenizer.encode(value, parse_special=True)

    def _check_size(self, place: str, text: str) -> None:
        if len(text) > self._max_model_len * self._limits.max_prompt_bytes_per_token:
            raise self._too_long(f"{place} has {len(text)} characters", place)

    def _ids(self, place: str, value: object) -> list[int]:
        if not isinstance(value, Iterable):
            raise ArgumentError(
                f"{place}={shown(value)} is neither text nor token ids.",
                hint="Give a string or a list of integers.",
                param=place,
            )
        listed = list(value)
        self._check_ids(place, listed)
        return [int(token_id) for token_id in listed]

    def _check_ids(self, place: str, ids: Sequence[Any]) -> None:
        limit = self._tokenizer.vocab_size
        for i, token_id in enumerate(ids):
            is_integer = isinstance(token_id, Integral) and not isinstance(token_id, bool)
            if not is_integer or not 0 <= int(token_id) < limit:
                raise ArgumentError(
                    f"{place}[{i}] is {shown(token_id)}.",
                    hint=f"Token ids are integers 0 to {limit - 1}; the vocabulary has {limit}.",
                    param=f"{place}[{i}]",
                )

    def _too_long(self, what: str, place: str) -> ContextLengthError:
        return ContextLengthError(
            f"{what} but the context holds {self._max_model_len} tokens.",
            hint="Shorten it, or set a larger max_model_len.",
            param=place,
        )
