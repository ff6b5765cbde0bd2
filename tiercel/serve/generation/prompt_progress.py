"""The progress of one prompt as a stream reports it.

The reported number only rises, also after a preemption. It reaches the whole prompt before the
first token of the completion.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.ipc.streams import TokenStream


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far the prefill of one prompt has come.

    Attributes:
        total: tokens of the prompt.
        cached: tokens found in the prefix cache.
        processed: tokens computed so far or found in the prefix cache.
        seconds: time since the first step of the prompt began.
    """

    total: int
    cached: int
    processed: int
    seconds: float


class PromptProgressTracker:
    """Turns the engine's reports about a prompt into the reports of the stream."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._processed = 0

    def advance(self, num_computed: int, now_s: float) -> PromptProgress | None:
        """Note the tokens computed so far; None if as many were reported before."""
        if num_computed <= self._processed:
            return None
        self._processed = num_computed
        request, entered_s = self._stream.request, self._stream.entered_s
        return PromptProgress(
            total=len(request.prompt_token_ids),
            cached=request.num_cached,
            processed=num_computed,
            seconds=0.0 if entered_s is None else now_s - entered_s,
        )

    def finish(self, now_s: float) -> PromptProgress | None:
        """Note that the completion has begun; None if the whole prompt was reported before."""
        return self.advance(len(self._stream.request.prompt_token_ids), now_s)
