"""Where the other ranks of a model come from, for rank 0: this host, and others of a cluster.

On this host rank 0 starts them itself, each with a socket pair, and collectives meet over a file in
a private folder. On other hosts a cluster has started them (`engine_host.py`): they knock at rank 0
with a token, and collectives meet at a port of rank 0. From there on all are alike.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Final, Protocol

from tiercel.errors import EngineDeadError
from tiercel.ipc.knock import Listener, listen
from tiercel.ipc.spawn import start_process

_KNOCK_S: Final = 60.0  # for all ranks of other hosts to come


class RankProcess(Protocol):
    """What rank 0 does with the process of another rank; as `subprocess.Popen`."""

    pid: int

    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


class FarProcess:
    """The process of a rank on another host, of which only the connection is known.

    It ends with that connection, at the latest when the cluster ends all processes of the engine.
    """

    pid: int = 0

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def kill(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        """Its status is not known here."""
        if timeout is not None:
            raise subprocess.TimeoutExpired("a process of another host", timeout)
        return 0

    def send_signal(self, sig: int) -> None:
        """No signal reaches it."""


class Meeting:
    """The ranks of one engine, until all have met."""

    def __init__(
        self, size: int, listener: Listener | None = None, ranks_per_host: int = 0
    ) -> None:
        """Set up.

        Args:
            size: ranks.
            listener: where ranks of other hosts knock; None if there are none.
            ranks_per_host: ranks of each host, with `listener`.

        Raises:
            EngineDeadError: no folder can be made.
        """
        self._size = size
        self._listener = listener
        self._num_here = ranks_per_host if listener is not None else size
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="tiercel-ranks-"))
        except OSError as error:
            raise EngineDeadError(
                f"no folder can be made in which ranks meet: {error.strerror}.",
                hint="Make room for temporary files, or let TMPDIR name another folder.",
            ) from None
        self._come: dict[int, socket.socket] = {}
        if listener is None:
            self.address = (self._folder / "meet").as_uri()
        else:
            self.address = f"tcp://{_shown(listener.host)}:{_free_port(listener.host)}"

    def start(self, rank: int) -> tuple[RankProcess, socket.socket]:
        """Start a rank, or wait for one of another host.

        Call it on a thread that lives as long as the process shall.

        Returns:
            Its process, and our end of the connection.

        Raises:
            OSError: no process or no socket can be made.
            EngineDeadError: it does not come.
        """
        if rank < self._num_here:
            return start_process(has_hub_token=False)
        while rank not in self._come:
            self._let_in()
        connection = self._come.pop(rank)
        return FarProcess(connection), connection

    def close(self) -> None:
        """All have met, or never will; safe to call again."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._listener is not None:
            self._listener.close()
        for connection in self._come.values():
            connection.close()

    def _let_in(self) -> None:
        assert self._listener is not None, "all other ranks are here"
        accepted = self._listener.accept(_KNOCK_S)
        if accepted is None:
            raise EngineDeadError(f"ranks of other hosts did not come within {_KNOCK_S:.3g} s.")
        connection, rank = accepted
        if rank in self._come or not self._num_here <= rank < self._size:
            connection.close()  # a part of an earlier start cannot be: tokens differ
            raise EngineDeadError(f"rank {rank} of {self._size} came twice, or is not expected.")
        self._come[rank] = connection


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _free_port(host: str) -> int:
    """A port that is free now."""
    with listen(host) as probe:
        port: int = probe.getsockname()[1]
        return port
