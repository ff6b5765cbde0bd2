"""Requests that were in the last step of an engine that died.

A client repeats a request that ended with 503, so a request that kills engines would kill one after
the other. Clients send neither a number nor the same id with a repeated request: its content names
it. A request with the content of one that was answered meanwhile is no suspect any more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from tiercel.request.request import Request


def content_digest(request: Request) -> bytes:
    """Digest of all inputs that decide the answer, except the seed of a request without one."""
    content = (
        request.prompt_token_ids,
        request.params,
        request.stream,
        sorted(request.stop_ids),
        request.max_tokens,
        request.grammar,
        request.pooling,
        request.score,
    )
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()


class Suspects:
    """Contents of the requests that were in last steps."""

    def __init__(self, window_s: float) -> None:
        """Set up.

        Args:
            window_s: how long a death is remembered.
        """
        self._window_s = window_s
        self._died_s: dict[bytes, float] = {}

    def note_death(self, requests: Iterable[Request], now_s: float) -> list[Request]:
        """An engine has died.

        Args:
            requests: of its last step.
            now_s: a monotonic time.

        Returns:
            Those that were in the last step of another engine too.
        """
        recent = {d: then for d, then in self._died_s.items() if now_s - then <= self._window_s}
        by_digest = [(content_digest(request), request) for request in requests]
        self._died_s = recent | dict.fromkeys((d for d, _ in by_digest), now_s)
        return [request for d, request in by_digest if d in recent]

    def note_answer(self, request: Request) -> None:
        """A request was answered, so its content kills no engine."""
        if self._died_s:
            self._died_s.pop(content_digest(request), None)
