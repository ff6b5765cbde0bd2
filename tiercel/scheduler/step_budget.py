"""How many new tokens a step takes, so that on a CPU its time stays bounded.

While a prompt is computed, every running stream waits for the end of the step. On a CPU a step of
2,048 tokens takes seconds, so its tokens follow from a model of its time that each step corrects:

    seconds = fixed + token_s * tokens + pair_s * pairs

`tokens` are those of prompt chunks and of items to score, `pairs` the keys that each of them
attends to: late chunks of a long prompt are slower. `fixed` is the time of a step without chunks:
it reads the weights once and computes a token of each answer. An error of the model is shared
between the two rates in proportion to their parts of the prediction, on a logarithmic scale, so
neither rate can become negative and a correction never overshoots: the chunk sizes do not
oscillate. Steps that were too long count more than steps that were too short.

The first chunk of a step always has tokens, so prompts advance on any machine; and a step may last
twice the fixed time, so that on a slow machine not all of it is spent on reading weights.

Sizes of chunks follow from the speed of the machine, and the last bits of a prompt's values may
follow from the sizes of chunks, though on one machine they did not (logits of 600 tokens of
SmolLM2-135M, whole and in chunks of 16 to 256: equal bits in float32 and bfloat16; 2 cores with
AVX2). The bound is therefore for engines whose requests are streamed side by side (the server,
`AsyncLLM`), whose batches depend on arrival times anyway; `LLM` has none. A GPU needs none either:
its steps are short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from msgspec import Struct

BESIDE_ANSWERS_S: Final = 0.25  # of a step while answers are generated
ALONE_S: Final = 1.0  # of a step of prompts and items alone: arrivals and aborts wait for its end
MOST_FIXED: Final = 2.0  # a step may take so many times its fixed part, whatever the bounds above
CHUNK_TOKENS: Final = 16  # the least that the first chunk has; chunks are cut to multiples of it
FIRST_TOKENS: Final = 64  # of the first chunk, when nothing is known
MOST_GROWTH: Final = 2  # times the tokens of the largest step so far: larger ones are unknown
# Keys that cost as much as the matrix products of a token, before steps were measured.
FIRST_PAIRS_PER_TOKEN: Final = 4096
GAIN_SLOWER: Final = 0.7  # share of an error that is corrected after a step that was too long
GAIN_FASTER: Final = 0.3  # or too short
MOST_ERROR: Final = math.log(30.0)  # of one step: a machine that was suspended is not slow
LEAST_OWN: Final = 0.1  # share of a step's time that counts as its chunks', at least


class Chunk(NamedTuple):
    """New tokens of one request: `num_tokens` after the first `start` tokens."""

    start: int
    num_tokens: int

    @property
    def num_pairs(self) -> float:
        """The number of (token, key) pairs of the chunk's attention."""
        return self.num_tokens * (self.start + (self.num_tokens + 1) / 2)


class Rates(Struct, frozen=True):
    """Seconds of a token's matrix products, and of one key that it attends to."""

    token_s: float
    pair_s: float

    def seconds(self, chunk: Chunk) -> float:
        """Predicted time of a chunk."""
        return self.token_s * chunk.num_tokens + self.pair_s * chunk.num_pairs

    def tokens_within(self, seconds: float, start: int) -> int:
        """The number of tokens after the first `start` ones that take so many seconds."""
        first = self.token_s + self.pair_s * (start + 0.5)
        return int(2 * seconds / (first + math.sqrt(first**2 + 2 * self.pair_s * seconds)))


@dataclass(frozen=True, slots=True)
class Pace:
    """What is known of the time of steps.

    Attributes:
        fixed_s: seconds of a step without chunks; None before the first.
        rates: of chunks; None before the first.
        largest: tokens of the largest step so far, or as many as if half of the first chunk.
    """

    fixed_s: float | None = None
    rates: Rates | None = None
    largest: int = FIRST_TOKENS // MOST_GROWTH


