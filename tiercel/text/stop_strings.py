"""Stop strings on streamed text: where to cut, and how much text may already be shown.

The rule: of all matches in the whole text the one that begins first wins; of matches that begin
together the first in the list wins. The answer is the same however the text was cut into pieces.
Two things follow. Text that may still become a match is held back, at most one character less than
the longest stop string; and a match is reported only when no earlier or higher-ranked match can
still complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiercel.errors import ArgumentError


class StopStrings:
    """Incremental matcher for one answer.

    Args:
        stop: strings to stop at, in order of rank; may be empty.
        include_stop_str: whether the emitted text ends with the matched string or before it.

    Raises:
        ArgumentError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str: bool = False) -> None:
        if "" in stop:
            raise ArgumentError("stop holds an empty string.", hint="Leave it out.")
        self._stop = tuple(stop)
        self._include_stop_str = include_stop_str
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None so far."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text that may be shown now and the stop string that matched, if any.

        After a match nothing more is emitted and the match is returned again.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stop:
            return text, None
        text = self._held + text
        found = self._first_match(text)
        pending = self._first_pending(text)
        if found is not None and (pending is None or found <= pending):
            return self._end(text, found)
        shown = len(text) if pending is None else pending[0]
        self._held = text[shown:]
        return text[:shown], None

    def finish(self) -> tuple[str, str | None]:
        """End the text: release held text, or the match that waited for a better one."""
        if self._matched is not None:
            return "", self._matched
        text, self._held = self._held, ""
        found = self._first_match(text)
        return (text, None) if found is None else self._end(text, found)

    def _end(self, text: str, found: tuple[int, int]) -> tuple[str, str | None]:
        start, rank = found
        self._matched = self._stop[rank]
        self._held = ""
        return text[: start + len(self._matched) * self._include_stop_str], self._matched

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """(start, rank) of the match that wins in `text`."""
        starts = ((text.find(stop), rank) for rank, stop in enumerate(self._stop))
        return min((found for found in starts if found[0] >= 0), default=None)

    def _first_pending(self, text: str) -> tuple[int, int] | None:
        """(start, rank) of the first suffix of `text` that is a proper prefix of a stop string."""
        best: tuple[int, int] | None = None
        for rank, stop in enumerate(self._stop):
            for length in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:length]):
                    candidate = (len(text) - length, rank)
                    best = candidate if best is None else min(best, candidate)
                    break
        return best
