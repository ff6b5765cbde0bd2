"""Deltas of completions, and the bounded queue in which they wait for a slow client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tiercel.request.request import TokenLogprobs
from tiercel.serve.generation.output_events import Event
from tiercel.serve.generation.prompt_progress import PromptProgress

MAX_QUEUED_DELTAS: Final = 1024
MAX_QUEUED_CHARS: Final = 1 << 20


@dataclass(slots=True)
class CompletionDelta:
    """What became certain of one completion since its previous delta.

    Attributes:
        index: index of the completion: prompt * n + stream.
        events: reasoning, content and tool calls, in order.
        token_ids: new tokens.
        logprobs: log-probabilities, one per new token if requested, else empty.
        num_tokens: tokens of the completion so far.
        finish_reason: ``stop``, ``length`` or ``tool_calls``; in the last delta only.
        stop_reason: the stop string or id that ended the completion, if one did; in the last delta.
        progress: progress of the prompt, if requested; it comes before the first token.
    """

    index: int
    events: list[Event] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    progress: PromptProgress | None = None

    @property
    def is_progress_alone(self) -> bool:
        """Whether it holds nothing but the progress of the prompt."""
        has_output = bool(self.events or self.token_ids) or self.finish_reason is not None
        return self.progress is not None and not has_output

    def add(self, later: CompletionDelta) -> None:
        """Merge the delta that follows."""
        self.events += later.events
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.num_tokens = later.num_tokens
        self.progress = later.progress or self.progress
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class OutputQueue:
    """Deltas that wait for the client.

    Args:
        is_stream: whether they are read as they come; else all deltas of a completion become one,
            which is whole at the end.
    """

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._deltas: list[CompletionDelta] = []
        self._latest: dict[int, CompletionDelta] = {}
        self._num_chars = 0

    def __bool__(self) -> bool:
        return bool(self._deltas)

    def put(self, delta: CompletionDelta) -> None:
        """Add a delta; beyond the bounds it is merged into the previous one of its completion."""
        earlier = self._latest.get(delta.index)
        is_full = len(self._deltas) >= MAX_QUEUED_DELTAS or self._num_chars >= MAX_QUEUED_CHARS
        if earlier is not None and (is_full or not self._is_stream):
            earlier.add(delta)
        else:
            self._deltas.append(delta)
            self._latest[delta.index] = delta
        self._num_chars += sum(event.num_chars for event in delta.events)

    def take(self) -> list[CompletionDelta]:
        """All deltas that wait, in order."""
        deltas, self._deltas = self._deltas, []
        self._latest.clear()
        self._num_chars = 0
        return deltas
