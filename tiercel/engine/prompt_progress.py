"""Progress of the computation of prompts.

A long prompt is computed in several steps. The engine reports the tokens computed so far after a
step, unless the step has finished the prompt: its first token is the report of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tiercel.request.request import Request, Status

REPORT_SECONDS: Final = 0.25  # between two reports of one request


def num_computed(request: Request) -> int:
    """Tokens of a request's prompt whose steps are done, those from the prefix cache included."""
    num_tokens = len(request.prompt_token_ids)
    if request.status is Status.FINISHED or request.output_token_ids:
        return num_tokens
    return min(request.num_committed, num_tokens)


def report_prompts(
    requests: Iterable[Request], progress: Callable[[int, int], None] | None
) -> None:
    """Call `progress` with the tokens computed and all tokens of a call's prompts.

    A prompt with several answers counts once. Nothing is called once all prompts are computed.
    """
    if progress is None:
        return
    firsts = [request for request in requests if request.stream == 0]
    done = sum(map(num_computed, firsts))
    total = sum(len(request.prompt_token_ids) for request in firsts)
    if done < total:
        progress(done, total)


class ProgressReports:
    """Decides after which steps the progress of a request is reported."""

    def __init__(self) -> None:
        self._next_s: dict[Request, float] = {}

    def take(self, requests: Iterable[Request], now_s: float) -> tuple[Request, ...]:
        """The requests to report now.

        Args:
            requests: all that have not ended.
            now_s: a monotonic time, of the step's end.
        """
        due: list[Request] = []
        next_s: dict[Request, float] = {}
        for request in requests:
            if not _is_computing(request):
                continue
            at_s = self._next_s.get(request, now_s)
            if now_s >= at_s:
                due.append(request)
                at_s = now_s + REPORT_SECONDS
            next_s[request] = at_s
        self._next_s = next_s
        return tuple(due)


def _is_computing(request: Request) -> bool:
    """Whether a step has computed part of the prompt, and tokens of it are left."""
    is_running = request.status is Status.RUNNING
    return is_running and request.num_cached < num_computed(request) < len(request.prompt_token_ids)
