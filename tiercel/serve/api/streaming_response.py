"""From a generation to the HTTP answer: plain or as events, and what ends it early.

A client that leaves is noticed while its prompt is rendered, while it waits, while it is computed
and while it is answered: whoever works for it is cancelled, and the engine told. Status and headers
of a stream are sent once the request is admitted, so every refusal is a plain answer; what goes
wrong later is an event, behind which the stream breaks off.
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
# Of a stream without news, queued requests included; proxies end a silent answer after 30 to 60 s.
KEEP_ALIVE_SECONDS: Final = 15.0
# Each names up to 20 tokens: more of them are written in a thread, some 5 ms on the loop.
MAX_LOOP_LOGPROBS: Final = 256
CLIENT_CLOSED: Final = 499  # the status, for the log alone, of a request whose client has left


class ResponseWriter(Protocol):
    """The wire format of one answer; each method gives the bytes of whole events."""

    def make_body(self, generation: Generation, answers: Sequence[CompletionDelta]) -> object:
        """The whole answer, for JSON."""

    def write_start(self, generation: Generation) -> bytes:
        """What opens the stream."""

    def write_delta(self, generation: Generation, delta: CompletionDelta) -> bytes:
        """What one delta adds; may be nothing."""

    def write_end(self, generation: Generation) -> bytes:
        """What closes a stream that is complete."""

    def write_error(self, error: TiercelError) -> bytes:
        """What a stream that breaks off ends with."""

    def write_keep_alive(self) -> bytes:
        """What tells proxies that the stream lives."""


async def while_connected(request: Request, work: Coroutine[None, None, T]) -> T | Response:
    """Work for a client as long as it is there.

    Args:
        request: its body has been read.
        work: cancelled when the client leaves.

    Returns:
        What `work` gives, or an empty response that nobody will see.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        watch.cancel()
        task.cancel()
    await asyncio.wait((task,))
    server_state(request).metrics.count_disconnect()
    return Response(status_code=CLIENT_CLOSED)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(
    request: Request, generation: Generation, writer: ResponseWriter, *, is_stream: bool
) -> Response:
    """Run a generation and answer; call it inside `while_connected`.

    Raises:
        TiercelError: refused by the engine, or ended early and not streamed.
    """
    generation.start()
    if is_stream:
        return EventStreamResponse(request, generation, writer)
    try:
        answers = await generation.wait_finished()
        if _are_long(generation, answers):
            data = await server_state(request).run_in_thread(_encode, writer, generation, answers)
        else:
            data = _encode(writer, generation, answers)
    finally:
        generation.report(request_log(request))
    return Response(data, media_type=JSON_TYPE)


def _are_long(generation: Generation, deltas: Sequence[CompletionDelta]) -> bool:
    num_logprobs = sum(len(delta.logprobs) for delta in deltas) + generation.num_prompt_logprobs
    return num_logprobs > MAX_LOOP_LOGPROBS


def _encode(
    writer: ResponseWriter, generation: Generation, answers: Sequence[CompletionDelta]
) -> bytes:
    return msgspec.json.encode(writer.make_body(generation, answers))


class EventStreamResponse(Response):
    """An answer as server-sent events."""

    def __init__(self, request: Request, generation: Generation, writer: ResponseWriter) -> None:
        super().__init__()
        self._state = server_state(request)
        self._request_id = request_id(request)
        self._line = request_log(request)
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until all is said, something fails, or the client leaves."""
        body = asyncio.ensure_future(self._send_all(send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((body, watch), return_when=asyncio.FIRST_COMPLETED)
            if not body.done():
                self._state.metrics.count_disconnect()
            else:
                body.result()
        except SlowClientError:
            self._line.error = "slow_client"
            self._state.metrics.count_disconnect()
            drop_connection(scope)
        finally:
            body.cancel()
            watch.cancel()
            self._generation.report(self._line)

    async def _send_all(self, send: Send) -> None:
        """Send the whole answer.

        Raises:
            SlowClientError: the reader takes nothing.
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
            tail = self._broken(error)
        except SlowClientError:
            raise
        except Exception:  # noqa: BLE001 - the request boundary, once the head is sent
            _LOG.exception("a stream failed", extra={"fields": {"request_id": self._request_id}})
            tail = self._broken(InternalError("the stream failed."))
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

    def _broken(self, error: TiercelError) -> bytes:
        self._line.error = error.code
        return self._writer.write_error(error)


class SlowClientError(Exception):
    """The reader has taken nothing for as long as it may."""


class _Connection:
    """Writes to the connection, as long as its reader takes something.

    Attributes:
        last_write_s: time of the event loop when bytes were last written.
    """

    def __init__(self, send: Send, limit_s: float) -> None:
        self._send = send
        self._limit_s = limit_s
        self.last_write_s = asyncio.get_running_loop().time()

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Write, once what was written before is nearly gone."""
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
