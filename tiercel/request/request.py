"""A request as the host knows it: its inputs, its progress and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tiercel.cache.prefix import ROOT
from tiercel.grammar.spec import GrammarSpec
from tiercel.params import SamplingParams
from tiercel.request.score_task import ScoreTask

if TYPE_CHECKING:
    from tiercel.grammar.matcher import GrammarMatcher


class Status(Enum):
    """The state of a request. Preemption returns it to WAITING, with nothing kept but token ids."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TokenLogprobs(Struct, frozen=True):
    """Natural log-probabilities at one position, of the raw model distribution.

    Attributes:
        token_id: token at the position.
        logprob: log-probability of that token.
        top: (token id, log-probability) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenUpdate(Struct, frozen=True):
    """The result of one step for one request.

    Attributes:
        new_token_ids: new token ids; may be empty in the last update.
        logprobs: log-probabilities of each new token if they were requested, else empty.
        finish_reason: reason of the end, in the last update only: ``stop``, ``length``, ``abort``
            or ``error``.
        stop_reason: stop id or stop string that ended it, or the name of the error.
    """

    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None
    stop_reason: int | str | None


ABORTED = TokenUpdate((), (), "abort", None)


def _no_values() -> npt.NDArray[np.float32]:
    return np.zeros(0, np.float32)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to continue.

    Attributes:
        request_id: name in the log. It is unique, except that the answers to one HTTP request
            share the id of that request.
        prompt_token_ids: token ids of the prompt; empty only for a `score` with items.
        params: sampling parameters.
        stream: number of this one of `n` answers; answer i samples from random stream (seed, i).
        stop_ids: token ids that end the answer.
        max_tokens: limit of new tokens, after clamping to the context.
        wants_logits: whether the logits of all prompt positions go to `prompt_logits`.
        priority: rank in the queue: smaller goes first; equal ones in order of arrival.
        pooling: ``mean`` or ``last``: its hidden states become a vector; nothing is generated.
        score: items after its prompt, or positions in it, to be scored; nothing is generated.
        client: name of the sender; grammars of different clients are compiled in turn.
        grammar: grammar that its answer must match; None: any text.
        matcher: state of its answer in `grammar`; made before the engine gets the request.
        arrival: number in the order of arrival.
        rank: rank whose rows and cache it uses, where each of several ranks has its own.
        row: engine row while running, else -1.
        block_ids: blocks that it holds, per cache group.
        num_computed: tokens in the cache or in a step under way.
        num_committed: tokens of steps whose results are in.
        num_items_planned: items of `score` that were computed or are in a step under way.
        num_items_done: items of `score` whose results are in.
        num_in_flight: steps under way that it takes part in.
        num_ahead: tokens that the steps under way add at most.
        draft_limit: drafts in a step at most; 0 without speculation.
        next_drafts: drafts that its last step made, as far as the host knows.
        acceptance: the host's estimate of the probability that a draft is accepted.
        is_unsound: whether its logits were not finite, so that its blocks are not worth keeping.
        has_unsound_draft: whether the logits after a wrong draft were not finite; then its blocks
            are not kept either.
        leader: request that computes the start of this one's prompt now, and is worth waiting for.
        leader_blocks: number of the leader's blocks in the prefix cache that end the wait.
        num_cached: tokens that were found in the prefix cache when it first entered.
        parent_key: key of its last block in the prefix cache, the parent key of its next one.
        num_prefix_blocks: blocks of it in the prefix cache, from the first on.
        prompt_logits: logits of the prompt's positions, (positions, vocab_size) each, in order.
        embedding: (hidden_size,), the vector of a request with `pooling`, not scaled; None before
            it is computed.
        scores: (values,), the values of `score` as far as they are in.
        item_tokens: next token after each item of a task with `sample_keys`, as far as they are
            in, with as many of the most likely tokens as `params.logprobs` says.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``, once finished.
        stop_reason: stop id or stop string that ended it, or the name of the error.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stream: int
    stop_ids: frozenset[int]
    max_tokens: int
    wants_logits: bool = False
    priority: int = 0
    client: str = ""
    grammar: GrammarSpec | None = None
    pooling: str | None = None
    score: ScoreTask | None = None
    matcher: GrammarMatcher | None = None
    status: Status = Status.WAITING
    arrival: int = -1
    rank: int = 0
    row: int = -1
    num_computed: int = 0
    num_committed: int = 0
    num_items_planned: int = 0
    num_items_done: int = 0
    num_in_flight: int = 0
    num_ahead: int = 0
    draft_limit: int = 0
    next_drafts: tuple[int, ...] = ()
    acceptance: float = 0.0
    is_unsound: bool = False
    has_unsound_draft: bool = False
    leader: Request | None = None
    leader_blocks: int = 0
    num_cached: int = 0
    parent_key: int = ROOT
    num_prefix_blocks: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logits: list[npt.NDArray[np.float32]] = field(default_factory=list)
    embedding: npt.NDArray[np.float32] | None = None
    scores: npt.NDArray[np.float32] = field(default_factory=_no_values)
    item_tokens: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def clone_for_engine(self) -> Request:
        """A new request with the inputs of this one.

        The engine advances the clone while a reader in the same process brings this one up to date.
        """
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            seed=self.seed,
            stream=self.stream,
            stop_ids=self.stop_ids,
            max_tokens=self.max_tokens,
            wants_logits=self.wants_logits,
            priority=self.priority,
            client=self.client,
            grammar=self.grammar,
            pooling=self.pooling,
            score=self.score,
            matcher=self.matcher,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def bound(self) -> int:
        """Largest possible number of tokens after all steps under way."""
        return self.num_tokens + self.num_ahead

    @property
    def num_items(self) -> int:
        """Number of items of `score`."""
        return 0 if self.score is None else len(self.score.items)

    @property
    def num_input_tokens(self) -> int:
        """Tokens of the prompt and of all items."""
        num_items = 0 if self.score is None else self.score.num_tokens
        return len(self.prompt_token_ids) + num_items

    @property
    def needs_last_token(self) -> bool:
        """Whether its next step is planned from its last token, which the host must know then."""
        return bool(self.params.bad_words) or self.matcher is not None

    def num_fitting(self, most: int) -> int:
        """Number of drafts that the grammar allows, for a request with no step under way."""
        drafts = self.next_drafts[:most]
        return len(drafts) if self.matcher is None else self.matcher.num_valid(drafts)

    @property
    def reads_prompt(self) -> bool:
        """Whether values at the prompt's own positions are requested."""
        has_read = self.wants_logits or self.pooling is not None
        return has_read or self.params.prompt_logprobs is not None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions [start, stop), prompt first."""
        prompt = len(self.prompt_token_ids)
        stop = max(start, stop)
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt]
