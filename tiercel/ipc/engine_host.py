"""What runs on a host of a Ray cluster: it starts processes of an engine and waits for their end.

Ray starts this object in a process of its own, which is the parent of the engine's processes there:
the kernel ends them with it. Its calls carry addresses and exit statuses, nothing else: an engine
speaks with the server, and ranks with each other, over TCP (`knock.py`).
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tiercel.ipc.knock import knock, listen
from tiercel.ipc.spawn import start_process_on
from tiercel.version import __version__

_CONNECT_S: Final = 20.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Address:
    """Where a host is reached, and which version of Tiercel it has; `port` is for other ranks."""

    host: str
    port: int
    version: str


class EngineHost:
    """The part of an engine that one host has."""

    def __init__(self, find_host: Callable[[], str], shared: Mapping[str, str]) -> None:
        """Set up.

        Args:
            find_host: finds the address of this host.
            shared: variables of the server's environment.
        """
        self._shared = shared
        self._host = find_host()
        self._listening = listen(self._host)  # inherited by rank 0, if that is here

    def address(self) -> Address:
        """The address of this host."""
        return Address(self._host, self._listening.getsockname()[1], __version__)

    def run_engine(self, host: str, port: int, token: bytes, ranks_per_host: int) -> str:
        """Start rank 0, which knocks at the server, and wait until it ends.

        Args:
            host: of the server.
            port: of the server.
            token: the secret of this start.
            ranks_per_host: ranks on each host if there are several; else 0.

        Returns:
            How it ended.
        """
        with knock(host, port, token, 0, _CONNECT_S) as connection, self._listening as listening:
            process = start_process_on(
                connection,
                has_hub_token=True,
                shared=self._shared,
                listening=listening if ranks_per_host else None,
                ranks_per_host=ranks_per_host,
            )
        return _wait_first([process])

    def run_ranks(self, host: str, port: int, token: bytes, ranks: Sequence[int]) -> str:
        """Start other ranks, which knock at rank 0, and wait until the first of them ends.

        Returns:
            How it ended.
        """
        self._listening.close()
        processes = []
        for rank in ranks:
            with knock(host, port, token, rank, _CONNECT_S) as connection:
                process = start_process_on(connection, has_hub_token=False, shared=self._shared)
                processes.append(process)
        return _wait_first(processes)


def _wait_first(processes: Sequence[subprocess.Popen[bytes]]) -> str:
    """Wait until a process ends; in this thread, with which the kernel ends them."""
    while True:
        for process in processes:
            try:
                status = process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            if status >= 0:
                return f"ended with status {status}"
            return f"was ended by signal {signal.Signals(-status).name}"
