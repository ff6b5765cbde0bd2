"""TCP connections between hosts: one side listens, the other knocks with a secret and a number.

A socket pair needs no secret, because only its heir has it. A port can be reached by anyone: who
does not know the token of this start is turned away before a byte is read as a message. After the
knock the connection carries frames, as a socket pair does. The kernel shows the death of a
process on another host in the same way; a host that is lost with all its processes is found by
probes. What is sent is not encrypted: the hosts need a network of their own.

    token, 32 bytes    number, u32 little-endian
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
from time import perf_counter
from typing import Final

TOKEN_BYTES: Final = 32
_NUMBER_BYTES: Final = 4
_KNOCK_S: Final = 2.0  # from the connection to the whole knock
_POLL_S: Final = 0.2
_BACKLOG: Final = 64
# A host without power is noticed after 5 + 3 x 2 s.
_PROBES: Final = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
_UNREAD_MS: Final = 10_000  # for what was sent to be received by the other host's kernel


def make_token() -> bytes:
    """A secret for one start."""
    return secrets.token_bytes(TOKEN_BYTES)


def listen(host: str) -> socket.socket:
    """Listen at a free port of an address of this machine.

    Raises:
        OSError: there is no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG)


def own_address(host: str, port: int) -> str:
    """The address of this machine by which it reaches a host; nothing is sent.

    Raises:
        OSError: the name is unknown, or there is no way there.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own


def knock(host: str, port: int, token: bytes, number: int, timeout_s: float) -> socket.socket:
    """Connect to a listener.

    Raises:
        OSError: nobody listens there.
    """
    connection = socket.create_connection((host, port), timeout_s)
    connection.sendall(token + number.to_bytes(_NUMBER_BYTES, "little"))
    return _prepared(connection)


class Listener:
    """Lets in those who know the token.

    Attributes:
        is_closed: whether it listens no more.
    """

    def __init__(self, listening: socket.socket, token: bytes) -> None:
        """Take over a socket of `listen`."""
        assert len(token) == TOKEN_BYTES, "an empty token would let everyone in"
        self._listening = listening
        self._token = token
        self.is_closed = False
        listening.settimeout(_POLL_S)

    @property
    def host(self) -> str:
        """The address at which it listens."""
        host: str = self._listening.getsockname()[0]
        return host

    @property
    def port(self) -> int:
        """The port at which it listens."""
        port: int = self._listening.getsockname()[1]
        return port

    def accept(self, timeout_s: float) -> tuple[socket.socket, int] | None:
        """Wait for the next one with the token.

        Returns:
            The connection, and the number that it knocked with; None if nobody came, or `close`
            was called meanwhile.
        """
        deadline = perf_counter() + timeout_s
        while not self.is_closed and perf_counter() < deadline:
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                continue
            except OSError:
                break
            number = self._read(connection)
            if number is not None:
                return _prepared(connection), number
            connection.close()
        return None

    def close(self) -> None:
        """Listen no more; safe to call again, and from another thread."""
        self.is_closed = True
        self._listening.close()

    def _read(self, connection: socket.socket) -> int | None:
        """The number of a knock; None if it is none, or one without the token."""
        data, deadline = b"", perf_counter() + _KNOCK_S
        size = TOKEN_BYTES + _NUMBER_BYTES
        with contextlib.suppress(OSError):
            while len(data) < size and (left := deadline - perf_counter()) > 0:
                connection.settimeout(left)
                more = connection.recv(size - len(data))
                if not more:
                    return None
                data += more
        if len(data) < size or not hmac.compare_digest(data[:TOKEN_BYTES], self._token):
            return None
        return int.from_bytes(data[TOKEN_BYTES:], "little")


def _prepared(connection: socket.socket) -> socket.socket:
    """Send small frames at once, and notice a host that is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_PROBES, ("TCP_USER_TIMEOUT", _UNREAD_MS)):
        if hasattr(socket, name):  # not on every platform
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
