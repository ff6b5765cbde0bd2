"""The server process: bind the port before anything is loaded, run uvicorn, drain at the end.

The first SIGTERM or SIGINT closes the port. Running requests continue for `drain_seconds` and then
end with an error, and the process ends with status 0. The second signal ends the process
immediately; the engine notices its closed socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import stat
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from tiercel.errors import ArgumentError, EngineDeadError
from tiercel.ipc.supervisor import EngineState
from tiercel.params import Limits
from tiercel.serve.app import create_app
from tiercel.serve.http.protocol import EXTRA_CONNECTIONS, KEEP_ALIVE_SECONDS, LimitedProtocol
from tiercel.serve.state import ServerState

if sys.platform != "win32":
    import resource

BACKLOG: Final = 2048
OWN_DESCRIPTORS: Final = 32  # files, pipes and sockets of the process itself, and a reserve
GAVE_UP: Final = 70
_GRACE_SECONDS: Final = 2  # for the error responses of requests that were ended
_POLL_SECONDS: Final = 0.05


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind every address of a host; port 0 picks a free one.

    Raises:
        ArgumentError: the host name is unknown, or no address can be bound.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "the name cannot be resolved"
        raise ArgumentError(f"--host {host}: {reason}.", hint="Use 127.0.0.1.") from None
    bound: list[socket.socket] = []
    refused: OSError | None = None
    for family, kind, number, _, address in dict.fromkeys(found):
        try:
            bound.append(_bind_one(family, kind, number, (address[0], port, *address[2:])))
        except OSError as error:
            refused = error
            continue
        port = bound[0].getsockname()[1]
    if not bound and refused is not None:
        raise ArgumentError(
            f"{host}:{port}: {refused.strerror}.",
            hint="Choose another with --port, or let --port 0 find one.",
        )
    return bound


def _bind_one(family: int, kind: int, number: int, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, kind, number)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def bind_unix(path: Path) -> socket.socket:
    """Bind a Unix socket; the leftover socket of a dead server is replaced.

    Raises:
        ArgumentError: the path is in use, or the socket cannot be created.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_dead_socket(path):
            path.unlink()
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise ArgumentError(
            f"--uds {path}: {error.strerror or error}.", hint="Name a path that is free."
        ) from None
    return bound


def _is_dead_socket(path: Path) -> bool:
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) != 0


def fit_descriptors(limits: Limits) -> Limits:
    """Lower the limit of connections to the open files that the process may have.

    Then a connection beyond the limit gets a 503, and `accept` never fails for lack of a
    descriptor.

    Raises:
        ArgumentError: no connection would be possible.
    """
    if sys.platform == "win32":
        return limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + OWN_DESCRIPTORS + EXTRA_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = soft - OWN_DESCRIPTORS - EXTRA_CONNECTIONS
        if room < 1:
            raise ArgumentError(
                f"This process may open {soft} files; the server needs {soft + 1 - room} at least.",
                hint="Raise the limit: ulimit -n 1024.",
            )
        return replace(limits, max_connections=min(limits.max_connections, room))
    return limits


def make_config(app: ASGIApp, state: ServerState, limits: Limits) -> uvicorn.Config:
    """The settings of uvicorn, with `LimitedProtocol`."""
    protocol = functools.partial(
        LimitedProtocol, limits=limits, on_refused=state.metrics.count_rejected
    )
    return uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )


def run_server(state: ServerState, sockets: list[socket.socket], drain_seconds: float) -> int:
    """Serve until a signal, or until the engine has ended for good.

    Returns:
        The exit status: 0 after a drain, 70 after the engine was given up.

    Raises:
        TiercelError: the model cannot be loaded.
    """
    config = make_config(create_app(state), state, state.settings.limits)
    Server(config, state, drain_seconds).run(sockets)
    if state.failure is not None and not isinstance(state.failure, EngineDeadError):
        raise state.failure
    return GAVE_UP if state.client.state is EngineState.DEAD else 0


class Server(uvicorn.Server):
    """uvicorn's server with a drain at its end."""

    def __init__(self, config: uvicorn.Config, state: ServerState, drain_seconds: float) -> None:
        super().__init__(config)
        self._state = state
        self._drain_seconds = drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Drain at the first signal, end at the second."""
        if self._state.is_draining:
            os._exit(128 + sig)
        self._state.is_draining = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """End also when the engine has ended for good."""
        if self._state.is_over:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, let requests finish, then end the remaining ones."""
        self._state.is_draining = True
        for server in self.servers:
            server.close()
        for listening in sockets or ():
            listening.close()
        deadline = perf_counter() + self._drain_seconds
        while self.server_state.tasks and perf_counter() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        await self._state.client.close(0.0)
        await super().shutdown(sockets)
