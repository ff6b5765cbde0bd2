"""A small HTTP/1.1 client for measuring: keep-alive connections, one request on each at a time.

The clock is read once for each piece of data from the kernel, before anything is parsed,
so the client's own work is not in the figures of the piece. httptools parses; an `Exchange` decides
what to do with the body.

Why not httpx: with 16 and 64 streams a token costs it 42 and 54 us of a core, this client 9 and
7 us (AMD EPYC, results/e2e_bench_client.json). A server of 10,000 tokens/s would keep httpx busy
half the time, and waiting for the client would look like the server's latency.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from time import perf_counter
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from tiercel.errors import ArgumentError

MAX_BODY_BYTES: Final = 16 << 20  # of an answer in memory; a stream may be longer
MAX_HEAD_BYTES: Final = 1 << 20
CONNECT_TIMEOUT_S: Final = 10.0
_LENGTH_HEADERS: Final = frozenset(("content-length", "transfer-encoding"))


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server.

    Attributes:
        url: scheme, host and port, for messages.
        base: path before `/v1`, usually empty.
        host_header: value of `Host`.
    """

    url: str
    host: str
    port: int
    is_tls: bool
    base: str
    host_header: str


def parse_address(text: str) -> Address:
    """Parse a server's URL, with or without a final `/v1`.

    Raises:
        ArgumentError: it is not an http or https URL of a host.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    is_plain = text.isascii() and text.isprintable() and " " not in text
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        raise ArgumentError(
            f"{text!r:.120} is not the URL of a server.", hint="Use http://HOST:PORT."
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ArgumentError(
            "the URL holds more than host, port and path.", hint="Give a key with --api-key."
        )
    is_tls = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Address(
        url=f"{parts.scheme}://{parts.netloc}{base}",
        host=parts.hostname,
        port=port if port is not None else (443 if is_tls else 80),
        is_tls=is_tls,
        base=base,
        host_header=parts.netloc,
    )


class ExchangeError(Exception):
    """A request without a complete answer.

    Attributes:
        kind: kind of the failure, `connect`, `dropped`, `timeout` or `bad_http`.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Exchange:
    """One request and its answer; a subclass may process the body as it arrives."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.progress_s = 0.0  # time of the last progress; the timeout counts from here
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_body(self, data: bytes, now_s: float) -> None:
        """Add a piece of the body that arrived at `now_s`."""
        self.progress_s = now_s
        self.body += data
        if len(self.body) > MAX_BODY_BYTES:
            self.fail("bad_http", f"the answer has over {MAX_BODY_BYTES} bytes")

    def on_end(self) -> None:
        """Handle the end of a complete answer."""

    def renew(self) -> None:
        """Reset the exchange to be sent again; no part of an answer has arrived."""
        self.done = asyncio.get_running_loop().create_future()

    def fail(self, kind: str, detail: str) -> None:
        """End the exchange with an error; the first error counts."""
        if not self.done.done():
            self.done.set_exception(ExchangeError(kind, detail))


class _Connection(asyncio.Protocol):
    """One connection; parses answers into the current exchange."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.is_open = True
        self.has_answered = False  # a byte of the current answer has arrived
        self._has_head = False
        self._num_bytes = 0  # of the current answer
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._now_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        exchange = self.exchange
        if exchange is None:
            return
        headers = exchange.headers
        if error is None and self._has_head and not _LENGTH_HEADERS & headers.keys():
            self.on_message_complete()  # an answer without a length ends with the connection
        else:
            reason = f": {error}" if error else ""
            exchange.fail("dropped", f"the connection ended before the answer did{reason}")

    def data_received(self, data: bytes) -> None:
        self._now_s = perf_counter()
        self.has_answered = True
        if self.exchange is None:  # an answer without a request
            self.close()
            return
        if not self._has_head and self._num_bytes > MAX_HEAD_BYTES:
            self._give_up(f"a head of over {MAX_HEAD_BYTES} bytes")
            return
        self._num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._give_up(f"no HTTP: {error}")

    def send(self, exchange: Exchange, data: bytes) -> None:
        """Send a request; the answer goes to `exchange`."""
        assert self._transport is not None
        self.exchange = exchange
        self.has_answered = self._has_head = False
        self._num_bytes = 0
        self._transport.write(data)

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def on_status(self, _reason: bytes) -> None:
        assert self.exchange is not None
        self.exchange.status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.exchange is not None
        self.exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, data: bytes) -> None:
        if self.exchange is not None:
            self.exchange.on_body(data, self._now_s)

    def on_message_complete(self) -> None:
        exchange, self.exchange = self.exchange, None
        if not self._parser.should_keep_alive():
            self.close()
        # A parser that has read an answer to its end may keep a half of the next answer.
        self._parser = httptools.HttpResponseParser(self)
        if exchange is not None:
            exchange.on_end()
            if not exchange.done.done():
                exchange.done.set_result(None)

    def _give_up(self, detail: str) -> None:
        if self.exchange is not None:
            self.exchange.fail("bad_http", detail)
        self.close()


class HttpClient:
    """Client with keep-alive connections to one server."""

    def __init__(self, address: Address, *, api_key: str | None, timeout_s: float) -> None:
        """Prepare the client; nothing is sent.

        Args:
            address: address of the server.
            api_key: bearer token.
            timeout_s: longest time without data of an answer.
        """
        self.address = address
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if address.is_tls else None
        lines = [f"Host: {address.host_header}", "Accept: */*", "User-Agent: tiercel-bench"]
        if api_key is not None:
            lines.append(f"Authorization: Bearer {api_key}")
        self._common = "".join(f"{line}\r\n" for line in lines)

    async def run(
        self, method: str, path: str, exchange: Exchange, body: bytes | None = None
    ) -> None:
        """Send a request and wait for its answer.

        A connection that the server closed while it was idle is not an error: the request is sent
        once more on a new connection.

        Raises:
            ExchangeError: there was no complete answer.
        """
        head = f"{method} {self.address.base}{path} HTTP/1.1\r\n{self._common}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        data = f"{head}\r\n".encode("latin-1") + (body or b"")
        while True:
            kept = self._take_idle()
            connection = kept or await self._connect()
            exchange.progress_s = perf_counter()
            connection.send(exchange, data)
            is_done = False
            try:
                await self._wait(exchange)
                is_done = True
            except ExchangeError as error:
                if error.kind != "dropped" or kept is None or kept.has_answered:
                    raise
            finally:
                if not is_done:
                    connection.exchange = None  # no request waits for it: its end does not matter
                    connection.close()
            if is_done:
                if connection.is_open:
                    self._idle.append(connection)
                return
            exchange.renew()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    _Connection, self.address.host, self.address.port, ssl=self._tls
                )
        except TimeoutError as error:
            raise ExchangeError("connect", f"no connection in {CONNECT_TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise ExchangeError("connect", error.strerror or str(error)) from error
        return connection

    async def _wait(self, exchange: Exchange) -> None:
        """Wait for the end; ends the exchange when no data has arrived for too long."""
        while True:
            left_s = exchange.progress_s + self._timeout_s - perf_counter()
            if left_s <= 0:
                exchange.fail("timeout", f"nothing came for {self._timeout_s:g} s")
            done, _ = await asyncio.wait((exchange.done,), timeout=max(left_s, 0))
            if done:
                exchange.done.result()
                return
