"""Tokens per second between two looks at the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.ipc.messages import EngineStats


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of some time in which there were steps."""

    prompt: float
    generation: float


class Throughput:
    """Counts from the moment at which it is made, which an engine's counters begin at zero."""

    def __init__(self, now_s: float) -> None:
        self._before = EngineStats()
        self._since_s = now_s

    def forget_engine(self) -> None:
        """A new engine process begins at zero."""
        self._before = EngineStats()

    def take(self, stats: EngineStats, now_s: float, least_s: float) -> Rates | None:
        """The rates since the last time that this was asked and enough time had passed.

        Args:
            stats: of the engine now.
            now_s: on the clock of the start.
            least_s: time that must have passed.

        Returns:
            None if too little time has passed, or there was no step in it.
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
