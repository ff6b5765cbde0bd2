"""One engine process as its parent sees it: how it is started, spoken to, and ended.

The process has one end of a socket pair. The kernel closes that end however the process ends, so
the end of file on our end shows a death within milliseconds, and the process notices the death of
its parent in the same way. It leads a session of its own: Ctrl-C in the terminal is for the parent,
and processes that it has started itself end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Final, Protocol, cast

from tiercel import env
from tiercel.config import LoadOptions
from tiercel.errors import EngineDeadError, TiercelError
from tiercel.ipc.messages import (
    MAX_FROM_ENGINE_BYTES,
    ErrorInfo,
    Failed,
    FrameReader,
    FromEngine,
    Place,
    Start,
    decode_from_engine,
    encode,
)

_LOG = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.02
# Without -P a module in the current folder could take the place of a library. The folder of this
# package is an argument, so that an installed package and a source tree behave alike.
_BOOT: Final = (
    "import sys; sys.path.append(sys.argv[1]);"
    " from tiercel.ipc.process import main; main(*map(int, sys.argv[2:]))"
)


OnMessage = Callable[[FromEngine], None]


class Connection(asyncio.Protocol):
    """Our end of the socket to an engine process."""

    def __init__(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._reader = FrameReader(MAX_FROM_ENGINE_BYTES)
        self.failed: Failed | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, only alike.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                message = decode_from_engine(body)
                if isinstance(message, Failed):
                    self.failed = message
                self._on_message(message)
        except EngineDeadError as error:
            _LOG.error("the engine process cannot be understood: %s", error)
            self.close()

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class StartedEngine(Protocol):
    """An engine that was started, wherever its process is; see `EngineProcess`."""

    @property
    def pid(self) -> int: ...

    @property
    def unsent_bytes(self) -> int: ...

    @property
    def failed(self) -> Failed | None: ...

    def give_up(self, why: TiercelError) -> None: ...
    def send(self, frame: bytes) -> None: ...
    def close(self) -> None: ...
    async def wait_lost(self) -> None: ...
    def dump_stacks(self) -> None: ...
    def kill(self) -> None: ...
    async def reap(self, grace_s: float) -> int: ...


StartEngine = Callable[[LoadOptions, OnMessage], Awaitable[StartedEngine]]


class EngineProcess:
    """A process of this machine; make it with `start_engine`."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self._process = process
        self._connection = connection

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def unsent_bytes(self) -> int:
        """What was sent but not yet taken by the kernel."""
        transport = self._connection.transport
        return 0 if transport is None else transport.get_write_buffer_size()

    @property
    def failed(self) -> Failed | None:
        """What it said when it ended, or what `give_up` said of it."""
        return self._connection.failed

    def give_up(self, why: TiercelError) -> None:
        """Kill it; `why` counts as what it said."""
        self._connection.failed = Failed(ErrorInfo.of(why))
        self.kill()

    def send(self, frame: bytes) -> None:
        """Send a frame; never waits, and does nothing once the connection is lost."""
        transport = self._connection.transport
        if transport is not None and not transport.is_closing():
            transport.write(frame)

    def close(self) -> None:
        """Close the socket immediately: the process ends when it notices."""
        self._connection.close()

    async def wait_lost(self) -> None:
        """Wait until the connection has ended: the process has died, or `close` was called."""
        await asyncio.shield(self._connection.lost)

    def dump_stacks(self) -> None:
        """Let a process that hangs write the stacks of its threads to standard error."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill it and all that it has started."""
        if self._process.poll() is None:  # not reaped, so its id is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def reap(self, grace_s: float) -> int:
        """Wait until it is gone, with its memory; kill it after `grace_s`.

        Returns:
            Its exit status; of a signal, the negative number.
        """
        deadline = perf_counter() + grace_s
        while (status := self._process.poll()) is None:
            if perf_counter() > deadline:
                self.kill()
            await asyncio.sleep(_POLL_SECONDS)
        return status


def start_process(*, has_hub_token: bool) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that waits for its first message, `Start` or `Join`.

    Call it on a thread that lives as long as the process shall: the kernel ends the process with
    the thread that made it.

    Args:
        has_hub_token: whether it uses the model hub, so that it needs the hub's token.

    Returns:
        The process, and our end of its socket pair.

    Raises:
        OSError: no process or no socket can be made.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            return start_process_on(theirs, has_hub_token=has_hub_token), ours
    except OSError:
        ours.close()
        raise


def start_process_on(
    theirs: socket.socket,
    *,
    has_hub_token: bool,
    shared: Mapping[str, str] | None = None,
    listening: socket.socket | None = None,
    ranks_per_host: int = 0,
) -> subprocess.Popen[bytes]:
    """Start a process that gets its first message from a socket; see `start_process`.

    Args:
        theirs: the socket, which the caller may close then.
        has_hub_token: see `start_process`.
        shared: variables of the server, if that is on another host.
        listening: where ranks of other hosts knock at this one, likewise.
        ranks_per_host: how many of all ranks are on each host, with `listening`.
    """
    descriptors = [theirs.fileno()]
    numbers = [theirs.fileno()]
    if listening is not None:
        descriptors.append(listening.fileno())
        numbers += [listening.fileno(), ranks_per_host]
    return subprocess.Popen(
        _command(*numbers),
        stdin=subprocess.DEVNULL,
        stdout=_log_descriptor(),
        stderr=_log_descriptor(),
        env=env.child_environment(has_hub_token=has_hub_token, shared=shared),
        pass_fds=descriptors,
        start_new_session=True,
    )


async def start_engine(options: LoadOptions, on_message: OnMessage) -> EngineProcess:
    """Start an engine process and tell it what to load; see `start_process` for the thread.

    Args:
        options: options of the load.
        on_message: callback for each message, on this event loop.

    Raises:
        OSError: no process or no socket can be made.
    """
    return await start_with(Start(options), on_message, has_hub_token=not options.offline)


async def start_with(
    first: Start | Place, on_message: OnMessage, *, has_hub_token: bool
) -> EngineProcess:
    """Start a process of this machine and send it its first message.

    Raises:
        OSError: no process or no socket can be made.
    """
    process, ours = start_process(has_hub_token=has_hub_token)
    _, connection = await asyncio.get_running_loop().create_unix_connection(
        lambda: Connection(on_message), sock=ours
    )
    engine = EngineProcess(process, connection)
    engine.send(encode(first))
    return engine


def _command(*numbers: int) -> list[str]:
    root = Path(__file__).parents[2]
    return [sys.executable, "-P", "-c", _BOOT, str(root), str(os.getpid()), *map(str, numbers)]


def _log_descriptor() -> int:
    """Where the process writes: our standard error if there is one; results are ours alone."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
