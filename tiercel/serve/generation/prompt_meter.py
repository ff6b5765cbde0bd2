"""The progress of one prompt as a stream reports it.

The reported number only rises, also after a preemption, and ends with the whole prompt before the
first token of the answer.
"""

from __future__ import annotations

from tiercel.ipc.streams import TokenStream
from tiercel.serve.generation.pieces import PromptProgress


class PromptMeter:
    """Turns the engine's reports about a prompt into what the client gets."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._processed = 0

    def advance(self, num_computed: int, now_s: float) -> PromptProgress | None:
        """Note the tokens computed so far; None if more were reported before."""
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
        """Note that the answer has begun; None if the whole prompt was reported before."""
        return self.advance(len(self._stream.request.prompt_token_ids), now_s)
