"""What a process says of itself to the one that started it: its log, its failure, its end.

Free of PyTorch.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from typing import Final, NoReturn

from tiercel.errors import InstallationError, TiercelError
from tiercel.ipc.messages import ErrorInfo, Failed, Log, plain_text

_LOG_CHARS: Final = 4096
_DETAIL_CHARS: Final = 1 << 16


class LinkHandler(logging.Handler):
    """Sends log records to the parent, whose log has one form."""

    def __init__(self, send: Callable[[Log], None]) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter())  # the parent adds level and name
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        text = plain_text(self.format(record)[:_LOG_CHARS])
        self._send(Log(record.levelno, record.name, text))


def leave() -> NoReturn:
    """End the process immediately, whatever its threads are doing."""
    os._exit(0)


def describe_failure(error: Exception, suspects: tuple[str, ...] = ()) -> Failed:
    """Describe the error that ends a process, for the other side and its log.

    Args:
        error: whatever it was.
        suspects: ids of the requests of the step that failed.
    """
    if isinstance(error, ModuleNotFoundError):
        return Failed(ErrorInfo.of(InstallationError.of(error)), _detail(error), suspects)
    if isinstance(error, TiercelError):
        return Failed(ErrorInfo.of(error), suspects=suspects)
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    info = ErrorInfo("InternalError", plain_text(line[:_LOG_CHARS]))
    return Failed(info, _detail(error), suspects)


def _detail(error: Exception) -> str:
    return plain_text("".join(traceback.format_exception(error))[-_DETAIL_CHARS:])
