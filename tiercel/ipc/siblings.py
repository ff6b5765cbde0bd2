"""What the engines of one server have in common; an engine alone has this for itself.

Each engine lives and dies by itself. But a request that ends one engine may be sent again and end
another, files that changed must not be opened by the engine that starts next, and a client is told
that nothing answers any more only when the last engine is given up.
"""

from __future__ import annotations

from collections.abc import Callable

from tiercel.ipc.suspects import Suspects
from tiercel.loader.stamps import FileStamp


class OpenedFiles:
    """The model's files as the first process opened them."""

    def __init__(self) -> None:
        self.stamps: tuple[FileStamp, ...] = ()

    def note(self, stamps: tuple[FileStamp, ...]) -> bool:
        """A process has opened files; whether they are those of the first process."""
        self.stamps = self.stamps or stamps
        return stamps == self.stamps


class Siblings:
    """All engines of one server.

    Attributes:
        suspects: contents of the requests in the last step of an engine that died.
        files: files of the model.
        given_up: one for each engine: whether it will not be started again.
    """

    def __init__(self, window_s: float) -> None:
        """Set up.

        Args:
            window_s: how long a death is remembered.
        """
        self.suspects = Suspects(window_s)
        self.files = OpenedFiles()
        self.given_up: list[Callable[[], bool]] = []

    @property
    def are_given_up(self) -> bool:
        """Whether no engine is left, nor will be."""
        return all(is_given_up() for is_given_up in self.given_up)
