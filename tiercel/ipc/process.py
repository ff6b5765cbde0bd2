"""The engine process: started by `spawn.py`, it loads a model and answers on its socket.

With several ranks it is rank 0, and starts the processes of the others in the same way; such a
process takes the path of `follower.py` after its first message.

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
from collections.abc import Iterator
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from tiercel import env
from tiercel.cold_start import postpone_meta_kernels, preload_pytorch
from tiercel.config import LoadOptions
from tiercel.errors import TiercelError
from tiercel.faults import Faults
from tiercel.ipc.knock import Listener
from tiercel.ipc.last_words import LinkHandler, describe_failure, leave
from tiercel.ipc.messages import (
    MAX_TO_ENGINE_BYTES,
    FrameReader,
    FromEngine,
    Join,
    Opened,
    Place,
    Progress,
    Start,
    ToEngine,
    decode_to_engine,
    encode,
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


def main(parent: int, descriptor: int, listening: int = -1, ranks_per_host: int = 0) -> NoReturn:
    """Run until the other side closes its end of the socket.

    Args:
        parent: its process id.
        descriptor: of our end.
        listening: descriptor of the socket at which ranks of other hosts knock; -1: none.
        ranks_per_host: ranks of each host, with `listening`.
    """
    _die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.stderr is not None:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = socket.socket(fileno=descriptor)
    link = EngineLink(connection)
    messages = link.messages()
    start = next(messages, None)
    if isinstance(start, Join):
        env.shorten_openmp_spins()  # before PyTorch is imported
        from tiercel.ipc.follower import follow

        follow(connection, start)
    logging.basicConfig(level=logging.INFO, handlers=[LinkHandler(link.send)], force=True)
    logging.captureWarnings(capture=True)
    if isinstance(start, Place):
        from tiercel.ipc.placer import place

        place(start, messages, link.send)
    if not isinstance(start, Start):
        leave()
    session: Future[EngineSession] = Future()
    arguments = (messages, session, link)
    threading.Thread(target=_listen, args=arguments, name="ipc", daemon=True).start()
    try:
        listener = None
        if listening >= 0:
            listener = Listener(socket.socket(fileno=listening), start.token)
        options = msgspec.structs.replace(start.options, ranks_per_host=ranks_per_host)
        _run(options, listener, link, session)
    except Exception as error:  # noqa: BLE001 - whatever it was, the parent must be told
        link.send(describe_failure(error, _suspects(session)))
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


def _run(
    options: LoadOptions,
    listener: Listener | None,
    link: EngineLink,
    session: Future[EngineSession],
) -> None:
    Faults.parse(env.faults(), is_enabled=options.enable_fault_injection).at_start()
    report = _Reporter(link)
    postpone_meta_kernels()
    preload_pytorch()
    source = find_source(options.model, offline=options.offline, report=report)
    link.send(Opened(tuple(read_stamp(path) for path in source.file_paths)))
    source.tokenizer(env.cache_dir() / "tokenizers")  # while PyTorch's library is loaded
    report.start.phase = Phase.LOAD
    report("Loading PyTorch")
    env.shorten_openmp_spins()
    from tiercel.ipc.startup import start_session

    def end(error: TiercelError) -> None:
        """Another rank has failed: no step of this one will end either."""
        link.send(describe_failure(error, _suspects(session)))
        os._exit(1)

    started = start_session(source, options, report, link.send, end, listener)
    gc.freeze()  # loaded objects stay: collections in the middle of a step skip them
    session.set_result(started)
    started.loop.run()


def _listen(messages: Iterator[ToEngine], session: Future[EngineSession], link: EngineLink) -> None:
    """Hand messages to the session; end the process when there are no more."""
    try:
        for message in messages:
            session.result().handle(message)
    except Exception as error:  # noqa: BLE001 - an engine that is deaf must not live on
        link.send(describe_failure(error, _suspects(session)))
    leave()


def _suspects(session: Future[EngineSession]) -> tuple[str, ...]:
    return session.result().suspects() if session.done() else ()


def _die_with(parent: int) -> None:
    """Let the kernel kill this process with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had gone before the kernel knew
        leave()
