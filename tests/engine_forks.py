"""Engine processes as forks of one that has imported PyTorch, for tests of what comes later.

An engine takes 1.5 s of a core to import PyTorch, a fork a few milliseconds. All else is that of
`ipc/spawn.py`: a session of its own, the same descriptors, variables and messages, and an end with
its parent. Tests of commands, of servers and of starts have engines that are forks of nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[1]
REQUEST_BYTES = 1 << 17
HIGH = 500  # descriptors from here on are none of those that an engine is told
WAIT_S = 0.05


class EngineForks:
    """Starts engines as forks. The process that forks ends with this one, and its forks with it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._channel = _start_forking()
        self._started: list[int] = []
        self._statuses: dict[int, int] = {}

    @contextlib.contextmanager
    def in_place_of_processes(self) -> Iterator[None]:
        """Let `ipc/spawn.py` start forks."""
        from tiercel.ipc import spawn

        replaced = SimpleNamespace(Popen=self.start, DEVNULL=subprocess.DEVNULL)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spawn, "subprocess", replaced)
            yield

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        stderr: int,
        **_: object,
    ) -> EngineFork:
        """Like `Popen` for a command of `ipc/spawn.py`."""
        numbers = [int(word) for word in command[6:]]  # after the number of the parent
        request = {"numbers": numbers, "targets": [*pass_fds], "env": {**env}, "cwd": os.getcwd()}
        with self._lock, open(os.devnull, "wb") as null:
            log = null.fileno() if stderr == subprocess.DEVNULL else stderr
            socket.send_fds(self._channel, [json.dumps(request).encode()], [*pass_fds, log])
            while not self._started:
                self._read(None)
            return EngineFork(self, self._started.pop())

    def status_of(self, pid: int, timeout: float | None) -> int | None:
        """The exit status of a fork as `Popen` gives it; None if it has none before a timeout."""
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while True:
            with self._lock:  # for a moment: another thread may want to start an engine
                left = min(max(0.0, deadline - time.monotonic()), WAIT_S)
                while pid not in self._statuses and self._read(left):
                    pass
                if pid in self._statuses:
                    return self._statuses[pid]
            if time.monotonic() >= deadline:
                return None

    def _read(self, timeout: float | None) -> bool:
        """Take one message; False if there is none before a timeout."""
        if not select.select([self._channel], [], [], timeout)[0]:
            return False
        message = json.loads(self._channel.recv(REQUEST_BYTES))
        if "started" in message:
            self._started.append(message["started"])
        else:
            self._statuses[message["ended"]] = message["status"]
        return True


class EngineFork:
    """What `ipc/` uses of a `Popen`."""

    def __init__(self, forks: EngineForks, pid: int) -> None:
        self._forks, self.pid = forks, pid

    def poll(self) -> int | None:
        return self._forks.status_of(self.pid, 0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._forks.status_of(self.pid, timeout)
        if status is None:
            raise subprocess.TimeoutExpired("an engine", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _start_forking() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine_forks", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
    return ours


def main(descriptor: int) -> None:
    """Fork at each request, and report how forks end, until the channel is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import tiercel.ipc.follower
    import tiercel.ipc.process
    import tiercel.ipc.startup  # noqa: F401 - with PyTorch

    gc.freeze()
    channel = socket.socket(fileno=descriptor)
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([channel, woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 10)
            for pid, status in _ended():
                channel.send(json.dumps({"ended": pid, "status": status}).encode())
        if channel in ready:
            data, descriptors, _, _ = socket.recv_fds(channel, REQUEST_BYTES, 8)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                for own in (channel.fileno(), woken, waking):
                    os.close(own)
                _become_engine(json.loads(data), descriptors)
            for own in descriptors:
                os.close(own)
            channel.send(json.dumps({"started": pid}).encode())


def _ended() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _become_engine(request: dict, descriptors: list[int]) -> NoReturn:
    """Take the place of the command of `ipc/spawn.py`."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        high = [fcntl.fcntl(own, fcntl.F_DUPFD, HIGH) for own in descriptors]
        for own in descriptors:
            os.close(own)
        for own, target in zip((*high, high[-1]), (*request["targets"], 1, 2), strict=True):
            os.dup2(own, target)
        for own in high:
            os.close(own)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        from tiercel.ipc.process import main as run

        run(os.getppid(), *request["numbers"])
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
