"""One completion under way: the engine's updates to deltas, and the end of its thinking budget."""

from __future__ import annotations

from dataclasses import replace

from tiercel.request.inputs import InputProcessor
from tiercel.request.request import Request, TokenUpdate
from tiercel.serve.generation.output_events import ToolCallArguments, ToolCallStart
from tiercel.serve.generation.output_parser import OutputParser
from tiercel.serve.generation.output_queue import CompletionDelta
from tiercel.serve.generation.prompt_progress import PromptProgressTracker
from tiercel.serve.generation.thinking_budget import ThinkingBudget
from tiercel.serve.generation.tools.parsers.reader import BrokenCallError, parse_json


class Completion:
    """One of the `n` completions of a prompt, under way.

    Attributes:
        index: index among the completions of the HTTP request: prompt * n + stream.
        request: the first request to the engine; prompt and cached tokens are counted by it.
        running: the request that the engine runs now: `request`, or the one that continues after
            thinking was closed.
        output: parser of the output so far.
        needs_rest: whether the thinking was closed and the rest of the output must be requested.
        first_token_s, last_token_s: `perf_counter` of these tokens.
        finish_reason: None until the completion is done.
        progress_tracker: tracker of the prompt's progress, if the client wants it.
    """

    def __init__(
        self, index: int, request: Request, output: OutputParser, budget: ThinkingBudget | None
    ) -> None:
        self.index = index
        self.request = request
        self.running = request
        self.output = output
        self.needs_rest = False
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.finish_reason: str | None = None
        self.progress_tracker: PromptProgressTracker | None = None
        self._budget = budget
        self._arguments: list[str] | None = None  # of the last tool call so far

    def take(self, update: TokenUpdate) -> CompletionDelta:
        """Turn one update of the engine into a delta; the last one has the finish reason."""
        delta = CompletionDelta(self.index)
        reason = update.finish_reason
        last = len(update.new_token_ids) - 1
        for position, token_id in enumerate(update.new_token_ids):
            is_stopped = reason == "stop" and position == last
            delta.events += self.output.push(token_id, is_stopped=is_stopped)
            delta.token_ids.append(token_id)
            delta.logprobs += update.logprobs[position : position + 1]
            self.needs_rest = self._thinks_too_long() and (reason is None or position < last)
            if self.output.matched is not None or self.needs_rest:
                break
        delta.num_tokens = self.output.num_tokens
        if self.needs_rest and self._budget is not None:
            delta.events += self.output.close_thinking(self._budget.closing)
        elif reason is not None or self.output.matched is not None:
            self._finish(delta, update)
        for event in delta.events:
            if isinstance(event, ToolCallStart):
                self._arguments = []
            elif isinstance(event, ToolCallArguments) and self._arguments is not None:
                self._arguments.append(event.text)
        if delta.finish_reason == "stop" and self._has_whole_calls():
            delta.finish_reason = "tool_calls"
        self.finish_reason = delta.finish_reason
        return delta

    def make_rest(self, inputs: InputProcessor) -> Request:
        """The request that continues after the closed thinking."""
        assert self._budget is not None, "only a budget closes thinking"
        first, done = self.request, self.output.num_tokens
        ids = [*first.prompt_token_ids, *first.output_token_ids[:done], *self._budget.closing_ids]
        params = replace(
            first.params,
            max_tokens=self._num_left,
            min_tokens=min(self._num_left, max(0, first.params.min_tokens - done)),
            prompt_logprobs=None,
        )
        rest = inputs.request(ids, params, first.stream, grammar=self._budget.grammar)
        rest.seed, rest.priority = first.seed, first.priority
        rest.request_id, rest.client = first.request_id, first.client
        self.running, self.needs_rest = rest, False
        return rest

    @property
    def _num_left(self) -> int:
        """Tokens that the budget of the completion leaves after the closed thinking."""
        closing = 0 if self._budget is None else len(self._budget.closing_ids)
        return self.request.max_tokens - self.output.num_tokens - closing

    def _has_whole_calls(self) -> bool:
        """Whether there are tool calls to execute: a stop string may have cut the last one."""
        if self._arguments is None:
            return False
        try:
            return isinstance(parse_json("".join(self._arguments)), dict)
        except BrokenCallError:
            return False

    def _thinks_too_long(self) -> bool:
        budget, output = self._budget, self.output
        if budget is None or not output.is_thinking:
            return False
        if output.num_reasoning_tokens < budget.max_tokens:
            return False
        return self._num_left > 0

    def _finish(self, delta: CompletionDelta, update: TokenUpdate) -> None:
        delta.events += self.output.finish()
        if self.output.matched is not None:
            delta.finish_reason, delta.stop_reason = "stop", self.output.matched
            return
        # The model's own end token is not reported as a stop reason.
        is_requested = update.stop_reason in self.request.params.stop_token_ids
        delta.finish_reason = update.finish_reason
        delta.stop_reason = update.stop_reason if is_requested else None
