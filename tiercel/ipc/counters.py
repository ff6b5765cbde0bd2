"""Counters of one engine, from what its loop reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiercel.engine.engine import Engine
from tiercel.engine.loop import StepResult, is_first
from tiercel.ipc.messages import EngineStats


@dataclass(slots=True)
class Counters:
    """Totals of one engine; the fields are those of `EngineStats`."""

    engine: Engine
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0
    num_nonfinite: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    iteration_tokens: list[int] = field(default_factory=list)

    def add(self, result: StepResult) -> None:
        """Count a step."""
        self.num_steps += 1
        self.step_seconds += result.seconds
        self.num_preemptions += result.num_preempted
        for request in result.entered:
            if self.engine.config.prefix_cache and not request.reads_prompt:
                self.prefix_queries += len(request.prompt_token_ids)
                self.prefix_hits += request.num_cached
        num_prompt = sum(
            update.request.num_input_tokens for update in result.updates if is_first(update)
        )
        num_generated = sum(len(update.new_token_ids) for update in result.updates)
        self.num_prompt_tokens += num_prompt
        self.num_generation_tokens += num_generated
        self.iteration_tokens.append(num_prompt + num_generated)
        self.num_nonfinite += sum(
            update.request.stop_reason == "nonfinite_logits" for update in result.updates
        )

    def take(self, num_running: int, num_waiting: int) -> EngineStats:
        """The counters as a message; `iteration_tokens` begins anew."""
        drafts = self.engine.draft_counts
        iteration_tokens, self.iteration_tokens = tuple(self.iteration_tokens), []
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            kv_cache_usage=self.engine.scheduler.cache_usage,
            num_preemptions=self.num_preemptions,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            num_steps=self.num_steps,
            step_seconds=self.step_seconds,
            num_nonfinite=self.num_nonfinite,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            accepted_per_pos=tuple(drafts.accepted_per_pos),
            iteration_tokens=iteration_tokens,
        )
