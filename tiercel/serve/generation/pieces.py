"""What comes of an answer, piece by piece, and where pieces wait for a slow reader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tiercel.request.request import TokenLogprobs
from tiercel.serve.generation.events import Event

MAX_WAITING_PIECES: Final = 1024
MAX_WAITING_CHARS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far the computation of one answer's prompt has come.

    Attributes:
        total: tokens of the prompt.
        cached: of these, found in the prefix cache.
        processed: of these, computed so far or found in the prefix cache.
        seconds: since its first step began.
    """

    total: int
    cached: int
    processed: int
    seconds: float


@dataclass(slots=True)
class Piece:
    """What became certain of one answer since the piece before.

    Attributes:
        index: of the answer: prompt * n + stream.
        events: reasoning, content and calls, in order.
        token_ids: new tokens.
        logprobs: one per new token if they were asked for, else empty.
        num_tokens: tokens of the answer up to here.
        finish_reason: ``stop``, ``length`` or ``tool_calls``; in the last piece only.
        stop_reason: with it: the stop string or id, if one decided.
        progress: of the prompt, if the client wants it; comes before the first token.
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
        has_answer = bool(self.events or self.token_ids) or self.finish_reason is not None
        return self.progress is not None and not has_answer

    def add(self, later: Piece) -> None:
        """Join the piece that follows."""
        self.events += later.events
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.num_tokens = later.num_tokens
        self.progress = later.progress or self.progress
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole request: a prompt counts once, its answers all."""

    prompt: int
    completion: int
    cached: int
    reasoning: int


class PieceLine:
    """Pieces that wait for their reader.

    Args:
        is_stream: whether they are read as they come; else each answer is one piece, whole at the
            end.
    """

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._pieces: list[Piece] = []
        self._latest: dict[int, Piece] = {}
        self._num_chars = 0

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def put(self, piece: Piece) -> None:
        """Add a piece; beyond the bounds it is joined to the one before it of its answer."""
        earlier = self._latest.get(piece.index)
        is_full = len(self._pieces) >= MAX_WAITING_PIECES or self._num_chars >= MAX_WAITING_CHARS
        if earlier is not None and (is_full or not self._is_stream):
            earlier.add(piece)
        else:
            self._pieces.append(piece)
            self._latest[piece.index] = piece
        self._num_chars += sum(event.num_chars for event in piece.events)

    def take(self) -> list[Piece]:
        """All that wait, in order."""
        pieces, self._pieces = self._pieces, []
        self._latest.clear()
        self._num_chars = 0
        return pieces
