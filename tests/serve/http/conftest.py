"""What tests over raw sockets share: pieces that the server reads one by one."""

import pytest

from tests.patience import wait_for
from tiercel.serve.http.protocol import LimitedProtocol


class Pieces:
    """Sends pieces of data to a server of this process, which reads each before the next comes."""

    def __init__(self):
        self.num_read = 0

    def send(self, sock, *pieces):
        for piece in pieces:
            wanted = self.num_read + len(piece)
            sock.sendall(piece)
            wait_for(lambda wanted=wanted: self.num_read >= wanted)


@pytest.fixture
def apart(monkeypatch):
    """Connections that are opened from here on are watched."""
    pieces, read = Pieces(), LimitedProtocol.data_received

    def data_received(protocol, data):
        read(protocol, data)
        pieces.num_read += len(data)

    monkeypatch.setattr(LimitedProtocol, "data_received", data_received)
    return pieces
