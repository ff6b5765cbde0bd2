"""uvicorn's HTTP protocol with the limits that it lacks.

uvicorn itself accepts a head of any size, and a head or body that never ends keeps its connection
for ever. Here bytes and headers are counted until the head is complete, and three timers run: one
from the first byte of a head (or from the connection) to its end, one between two chunks of a body,
one over the whole body. Every refusal is our JSON object, and then the connection is closed.

    idle -> head -> body -> idle
     ^ a keep-alive connection waits here, under uvicorn's own timeout

A connection that is refused while its client still sends is not closed immediately: the kernel
would answer unread bytes with a reset, which can overtake our response. It is shut for writing, and
its input is discarded for `LINGER_SECONDS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import httptools
import msgspec
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState as UvicornState

from tiercel.params import Limits
from tiercel.serve.http.errors import client_error, error_body, new_request_id

LINGER_SECONDS: Final = 2.0
KEEP_ALIVE_SECONDS: Final = 75  # timeout of an idle connection, as proxies expect it
_SLICE_BYTES: Final = 4 << 10  # how far a head may exceed its limit before it is noticed
EXTRA_CONNECTIONS: Final = 16  # beyond the limit: they get a 503; further ones are just closed
_NOT_HTTP: Final = "the request is not HTTP/1.1."
_DROP: Final = "tiercel.drop"
_UPGRADE_HEADER: Final = b"upgrade"
_CODES: Final = {
    400: "invalid_http",
    408: "request_timeout",
    431: "headers_too_large",
    503: "too_many_connections",
}


def drop_connection(scope: Scope) -> None:
    """Close a connection immediately; bytes that were written but not sent are lost."""
    drop: Callable[[], None] | None = scope.get(_DROP)
    if drop is not None:
        drop()


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: Limits,
        on_refused: Callable[[str], None],
    ) -> None:
        """Set up as uvicorn does; `on_refused` is called with the error code of each refusal."""
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._tell_refused = on_refused
        self._is_in_head = True
        self._offers_upgrade = False  # of a protocol upgrade, in the head that was just read
        self._head_bytes = 0
        self._framing_bytes = 0  # since the last byte of a body: sizes of chunks, trailers
        self._deadline: asyncio.TimerHandle | None = None  # of the head, or of the whole body
        self._gap: asyncio.TimerHandle | None = None  # to the next chunk of the body
        self._cycles: list[RequestResponseCycle] = []
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or refuse it beyond the limit."""
        lingering = _LingeringTransport(transport, self.loop, self._has_unread)
        super().connection_made(lingering)  # type: ignore[arg-type]
        limit = self._limits.max_connections
        num_open = len(self.server_state.connections)
        if num_open > limit + EXTRA_CONNECTIONS:
            self._is_refused = True
            transport.abort()
        elif num_open > limit:
            self._refuse(503, f"the server has {limit} connections already.")
        else:
            self._arm(self._limits.max_head_seconds, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request on the lost connection, pipelined ones too."""
        self._disarm()
        for cycle in self._cycles:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse new bytes."""
        if self._is_refused or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if self._is_in_head and not self._head_bytes and self._deadline is None:
            self._arm(self._limits.max_head_seconds, self._on_late_head)
        # Data may end a body and hold several heads: only heads count, so slice it within a head.
        start = 0
        while start < len(data) and not self._is_refused:
            end = start + _SLICE_BYTES if self._is_in_head else len(data)
            chunk = data[start:end]
            self._feed(chunk)
            start += len(chunk)
        if not self._is_in_head and not self._is_refused:
            self._arm_gap()

    def _feed(self, chunk: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(chunk)
        else:
            self._framing_bytes += len(chunk)
        try:
            self.parser.feed_data(chunk)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offers_upgrade:
                self._decline_upgrade(chunk[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._is_refused:
                self.send_400_response(_NOT_HTTP)
            return
        if self._is_in_head and self._head_bytes > self._limits.max_header_bytes:
            self._refuse_head()
        if not self._is_in_head and self._framing_bytes > self._limits.max_header_bytes:
            limit = self._limits.max_header_bytes
            self._refuse(431, f"the trailers of the request have more than {limit} bytes.")

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parse the head again without its upgrade header, then continue after it.

        Java's client offers HTTP/2 with each first request. The parser takes such a head for the
        end of HTTP and would not read the body.
        """
        method = self.parser.get_method()
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != _UPGRADE_HEADER]
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (method, self.url, b"".join(lines))
        self._offers_upgrade = False
        self._head_bytes = 0
        self.parser = httptools.HttpRequestParser(self)
        self._feed(head)
        if rest:
            self.data_received(rest)

    def on_message_begin(self) -> None:
        """A head begins; it may follow a body in the same chunk of data."""
        super().on_message_begin()
        self._head_bytes = self._head_bytes or 1
        if self._deadline is None:
            self._arm(self._limits.max_head_seconds, self._on_late_head)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the head is complete; a trailer after the body is ignored."""
        if not self._is_in_head:
            return
        if len(self.headers) >= self._limits.max_headers:
            limit = self._limits.max_headers
            self._refuse(431, f"the request has more than {limit} headers.")
            raise _RefusedError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: the request begins."""
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._refuse(400, _NOT_HTTP)
            raise _RefusedError
        if any(n == _UPGRADE_HEADER and v.lower() == b"websocket" for n, v in self.headers):
            self._refuse(400, "websockets are not served.")
            raise _RefusedError
        if self.parser.should_upgrade() and any(n == _UPGRADE_HEADER for n, _ in self.headers):
            self._offers_upgrade = True  # the parser stops here, and `_feed` continues
            return
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._refuse_head()
            raise _RefusedError
        self._is_in_head = False
        self._head_bytes = self._framing_bytes = 0
        self.scope[_DROP] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _Unframed(self.cycle)  # type: ignore[method-assign]
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        self._arm(self._limits.max_body_seconds, self._on_late_body)

    def on_body(self, body: bytes) -> None:
        """A chunk of the body has arrived."""
        self._framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is complete; the next head follows."""
        if self._offers_upgrade:
            return
        super().on_message_complete()
        self._is_in_head = True
        self._disarm()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that cannot be parsed."""
        self._refuse(400, msg)

    def _has_unread(self) -> bool:
        return not self._is_in_head or self._is_refused

    def _refuse_head(self) -> None:
        limit = self._limits.max_header_bytes
        self._refuse(431, f"the head of the request has more than {limit} bytes.")

    def _refuse(self, status: int, message: str) -> None:
        """Send the error, unless a response is under way, and close the connection."""
        if self._is_refused:
            return
        self._is_refused = True
        self._tell_refused(_CODES[status])
        self._disarm()
        waiting = [cycle for cycle in self._cycles if not cycle.response_complete]
        if not any(cycle.response_started for cycle in waiting) and len(waiting) <= 1:
            self.transport.write(_answer(status, message, self.server_state.default_headers))
        for cycle in waiting:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _arm(self, seconds: float, on_time: Callable[[], None]) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, on_time)

    def _arm_gap(self) -> None:
        if self._gap is not None:
            self._gap.cancel()
        self._gap = self.loop.call_later(self._limits.max_body_gap_seconds, self._on_body_gap)

    def _disarm(self) -> None:
        for timer in (self._deadline, self._gap):
            if timer is not None:
                timer.cancel()
        self._deadline = self._gap = None

    def _on_late_head(self) -> None:
        if any(not cycle.response_complete for cycle in self._cycles):
            # A response is under way; some clients send a stray line break after a request.
            self._arm(self._limits.max_head_seconds, self._on_late_head)
        elif self._head_bytes:
            seconds = self._limits.max_head_seconds
            self._refuse(408, f"the head of the request took more than {seconds:g} seconds.")
        else:
            self._is_refused = True
            self.transport.close()  # there was no request, so there is no response

    def _on_late_body(self) -> None:
        seconds = self._limits.max_body_seconds
        self._refuse_body(f"the body of the request took more than {seconds:g} seconds.")

    def _on_body_gap(self) -> None:
        seconds = self._limits.max_body_gap_seconds
        self._refuse_body(f"nothing more of the request's body came for {seconds:g} seconds.")

    def _refuse_body(self, message: str) -> None:
        if self.flow.read_paused:  # its reader is late, not the client
            self._arm(self._limits.max_body_seconds, self._on_late_body)
            self._arm_gap()
        else:
            self._refuse(408, message)


class _Unframed:
    """`send` of a cycle whose HTTP/1.0 client knows no chunked encoding.

    A response of unknown length ends with its connection (RFC 9112, section 6.3).
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_no_length = False

    async def __call__(self, message: Any) -> None:
        """Pass a message on, without the chunked encoding that uvicorn would write."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._has_no_length = b"content-length" not in names
            if self._has_no_length:
                cycle.chunked_encoding = False
        elif self._has_no_length:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts
        await self._send(message)


class _RefusedError(Exception):
    """Ends the parser inside one of its callbacks."""


def _answer(status: int, message: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    request_id = new_request_id()
    body = msgspec.json.encode(
        error_body(client_error(status, _CODES[status], message), request_id)
    )
    lines = [
        *headers,
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"connection", b"close"),
    ]
    head = b"".join(b"%b: %b\r\n" % line for line in lines)
    return STATUS_LINE[status] + head + b"\r\n" + body


class _LingeringTransport:
    """A transport whose `close` lets a client that still sends read the response first.

    Args:
        transport: the real transport.
        loop: event loop of the timer.
        has_unread: whether the client may still be sending.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        has_unread: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._has_unread = has_unread
        self._is_closing = False

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def write(self, data: bytes) -> None:
        if not self._is_closing:
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self._is_closing:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()

    def close(self) -> None:
        if self.is_closing():
            return
        self._is_closing = True
        if not self._has_unread() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(LINGER_SECONDS, self._transport.abort)
