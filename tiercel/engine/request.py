"""A request as the host knows it: its tokens, its place, its progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from tiercel.cache.prefix import ROOT
from tiercel.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class Status(Enum):
    """Where a request stands. Preemption goes back to WAITING with nothing kept but token ids."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one place, of the raw model distribution.

    Attributes:
        token_id: the token that stands there.
        logprob: its log-probability.
        top: (token id, log-probability) of the most likely, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to continue.

    Attributes:
        request_id: unique in the engine.
        prompt_token_ids: never empty.
        params: sampling parameters.
        stream: which of `n` answers this is; answer i draws from the random stream (seed, i).
        stop_ids: token ids that end it.
        max_tokens: the limit after clamping to the context.
        wants_logits: keep the logits of every prompt place in `prompt_logits`.
        priority: smaller goes first; equal ones in order of arrival.
        row: engine row while running, else -1.
        block_ids: cache blocks it owns.
        num_computed: tokens whose keys and values are in the cache.
        num_cached: of these, tokens that were found in the prefix cache when it first entered.
        link: the prefix cache's link of its last kept block, and
        num_linked: how many of its blocks the chain up to there holds.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``, once finished.
        stop_reason: the stop id or string, or what went wrong.
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
    status: Status = Status.WAITING
    row: int = -1
    num_computed: int = 0
    num_cached: int = 0
    link: int = ROOT
    num_linked: int = 0
    block_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logits: list[Tensor] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def reads_prompt(self) -> bool:
        """Whether something is asked of the prompt's own places."""
        return self.wants_logits or self.params.prompt_logprobs is not None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of places [start, stop), prompt first."""
        prompt = len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt]
