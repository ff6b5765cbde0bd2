"""The body of a request as the type of its route, by this server's limits and strictness."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from tiercel.errors import InvalidRequestError
from tiercel.params import Limits
from tiercel.serve.http.body import MAX_LOOP_BYTES, check_headers, decode, read_bytes
from tiercel.serve.http.errors import escaped
from tiercel.serve.http.ignored_fields import note_ignored
from tiercel.serve.state import server_state

T = TypeVar("T")


async def read_body(request: Request, type_: type[T], limits: Limits) -> T:
    """Read, check and decode the body.

    Fields of the outermost object that `type_` does not have are counted and named in a response
    header, and refused if the server is strict.

    Args:
        request: request whose body has not been read.
        type_: a msgspec struct; its integer fields have bounds.
        limits: limits of this server.

    Raises:
        InvalidRequestError: 415 `unsupported_media_type`; 413 `body_too_large`; 400 `invalid_json`
            with the position; 400 `invalid_request` with `param`.
        ClientDisconnect: the client has left.
    """
    check_headers(request.headers, limits)
    data = await read_bytes(request, limits.max_body_bytes)
    state = server_state(request)
    if len(data) > MAX_LOOP_BYTES:
        value, unknown = await state.run_in_thread(decode, data, type_, limits)
    else:
        value, unknown = decode(data, type_, limits)
    if unknown:
        note_ignored(request, unknown)
        state.metrics.count_unknown_fields(len(unknown))
        if state.settings.is_strict:
            raise InvalidRequestError(
                f"{escaped(unknown[0], 200)} is no field of this route.",
                hint="The server was started with --strict-fields.",
                param=unknown[0],
            )
    return value
