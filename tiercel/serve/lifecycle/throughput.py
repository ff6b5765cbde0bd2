"""Throughput: tokens per second between two readings of the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.ipc.messages import EngineStats


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second in an interval with steps."""

    prompt: float
    generation: float


class Throughput:
    """Reader of the engine's counters, which are zero when it is made."""

    def __init__(self, now_s: float) -> None:
        self._before = EngineStats()
        self._since_s = now_s

    def forget_engine(self) -> None:
        """Start from zero, as a new engine process does."""
        self._before = EngineStats()

    def take(self, stats: EngineStats, now_s: float, least_s: float) -> Rates | None:
        """The rates since the previous call that was not too early.

        Args:
            stats: counters of the engine now.
            now_s: time now, on the clock of `__init__`.
            least_s: minimum length of the interval.

        Returns:
            None if the interval is too short, or has no step.
        """
        seconds, before = now_s - self._since_s, self._before
        if seconds < least_s:
            return None
        self._before, self._since_s = stats, now_s
        if stats.num_steps <= before.num_steps:
            return None
        return Rates(
            prompt=(stats.num_prompt_tokens - before.num_prompt_tokens) / seconds,
            generation=(stats.num_generation_tokens - before.num_generation_tokens) / seconds,
        )
