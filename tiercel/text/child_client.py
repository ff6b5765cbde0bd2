"""Parent side of a child process for untrusted content: start it, send requests, kill it.

A frame on the child's standard input and output is ``u32 big-endian length, JSON in UTF-8``. The
child's first frame says that it is ready (`child_loop.py`).
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Final

import psutil
from msgspec import Struct

from tiercel.errors import InternalError
from tiercel.text.child import isolated_command
from tiercel.text.child_loop import MEMORY_BYTES

START_SECONDS: Final = 30.0  # an interpreter and a few modules, 0.2 s on an idle machine
_CHUNK_BYTES: Final = 1 << 20
_WATCH_SECONDS: Final = 0.02  # between checks of a child's memory where no kernel bounds it


class WorkerLostError(Exception):
    """The worker died or was killed at the deadline; the next request gets a new worker."""

    def __init__(self, *, is_timeout: bool) -> None:
        super().__init__("timeout" if is_timeout else "died")
        self.is_timeout = is_timeout


class ChildProgram(Struct, frozen=True):
    """A script that runs as a child.

    Attributes:
        script: path of the script.
        packages: packages that it imports besides the standard library.
        name: name of the process in messages.
        opening: function that makes the first message to each new child; None: no such message.
    """

    script: Path
    packages: tuple[str, ...]
    name: str
    opening: Callable[[], Mapping[str, object]] | None = None


class _Slot:
    """Holder of the process, separate from its owner, so that a finalizer can end it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.most_bytes: int | None = None  # of memory; None where the kernel bounds it
        self.owner_pid = os.getpid()

    def leave_to_parent(self) -> None:
        """After a fork: leave the process to the parent, which reads its answers and ends it."""
        if self.owner_pid != os.getpid():
            self.owner_pid, self.process = os.getpid(), None

    def end(self) -> None:
        self.leave_to_parent()
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()


class ChildWorker:
    """One child process, started at the first request and kept between requests.

    Threads may share it; requests run one after the other. The child ends with its parent in every
    case: its input closes, and a request in progress is bounded by its CPU limit.
    """

    def __init__(self, program: ChildProgram) -> None:
        self._program = program
        self._slot = _Slot()
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, self._slot.end)

    @property
    def pid(self) -> int | None:
        """The child's process id, or None while there is none."""
        process = self._slot.process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the child now, so that the first request does not wait for it.

        Raises:
            InternalError: no child can be started.
        """
        with self._lock:
            self._running()

    def request(self, message: Mapping[str, object], timeout_s: float) -> dict[str, object]:
        """Send one request and wait for its answer.

        Args:
            message: request that the script understands.
            timeout_s: seconds for this request, without the start of the child.

        Raises:
            WorkerLostError: no answer in time, or the child died at its limits.
            InternalError: no child can be started.
        """
        blob = json.dumps(message).encode()
        with self._lock:
            process = self._running()
            try:
                deadline = perf_counter() + timeout_s
                return _exchange(process, blob, deadline, self._slot.most_bytes)
            except WorkerLostError:
                self._slot.end()
                raise

    def close(self) -> None:
        """End the child; a later request starts a new one."""
        with self._lock:
            self._slot.end()

    def _running(self) -> subprocess.Popen[bytes]:
        self._slot.leave_to_parent()
        process = self._slot.process
        return self._start() if process is None or process.poll() is not None else process

    def _start(self) -> subprocess.Popen[bytes]:
        self._slot.end()
        program = self._program
        process = subprocess.Popen(
            _command(program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal goes to the parent
        )
        self._slot.process = process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        deadline = perf_counter() + START_SECONDS
        try:
            ready = _exchange(process, None, deadline)
            if program.opening is not None:
                ready = _exchange(process, json.dumps(program.opening()).encode(), deadline)
        except WorkerLostError:
            self._slot.end()
            raise InternalError(f"the {program.name} process did not start.") from None
        is_limited = ready["is_limited"]
        self._slot.most_bytes = None if is_limited else _resident(process.pid) + MEMORY_BYTES
        return process


class ChildWorkers:
    """Several equal workers that share the requests.

    Attributes:
        num_kills: number of workers that were killed at a deadline or died at their limits.
    """

    def __init__(self, program: ChildProgram, count: int) -> None:
        self._all = tuple(ChildWorker(program) for _ in range(count))
        self._idle: queue.SimpleQueue[ChildWorker] = queue.SimpleQueue()
        for worker in self._all:
            self._idle.put(worker)
        self.num_kills = 0

    def start(self) -> None:
        """Start every child now.

        Raises:
            InternalError: one cannot be started.
        """
        for worker in self._all:
            worker.start()

    def request(self, message: Mapping[str, object], timeout_s: float) -> dict[str, object]:
        """Send one request to an idle worker; waits for one without a time limit.

        Raises:
            WorkerLostError, InternalError: as `ChildWorker.request`.
        """
        worker = self._idle.get()
        try:
            return worker.request(message, timeout_s)
        except WorkerLostError:
            self.num_kills += 1
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the children; a later request starts new ones."""
        for worker in self._all:
            worker.close()


def _command(program: ChildProgram) -> list[str]:
    """The argument list of a child: the script, this process's id, folders of its packages."""
    command = isolated_command(program.script, program.packages)
    command.insert(3, str(os.getpid()))
    return command


def _exchange(
    process: subprocess.Popen[bytes],
    blob: bytes | None,
    deadline: float,
    most_bytes: int | None = None,
) -> dict[str, object]:
    """Write a frame while reading one: both ends may block, so neither side may block the other.

    Args:
        process: the child.
        blob: content of the frame; None to write nothing.
        deadline: deadline on the clock of `perf_counter`.
        most_bytes: most memory of the child; None where the kernel bounds it.
    """
    pause = _WATCH_SECONDS if most_bytes is not None else START_SECONDS
    if process.stdin is None or process.stdout is None:
        raise WorkerLostError(is_timeout=False)
    outgoing = memoryview(b"" if blob is None else len(blob).to_bytes(4, "big") + blob)
    incoming = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if outgoing:
            selector.register(process.stdin, selectors.EVENT_WRITE)
        while len(incoming) < 4 or len(incoming) < 4 + int.from_bytes(incoming[:4], "big"):
            remaining = deadline - perf_counter()
            if remaining <= 0:
                raise WorkerLostError(is_timeout=True)
            ready = selector.select(min(remaining, pause))
            if most_bytes is not None and _resident(process.pid) > most_bytes:
                raise WorkerLostError(is_timeout=False)
            for key, _ in ready:
                if key.fileobj is process.stdout:
                    incoming += _read_some(process.stdout.fileno())
                    continue
                outgoing = outgoing[_write_some(process.stdin.fileno(), outgoing) :]
                if not outgoing:
                    selector.unregister(process.stdin)
    answer: dict[str, object] = json.loads(incoming[4:])
    return answer


def _resident(pid: int) -> int:
    """Bytes of memory of a process; 0 where the system does not report it."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (OSError, psutil.Error):
        return 0


def _read_some(descriptor: int) -> bytes:
    chunk = os.read(descriptor, _CHUNK_BYTES)
    if not chunk:
        raise WorkerLostError(is_timeout=False)
    return chunk


def _write_some(descriptor: int, data: memoryview) -> int:
    try:
        return os.write(descriptor, data[:_CHUNK_BYTES])
    except BrokenPipeError:
        raise WorkerLostError(is_timeout=False) from None
