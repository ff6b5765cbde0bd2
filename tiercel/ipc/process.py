"""The engine process: started by `spawn.py`, it loads a model and answers on its socket.

It must not outlive its parent. The kernel kills it with the parent (where there is such a signal),
and a thread that reads the socket from the first moment on ends it at the end of file. Only then is
PyTorch imported, which takes seconds, and only for a file that was found sound. Signals of the
terminal and of service managers are for the parent, which decides when the engine ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING, Final, NoReturn

from tiercel import env
from tiercel.config import LoadOptions
from tiercel.errors import InstallationError, TiercelError
from tiercel.faults import Faults
from tiercel.ipc.messages import (
    MAX_TO_ENGINE_BYTES,
    ErrorInfo,
    Failed,
    FrameReader,
    FromEngine,
    Log,
    Opened,
    Progress,
    Start,
    ToEngine,
    decode_to_engine,
    encode,
    plain_text,
)
from tiercel.ipc.start_progress import Phase, StartProgress
from tiercel.loader.stamps import read_stamp
from tiercel.models.source import find_source

if TYPE_CHECKING:
    from tiercel.ipc.session import EngineSession

_PR_SET_PDEATHSIG: Final = 1
_CHUNK_BYTES: Final = 1 << 18
_BUFFER_BYTES: Final = 1 << 20  # steps that the parent may be behind before the engine waits for it
_PROGRESS_SECONDS: Final = 0.05
_LOG_CHARS: Final = 4096
_DETAIL_CHARS: Final = 1 << 16


class EngineLink:
    """The engine's end of the socket pair: one thread reads, any may send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._connection = connection
        self._lock = threading.Lock()

    def messages(self) -> Iterator[ToEngine]:
        """What the parent sends, until it closes the socket."""
        reader = FrameReader(MAX_TO_ENGINE_BYTES)
        while data := self._receive():
            for body in reader.feed(data):
                yield decode_to_engine(body)

    def send(self, message: FromEngine) -> None:
        """Send a message; waits while the parent is too far behind, ends the process without it."""
        frame = encode(message)
        try:
            with self._lock:
                self._connection.sendall(frame)
        except OSError:
            leave()

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(_CHUNK_BYTES)
        except OSError:  # a parent that was killed with unread data resets the connection
            return b""


class LinkHandler(logging.Handler):
    """Sends log records to the parent, whose log has one form."""

    def __init__(self, link: EngineLink) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter())  # the parent adds level and name
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        text = plain_text(self.format(record)[:_LOG_CHARS])
        self._link.send(Log(record.levelno, record.name, text))


def leave() -> NoReturn:
    """End the process immediately, whatever its threads are doing."""
    os._exit(0)


def main(descriptor: int, parent: int) -> NoReturn:
    """Run until the parent closes its end of the socket.

    Args:
        descriptor: of our end.
        parent: its process id.
    """
    _die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.stderr is not None:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    link = EngineLink(socket.socket(fileno=descriptor))
    logging.basicConfig(level=logging.INFO, handlers=[LinkHandler(link)], force=True)
    logging.captureWarnings(capture=True)
    messages = link.messages()
    start = next(messages, None)
    if not isinstance(start, Start):
        leave()
    session: Future[EngineSession] = Future()
    arguments = (messages, session, link)
    threading.Thread(target=_listen, args=arguments, name="ipc", daemon=True).start()
    try:
        _run(start.options, link, session)
    except TiercelError as error:
        link.send(Failed(ErrorInfo.of(error)))
    except ModuleNotFoundError as error:
        link.send(Failed(ErrorInfo.of(InstallationError.of(error)), _detail(error)))
    except Exception as error:  # noqa: BLE001 - whatever it was, the parent must be told
        link.send(_failure(error, session))
    os._exit(1)


class _Reporter:
    """Sends progress, at most every `_PROGRESS_SECONDS`."""

    def __init__(self, link: EngineLink) -> None:
        self.start = StartProgress()
        self._link = link
        self._sent_s = 0.0

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        self.start.take(what, done, total)
        now = perf_counter()
        if now - self._sent_s >= _PROGRESS_SECONDS or done >= total:
            self._sent_s = now
            self._link.send(Progress(what, done, total, self.start.share))


def _run(options: LoadOptions, link: EngineLink, session: Future[EngineSession]) -> None:
    Faults.parse(env.faults(), is_enabled=options.enable_fault_injection).at_start()
    report = _Reporter(link)
    source = find_source(options.model, offline=options.offline, report=report)
    link.send(Opened(tuple(read_stamp(path) for path in source.file_paths)))
    report.start.phase = Phase.LOAD
    report("Loading PyTorch")
    env.shorten_openmp_spins()
    from tiercel.ipc.startup import start_session

    started = start_session(source, options, report, link.send)
    gc.freeze()  # loaded objects stay: collections in the middle of a step skip them
    session.set_result(started)
    started.loop.run()


def _listen(messages: Iterator[ToEngine], session: Future[EngineSession], link: EngineLink) -> None:
    """Hand messages to the session; end the process when there are no more."""
    try:
        for message in messages:
            session.result().handle(message)
    except Exception as error:  # noqa: BLE001 - an engine that is deaf must not live on
        link.send(_failure(error, session))
    leave()


def _failure(error: Exception, session: Future[EngineSession]) -> Failed:
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    return Failed(
        ErrorInfo("InternalError", plain_text(line[:_LOG_CHARS])),
        _detail(error),
        session.result().suspects() if session.done() else (),
    )


def _detail(error: Exception) -> str:
    return plain_text("".join(traceback.format_exception(error))[-_DETAIL_CHARS:])


def _die_with(parent: int) -> None:
    """Let the kernel kill this process with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had gone before the kernel knew
        leave()