class StepRoom(Struct):
    """The room that is left in one step.

    Attributes:
        num_tokens: new tokens of any kind.
        chunk_tokens: tokens of prompts and items.
        seconds: for prompts and items; None without a bound.
        rates: of the machine; None while nothing is known of it.
        has_chunk: whether the step has a chunk of a prompt or items already.
    """

    num_tokens: int
    chunk_tokens: int
    seconds: float | None
    rates: Rates | None
    has_chunk: bool = False

    def for_chunk(self, start: int) -> int:
        """Tokens that a chunk after `start` tokens may have; the first chunk of a step has some."""
        if self.seconds is None:
            return self.num_tokens
        count = self.chunk_tokens
        if self.rates is not None:
            count = min(count, self.rates.tokens_within(max(0.0, self.seconds), start))
        count -= count % CHUNK_TOKENS
        least = 0 if self.has_chunk else CHUNK_TOKENS
        return min(max(count, least), self.num_tokens)

    def has_room_for(self, item_tokens: int, start: int) -> bool:
        """Whether the step may take an item after `start` tokens; a large item has its own step."""
        fits_alone = not self.has_chunk and item_tokens <= self.num_tokens
        return fits_alone or item_tokens <= self.for_chunk(start)

    def take_chunk(self, chunk: Chunk) -> None:
        """Subtract a chunk; answers, whose time is fixed, only count in `num_tokens`."""
        self.num_tokens -= chunk.num_tokens
        self.has_chunk = True
        self.chunk_tokens -= chunk.num_tokens
        if self.seconds is not None and self.rates is not None:
            self.seconds -= self.rates.seconds(chunk)


class StepBudget:
    """Bounds the steps of one engine, and learns from each how long the next may be.

    Attributes:
        max_tokens: new tokens of one step at most, whatever their time.
        is_timed: whether time bounds steps too.
        pace: what was learned. It depends on this machine's clock, so of several ranks each takes
            that of rank 0 before a step is planned.
    """

    def __init__(self, max_tokens: int, *, is_timed: bool) -> None:
        self.max_tokens = max_tokens
        self.is_timed = is_timed
        self.pace = Pace()

    def open(self, *, has_answers: bool) -> StepRoom:
        """The room of a new step; `has_answers`: whether it generates tokens of answers."""
        if not self.is_timed:
            return StepRoom(self.max_tokens, self.max_tokens, None, None)
        pace = self.pace
        fixed_s = pace.fixed_s or 0.0
        bound_s = BESIDE_ANSWERS_S if has_answers else ALONE_S
        seconds = max(bound_s, MOST_FIXED * fixed_s) - fixed_s
        return StepRoom(self.max_tokens, MOST_GROWTH * pace.largest, seconds, pace.rates)

    def learn(self, chunks: Iterable[Chunk], seconds: float) -> None:
        """Correct the model of step times by a measured step.

        Args:
            chunks: of its prompts and items; none: a step of answers alone.
            seconds: that it took.
        """
        pace = self.pace
        tokens, pairs = 0, 0.0
        for chunk in chunks:
            tokens += chunk.num_tokens
            pairs += chunk.num_pairs
        if not tokens:
            before = seconds if pace.fixed_s is None else pace.fixed_s
            fixed_s = before + GAIN_FASTER * (seconds - before)
            self.pace = replace(pace, fixed_s=fixed_s)
            return
        own_s = max(seconds - (pace.fixed_s or 0.0), LEAST_OWN * seconds)
        if pace.rates is None:
            token_s = own_s / (tokens + pairs / FIRST_PAIRS_PER_TOKEN)
            rates = Rates(token_s, token_s / FIRST_PAIRS_PER_TOKEN)
        else:
            rates = _corrected(pace.rates, tokens, pairs, own_s)
        self.pace = Pace(pace.fixed_s, rates, max(pace.largest, tokens))


def _corrected(rates: Rates, tokens: int, pairs: float, seconds: float) -> Rates:
    """The rates after a step whose chunks took so many seconds."""
    parts = rates.token_s * tokens, rates.pair_s * pairs
    share = parts[1] / sum(parts)
    error = math.log(seconds / sum(parts))
    error = min(MOST_ERROR, max(-MOST_ERROR, error))
    gain = GAIN_SLOWER if error > 0 else GAIN_FASTER
    step = gain * error / (share**2 + (1 - share) ** 2)
    return Rates(
        rates.token_s * math.exp(step * (1 - share)), rates.pair_s * math.exp(step * share)
    )
