"""Fields that chat and raw completions share: usage, finish reason, fingerprint, progress."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from msgspec import UNSET, UnsetType

from tiercel.serve.api.openai.completion_types import (
    CompletionDetails,
    FinishReason,
    PromptDetails,
    PromptProgressObject,
    UsageObject,
)
from tiercel.serve.api.sampling_fields import StreamOptions
from tiercel.serve.generation.generation import Generation
from tiercel.serve.generation.output_queue import CompletionDelta
from tiercel.serve.generation.prompt_progress import PromptProgress
from tiercel.serve.generation.usage import Usage
from tiercel.serve.served_model import ServedModel
from tiercel.version import __version__


def system_fingerprint(model: ServedModel) -> str:
    """Identifies what equal seeds need for equal tokens: build, model file, device and dtype."""
    info = model.info
    parts = (__version__, info.model_name, info.architecture, info.device, info.dtype)
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def usage_object(usage: Usage) -> UsageObject:
    """The `usage` of a whole response."""
    return UsageObject(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        total_tokens=usage.prompt + usage.completion,
        prompt_tokens_details=PromptDetails(usage.cached),
        completion_tokens_details=CompletionDetails(usage.reasoning),
    )


def progress_object(progress: PromptProgress) -> PromptProgressObject:
    """The `prompt_progress` of a chunk."""
    return PromptProgressObject(
        total=progress.total,
        cache=progress.cached,
        processed=progress.processed,
        time_ms=round(1000 * progress.seconds),
    )


class StreamUsage:
    """The usage that a stream reports, chunk by chunk."""

    def __init__(self, options: StreamOptions | None) -> None:
        self._has_total = options is not None and bool(options.include_usage)
        self._is_continuous = options is not None and bool(options.continuous_usage_stats)
        self._num_tokens: dict[int, int] = {}

    def count(self, delta: CompletionDelta) -> None:
        """Note the tokens of a delta that is about to be sent."""
        self._num_tokens[delta.index] = delta.num_tokens

    def so_far(self, generation: Generation) -> UsageObject | UnsetType | None:
        """The `usage` of a chunk with choices."""
        if self._is_continuous:
            # The engine may be ahead of the client: only tokens that were sent count.
            usage = replace(generation.usage(), completion=sum(self._num_tokens.values()))
            return usage_object(usage)
        return None if self._has_total else UNSET

    def total(self, generation: Generation) -> UsageObject | None:
        """The `usage` of the chunk after all choices; None if it was not requested."""
        return usage_object(generation.usage()) if self._has_total else None


_FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
}


def finish_reason_of(delta: CompletionDelta) -> FinishReason:
    """The finish reason of a whole completion."""
    return _FINISH_REASONS[delta.finish_reason or ""]
