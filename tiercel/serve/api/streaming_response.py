"""From a generation to the HTTP response: plain or as an event stream, keep-alives, disconnects.

A client that disconnects is noticed while its prompt is rendered, while the request waits, while it
is computed and while the response is sent: the work for it is cancelled, also in the engine. Status
and headers of a stream are sent when the request is admitted, so every refusal is a plain response.
A later failure is an event, after which the stream ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Final, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiercel.errors import InternalError, TiercelError
from tiercel.serve.generation.generation import Generation
from tiercel.serve.generation.output_queue import CompletionDelta
from tiercel.serve.http import sse
from tiercel.serve.http.errors import JSON_TYPE
from tiercel.serve.http.logs import request_log
from tiercel.serve.http.protocol import drop_connection
from tiercel.serve.state import request_id, server_state

T = TypeVar("T")
_LOG: Final = logging.getLogger(__name__)
# Silence before a keep-alive, while queued too; proxies end a silent response after 30 to 60 s.
KEEP_ALIVE_SECONDS: Final = 15.0
# An entry has up to 20 tokens: more entries are encoded in a thread; these take 5 ms on the loop.
MAX_LOOP_LOGPROBS: Final = 256
CLIENT_CLOSED: Final = 499  # status of a request whose client has left, for the log alone


class ResponseWriter(Protocol):
    """The wire format of one response; `write_` methods return the bytes of whole events."""

    def make_body(self, generation: Generation, completions: Sequence[CompletionDelta]) -> object:
        """The body of a plain response, for JSON."""

    def write_start(self, generation: Generation) -> bytes:
        """The first events of the stream."""

    def write_delta(self, generation: Generation, delta: CompletionDelta) -> bytes:
        """The events of one delta; may be none."""

    def write_end(self, generation: Generation) -> bytes:
        """The last events of a complete stream."""

    def write_error(self, error: TiercelError) -> bytes:
        """The last event of a stream that failed."""

    def write_keep_alive(self) -> bytes:
        """An event or comment that tells proxies that the stream is alive."""


async def while_connected(request: Request, work: Coroutine[None, None, T]) -> T | Response:
    """Run work for a client until the client disconnects.

    Args:
        request: request whose body has been read.
        work: work that is cancelled when the client disconnects.

    Returns:
        The result of `work`, or an empty response that is never sent.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_disconnected(request.receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        disconnect.cancel()
        task.cancel()
    await asyncio.wait((task,))
    server_state(request).metrics.count_disconnect()
    return Response(status_code=CLIENT_CLOSED)


async def _wait_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(
    request: Request, generation: Generation, writer: ResponseWriter, *, is_stream: bool
) -> Response:
    """Run a generation and make the response; call it inside `while_connected`.

    Raises:
        TiercelError: the engine refused the request, or a plain response ended early.
    """
    generation.start()
    if is_stream:
        return EventStreamResponse(request, generation, writer)
    try:
        completions = await generation.wait_finished()
        if _are_long(generation, completions):
            data = await server_state(request).run_in_thread(
                _encode, writer, generation, completions
            )
        else:
            data = _encode(writer, generation, completions)
    finally:
        generation.report(request_log(request))
    return Response(data, media_type=JSON_TYPE)


def _are_long(generation: Generation, deltas: Sequence[CompletionDelta]) -> bool:
    num_logprobs = sum(len(delta.logprobs) for delta in deltas) + generation.num_prompt_logprobs
    return num_logprobs > MAX_LOOP_LOGPROBS


def _encode(
    writer: ResponseWriter, generation: Generation, completions: Sequence[CompletionDelta]
) -> bytes:
    return msgspec.json.encode(writer.make_body(generation, completions))


class EventStreamResponse(Response):
    """A response of server-sent events."""

    def __init__(self, request: Request, generation: Generation, writer: ResponseWriter) -> None:
        super().__init__()
        self._state = server_state(request)
        self._request_id = request_id(request)
        self._log = request_log(request)
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the end, a failure, or a disconnect."""
        body = asyncio.ensure_future(self._send_all(send))
        disconnect = asyncio.ensure_future(_wait_disconnected(receive))
        try:
            await asyncio.wait((body, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not body.done():
                self._state.metrics.count_disconnect()
            else:
                body.result()
        except SlowClientError:
            self._log.error = "slow_client"
            self._state.metrics.count_disconnect()
            drop_connection(scope)
        finally:
            body.cancel()
            disconnect.cancel()
            self._generation.report(self._log)

    async def _send_all(self, send: Send) -> None:
        """Send the whole response.

        Raises:
            SlowClientError: the client reads nothing.
        """
        connection = _Connection(send, self._state.settings.slow_client_seconds)
        write = connection.write
        await send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
        generation, writer = self._generation, self._writer
        try:
            await write(writer.write_start(generation))
            while deltas := await self._next_deltas(connection):
                if _are_long(generation, deltas):
                    data = await self._state.run_in_thread(self._write, deltas)
                else:
                    data = self._write(deltas)
                await write(data)
            tail = writer.write_end(generation)
        except TiercelError as error:
            tail = self._fail(error)
        except SlowClientError:
            raise
        except Exception:  # noqa: BLE001 - the request boundary, once the head is sent
            _LOG.exception("a stream failed", extra={"fields": {"request_id": self._request_id}})
            tail = self._fail(InternalError("the stream failed."))
        await write(tail, is_last=True)

    def _write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        return b"".join([self._writer.write_delta(self._generation, delta) for delta in deltas])

    async def _next_deltas(self, connection: _Connection) -> list[CompletionDelta]:
        while True:
            try:
                async with asyncio.timeout_at(connection.last_write_s + KEEP_ALIVE_SECONDS):
                    return await self._generation.next_deltas()
            except TimeoutError:
                await connection.write(self._writer.write_keep_alive())

    def _fail(self, error: TiercelError) -> bytes:
        self._log.error = error.code
        return self._writer.write_error(error)


class SlowClientError(Exception):
    """The client has read nothing for longer than allowed."""


class _Connection:
    """Writes to the connection of a client, which must keep reading.

    Attributes:
        last_write_s: event-loop time of the last write.
    """

    def __init__(self, send: Send, limit_s: float) -> None:
        self._send = send
        self._limit_s = limit_s
        self.last_write_s = asyncio.get_running_loop().time()

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Write after the previous bytes are nearly sent."""
        if not data and not is_last:
            return
        try:
            async with asyncio.timeout(self._limit_s):
                await self._send(
                    {"type": "http.response.body", "body": data, "more_body": not is_last}
                )
        except TimeoutError:
            raise SlowClientError from None
        self.last_write_s = asyncio.get_running_loop().time()
