"""What the engines of one server have in common; an engine alone has this for itself.

Each engine lives and dies by itself. But a request that ends one engine may be sent again and end
another, files that changed must not be opened by the engine that starts next, and a client is told
that nothing answers any more only when the last engine is given up.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tiercel.ipc.suspects import Suspects
from tiercel.loader.stamps import FileStamp


class OpenedFiles:
    """The model's files as the first process opened them."""

    def __init__(self, *, are_here: bool = True) -> None:
        """Set up.

        Args:
            are_here: whether processes open the files of this machine, else each the copies of its
                host.
        """
        self._are_here = are_here
        self._first: tuple[FileStamp, ...] = ()

    @property
    def stamps(self) -> tuple[FileStamp, ...]:
        """Stamps to compare with the files of this machine."""
        return self._first if self._are_here else ()

    def note(self, stamps: tuple[FileStamp, ...]) -> bool:
        """A process has opened files; whether they are those of the first process, or copies."""
        self._first = self._first or stamps
        if self._are_here:
            return stamps == self._first
        return _sizes(stamps) == _sizes(self._first)


def _sizes(stamps: tuple[FileStamp, ...]) -> list[tuple[bytes, int]]:
    return [(os.path.basename(stamp.path), stamp.num_bytes) for stamp in stamps]


class Siblings:
    """All engines of one server.

    Attributes:
        suspects: contents of the requests in the last step of an engine that died.
        files: files of the model.
        given_up: one for each engine: whether it will not be started again.
    """

    def __init__(self, window_s: float, *, are_here: bool = True) -> None:
        """Set up.

        Args:
            window_s: how long a death is remembered.
            are_here: whether the engines are on this machine.
        """
        self.suspects = Suspects(window_s)
        self.files = OpenedFiles(are_here=are_here)
        self.given_up: list[Callable[[], bool]] = []

    @property
    def are_given_up(self) -> bool:
        """Whether no engine is left, nor will be."""
        return all(is_given_up() for is_given_up in self.given_up)
