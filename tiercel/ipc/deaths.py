"""Why engine processes ended, and whether the next one would end alike.

Another process is of no use in three cases: a file of the model is no longer the one that was
opened first; an error that explains a fault of the model or the options came before any engine was
ready; two processes in a row ended before they were ready, for the same reason.
"""

from __future__ import annotations

from tiercel.errors import EngineDeadError, InternalError, NoHostError, TiercelError
from tiercel.ipc.messages import ErrorInfo
from tiercel.ipc.siblings import OpenedFiles
from tiercel.loader.stamps import FileStamp, find_change


class Deaths:
    """Record of one model's engine processes; one lives at a time."""

    def __init__(self, files: OpenedFiles) -> None:
        self._files = files
        self._was_ready = False  # any process
        self._is_ready = False  # the process that lives, or the last one
        self._cause: ErrorInfo | None = None  # of the last death
        self._is_explained = False  # `_cause` is of the last death, not of the one before
        self._early: ErrorInfo | None = None  # the same, if that process was not ready yet
        self._has_repeated = False
        self._change: str | None = None

    def note_start(self) -> None:
        """The next process is started."""
        self._is_ready = False

    def note_files(self, files: tuple[FileStamp, ...]) -> bool:
        """A process has opened the model.

        Returns:
            Whether it opened the files that the first process opened.
        """
        return self._files.note(files)

    def note_ready(self) -> None:
        """The process that lives is ready."""
        self._was_ready = self._is_ready = True

    def note_loss(self) -> None:
        """The process has ended; why is not known yet."""
        self._change = find_change(self._files.stamps)
        self._is_explained = False

    def note_cause(self, cause: ErrorInfo) -> None:
        """Note why the process has ended."""
        self._cause, self._is_explained = cause, True
        # Hosts come back: that none was there twice says nothing about the next time.
        is_early = not self._is_ready and cause.kind != NoHostError.__name__
        early = cause if is_early else None
        self._has_repeated = early is not None and early == self._early
        self._early = early

    @property
    def is_hopeless(self) -> bool:
        """Whether the next process would end as the last one did."""
        is_known = self._change is not None or self.load_error() is not None
        return is_known or self._has_repeated

    @property
    def failure(self) -> str | None:
        """Why the last process ended, for the log; None if none did."""
        if self._cause is None:
            return None
        cause = self._cause.message
        return cause if self._change is None else f"{cause.rstrip('.')}, and {self._change}"

    def load_error(self) -> TiercelError | None:
        """The error of model or options because of which no engine was ever ready."""
        if self._cause is None or self._was_ready:
            return None
        error = self._cause.error()
        return None if isinstance(error, InternalError | EngineDeadError) else error

    def final_error(self) -> EngineDeadError:
        """The error that clients get once there will be no engine any more."""
        cause, why = self._cause, self._change or "the log of the server says why."
        # The message of any other error may hold what is not for clients.
        is_ours = cause is not None and cause.kind == EngineDeadError.__name__
        if cause is not None and is_ours and self._is_explained and self._change is None:
            why = f"{cause.message}."
        error = EngineDeadError(f"the engine is dead: {why}")
        error.code, error.retry_after_s, error.is_final = "engine_dead", None, True
        return error
