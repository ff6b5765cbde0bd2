"""Simulation: which of several engines takes a request, by policy. No GPU, no model.

    python -m benchmarks.routing_policies

Conversations of four turns begin at random; all share a system prompt, and each turn brings the
whole history. An engine computes steps of up to 4,096 tokens and 64 requests, of 8 ms, 0.15 ms for
each request that generates, and 40 us for each token of a prompt that its cache does not hold. The
cache and the router's memory of it are the real classes of `ipc/routing.py`. Answers have 30 to
800 tokens, which no policy knows beforehand.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiercel.ipc.routing import Candidate, KnownBlocks, block_keys, choose
from tiercel.ipc.streams import ANSWER_TOKENS

NUM_ENGINES, BLOCK, NUM_BLOCKS = 4, 64, 3000
STEP_S, ROW_S, TOKEN_S = 0.008, 0.00015, 0.00004
STEP_TOKENS, ROWS = 4096, 64
TURNS, SHARED, SECONDS = 4, 600, 120.0
ANSWERS = (30, 100, 200, 400, 800)
RATES = (4, 12, 20, 26)  # requests per second, of all engines


@dataclass(eq=False)
class Ask:
    """One request: the tokens of its conversation, and how far it is."""

    tokens: list[int]
    turn: int
    arrived_s: float = 0.0
    keys: list[int] = field(default_factory=list)
    length: int = 0
    left: int = 0
    generated: int = 0
    has_entered: bool = False


@dataclass(eq=False)
class Engine:
    """One engine and its clock."""

    now_s: float = 0.0
    waiting: list[Ask] = field(default_factory=list)
    running: list[Ask] = field(default_factory=list)
    cache: KnownBlocks = field(default_factory=lambda: KnownBlocks(NUM_BLOCKS))
    known: KnownBlocks = field(default_factory=lambda: KnownBlocks(NUM_BLOCKS))
    last_turn: int = 0
    num_computed: int = 0

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> tuple[list[Ask], list[Ask]]:
        """Run a step; returns the requests with a first token, and those that ended."""
        budget, first = STEP_TOKENS - len(self.running), []
        for ask in list(self.waiting):
            if budget <= 0 or len(self.running) + len(first) >= ROWS:
                break
            if not ask.has_entered:
                ask.has_entered = True
                ask.left = len(ask.tokens) - self.cache.count(ask.keys) * BLOCK
                self.num_computed += ask.left
                self.cache.note(ask.keys)
            taken = min(budget, ask.left)
            ask.left -= taken
            budget -= taken
            if ask.left == 0:
                self.waiting.remove(ask)
                first.append(ask)
        num_prompt = STEP_TOKENS - len(self.running) - budget
        self.now_s += STEP_S + ROW_S * len(self.running) + TOKEN_S * num_prompt
        for ask in self.running:
            ask.generated += 1
        ended = [ask for ask in self.running if ask.generated >= ask.length]
        self.running = [ask for ask in self.running if ask.generated < ask.length] + first
        for ask in first:
            ask.generated = 1
        return first, ended


def candidate(number: int, engine: Engine, keys: Sequence[int]) -> Candidate:
    """What the router knows of an engine."""
    answers = [max(1, ANSWER_TOKENS - ask.generated) for ask in engine.waiting + engine.running]
    return Candidate(
        number,
        sum(ask.left for ask in engine.waiting) + sum(answers),
        engine.known.count(keys) * BLOCK,
        len(answers),
        engine.last_turn,
    )


def queue_then_prefix(engines: Sequence[Engine], candidates: Sequence[Candidate]) -> Candidate:
    """Least prompt tokens that wait, then the longest prefix."""
    return min(
        candidates,
        key=lambda c: (
            sum(ask.left for ask in engines[c.number].waiting),
            -c.known_tokens,
            c.last_turn,
        ),
    )


POLICIES: dict[str, Callable[[Sequence[Engine], Sequence[Candidate]], Candidate]] = {
    "least to compute (used)": lambda _, candidates: choose(candidates),
    "least queue, then prefix": queue_then_prefix,
    "fewest requests": lambda _, candidates: min(
        candidates, key=lambda c: (c.num_requests, -c.known_tokens, c.last_turn)
    ),
    "in turn": lambda _, candidates: min(candidates, key=lambda c: c.last_turn),
    "longest prefix": lambda _, candidates: min(
        candidates, key=lambda c: (-c.known_tokens, c.num_requests)
    ),
}


class Simulation:
    """One policy at one rate."""

    def __init__(self, policy: str, rate: float) -> None:
        self.choose = POLICIES[policy]
        self.draw = random.Random(1)
        self.engines = [Engine() for _ in range(NUM_ENGINES)]
        self.arrivals: list[tuple[float, int, Ask]] = []
        self.num_asks = self.num_tokens = 0
        self.first_ms: list[float] = []
        self.answer_s: list[float] = []
        system, now = self.tokens(SHARED), 0.0
        while now < SECONDS:
            now += self.draw.expovariate(rate / TURNS)
            self.arrive(now, Ask(system + self.tokens(self.draw.randint(50, 1500)), 1))

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(50_000) for _ in range(count)]

    def arrive(self, now_s: float, ask: Ask) -> None:
        self.num_asks += 1
        heapq.heappush(self.arrivals, (now_s, self.num_asks, ask))

    def run(self) -> None:
        while self.arrivals or any(engine.is_busy for engine in self.engines):
            busy = [engine for engine in self.engines if engine.is_busy]
            earliest = min(busy, key=lambda engine: engine.now_s) if busy else None
            if earliest and (not self.arrivals or earliest.now_s < self.arrivals[0][0]):
                self.step(earliest)
            else:
                self.submit(*heapq.heappop(self.arrivals))

    def step(self, engine: Engine) -> None:
        first, ended = engine.step()
        self.first_ms += [1000 * (engine.now_s - ask.arrived_s) for ask in first]
        for ask in ended:
            self.answer_s.append(engine.now_s - ask.arrived_s)
            if ask.turn < TURNS and engine.now_s < SECONDS:
                more = self.tokens(ask.length + self.draw.randint(20, 100))
                pause_s = self.draw.expovariate(1 / 5)
                self.arrive(engine.now_s + pause_s, Ask(ask.tokens + more, ask.turn + 1))

    def submit(self, now_s: float, turn: int, ask: Ask) -> None:
        ask.arrived_s, ask.keys = now_s, block_keys(ask.tokens, BLOCK)
        ask.length, ask.left = self.draw.choice(ANSWERS), len(ask.tokens)
        self.num_tokens += len(ask.tokens)
        known = [candidate(n, engine, ask.keys) for n, engine in enumerate(self.engines)]
        engine = self.engines[self.choose(self.engines, known).number]
        engine.last_turn = turn
        engine.known.note(ask.keys)
        if not engine.is_busy:
            engine.now_s = max(engine.now_s, now_s)
        engine.waiting.append(ask)

    def row(self) -> str:
        """Percentiles, and the share of prompt tokens that were computed."""
        first, answer = sorted(self.first_ms), sorted(self.answer_s)
        share = sum(engine.num_computed for engine in self.engines) / self.num_tokens
        return (
            f"{first[len(first) // 2]:.0f} | {first[len(first) * 19 // 20]:.0f} | "
            f"{answer[len(answer) // 2]:.1f} | {answer[len(answer) * 19 // 20]:.1f} | {share:.2f}"
        )


def main() -> None:
    print("| requests/s | policy | first token, ms | 95% | answer, s | 95% | computed |")
    print("|---|---|---|---|---|---|---|")
    for rate in RATES:
        for policy in POLICIES:
            simulation = Simulation(policy, rate)
            simulation.run()
            print(f"| {rate} | {policy} | {simulation.row()} |", flush=True)


if __name__ == "__main__":
    main()
