"""Parent side of the template worker: start it, talk under a deadline, kill and replace it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import threading
import weakref
from collections.abc import Mapping
from time import perf_counter
from typing import Final

from tiercel.errors import InternalError
from tiercel.text.child import isolated_command

START_SECONDS: Final = 30.0  # an interpreter and jinja2, 0.2 s on an idle machine
_CHUNK_BYTES: Final = 1 << 20


class WorkerLostError(Exception):
    """The worker was killed at the deadline, or died; the next request gets a new one."""

    def __init__(self, *, is_timeout: bool) -> None:
        super().__init__("timeout" if is_timeout else "died")
        self.is_timeout = is_timeout


class _Slot:
    """Holds the process apart from its owner, so that a finalizer can end it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def end(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()


class TemplateWorker:
    """One child process, started at the first request and kept between requests.

    Threads may share it; requests run one after the other. The child ends with its parent, however
    the
    parent ends: its input closes, and a request in progress is bounded by its CPU limit.
    """

    def __init__(self) -> None:
        self._slot = _Slot()
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, self._slot.end)

    @property
    def pid(self) -> int | None:
        """The child's process id, or None while there is none."""
        process = self._slot.process
        return None if process is None else process.pid

    def request(self, message: Mapping[str, object], timeout_s: float) -> dict[str, object]:
        """Send one request and wait for its answer.

        Args:
            message: see `template_worker.py`.
            timeout_s: seconds for this request, starting up not counted.

        Raises:
            WorkerLostError: no answer in time, or the child died of its limits.
            InternalError: no child can be started.
        """
        blob = json.dumps(message).encode()
        with self._lock:
            process = self._slot.process
            if process is None or process.poll() is not None:
                process = self._start()
            try:
                return _exchange(process, blob, perf_counter() + timeout_s)
            except WorkerLostError:
                self._slot.end()
                raise

    def close(self) -> None:
        """End the child; a later request starts a new one."""
        with self._lock:
            self._slot.end()

    def _start(self) -> subprocess.Popen[bytes]:
        self._slot.end()
        command = isolated_command("template_worker.py", ("jinja2", "markupsafe"))
        command.insert(3, str(os.getpid()))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is for the parent
        )
        self._slot.process = process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        try:
            _exchange(process, None, perf_counter() + START_SECONDS)
        except WorkerLostError:
            self._slot.end()
            raise InternalError("the chat template process did not start.") from None
        return process


def _exchange(
    process: subprocess.Popen[bytes], blob: bytes | None, deadline: float
) -> dict[str, object]:
    """Write a frame (None: nothing) while reading one; both ends may block, so neither may."""
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
            ready = selector.select(remaining) if remaining > 0 else []
            if not ready:
                raise WorkerLostError(is_timeout=True)
            for key, _ in ready:
                if key.fileobj is process.stdout:
                    incoming += _read_some(process.stdout.fileno())
                    continue
                outgoing = outgoing[_write_some(process.stdin.fileno(), outgoing) :]
                if not outgoing:
                    selector.unregister(process.stdin)
    answer: dict[str, object] = json.loads(incoming[4:])
    return answer


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
