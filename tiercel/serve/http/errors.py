"""Errors as HTTP responses: one object for OpenAI's routes, another for Anthropic's.

A client sees what was wrong with its request and no internals: no path, no traceback, no class
name. For a fault of the server it sees the request id alone; the log has the details under that id.

429 `queue_full` is raised by `ipc/client.py` (`check_room`) and `grammar_check.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from tiercel.errors import InvalidRequestError, QueueFullError, TiercelError

MAX_MESSAGE_CHARS: Final = 800  # 500 of the client's own text, and our message around it
JSON_TYPE: Final = "application/json"
THREADS_REFUSED: Final = "thread_unsupported_request"
_SERVER_FAULT: Final = 500

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ErrorObject(msgspec.Struct, frozen=True):
    """The `error` of an OpenAI error body."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The error body of an OpenAI route, and the error event of a stream that failed."""

    error: ErrorObject


class AnthropicErrorDetails(msgspec.Struct, frozen=True):
    """Details for the client: Anthropic's sends the whole conversation when it reads this."""

    error_code: str
    unsupported: list[str]


class AnthropicErrorObject(msgspec.Struct, frozen=True):
    """The `error` of an Anthropic error body."""

    type: str
    message: str
    details: AnthropicErrorDetails | UnsetType = UNSET


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The error body of an Anthropic route, and the `error` event of a stream."""

    error: AnthropicErrorObject
    request_id: str


def new_request_id() -> str:
    """An id for a request without one."""
    return f"req_{secrets.token_hex(12)}"


def client_error(
    http_status: int, code: str, message: str, *, hint: str = "", param: str | None = None
) -> InvalidRequestError:
    """A 4xx error with a status and code of its own."""
    error = InvalidRequestError(message, hint=hint, param=param)
    error.http_status = http_status
    error.code = code
    return error


def unsupported_parameter(param: str, why: str = "is not supported") -> InvalidRequestError:
    """400 `unsupported_parameter`: a known field that this server does not support."""
    return client_error(400, "unsupported_parameter", f"{param} {why}.", param=param)


def overload_error(code: str, message: str, retry_after_s: int) -> QueueFullError:
    """503 for a request that may be sent again: `queue_timeout`, `draining`."""
    error = QueueFullError(message)
    error.http_status = 503
    error.code = code
    error.retry_after_s = retry_after_s
    return error


def escaped(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """Text for a message or a log line: one line, control characters escaped, shortened."""
    is_long = len(text) > max_chars
    clean = "".join(
        char if char.isprintable() else ascii(char)[1:-1] for char in text[: max_chars + 1]
    )
    return f"{clean[: max_chars - 3]}..." if is_long or len(clean) > max_chars else clean


def error_message(error: TiercelError, request_id: str) -> str:
    """The message for the client: message and hint, or for a server fault where to look.

    A final error is worded for clients, whatever its status.
    """
    if error.http_status == _SERVER_FAULT and not error.is_final:
        return f"The server failed at this request. Its log tells more under {request_id}."
    return escaped(f"{error} {error.hint}".strip())


def error_body(error: TiercelError, request_id: str) -> ErrorBody:
    """The error object of OpenAI's routes."""
    status = error.http_status
    kind = _TYPES.get(status, "server_error" if status >= _SERVER_FAULT else "")
    param = getattr(error, "param", None)
    return ErrorBody(
        ErrorObject(
            message=error_message(error, request_id),
            type=kind or "invalid_request_error",
            param=None if param is None else escaped(param, 200),
            code=error.code,
        )
    )


def anthropic_error_body(error: TiercelError, request_id: str) -> AnthropicErrorBody:
    """The error object of Anthropic's routes, which has no `param`: the message names the field."""
    status = error.http_status
    default = "api_error" if status >= _SERVER_FAULT else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(status, default)
    refused = error.code == THREADS_REFUSED
    return AnthropicErrorBody(
        AnthropicErrorObject(
            type=kind,
            message=error_message(error, request_id),
            details=AnthropicErrorDetails(error.code, ["thread"]) if refused else UNSET,
        ),
        request_id,
    )


def error_response(error: TiercelError, request_id: str) -> Response:
    """The response of an OpenAI route to a request that failed before its first byte."""
    return _response(error, error_body(error, request_id))


def anthropic_error_response(error: TiercelError, request_id: str) -> Response:
    """The response of an Anthropic route to a request that failed before its first byte."""
    return _response(error, anthropic_error_body(error, request_id))


def _response(error: TiercelError, body: ErrorBody | AnthropicErrorBody) -> Response:
    headers: dict[str, str] = {}
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.http_status == 413:
        headers["connection"] = "close"  # the rest of the body is not read
    if error.retry_after_s is not None:
        headers["retry-after"] = str(min(60, max(1, error.retry_after_s)))
    if error.is_final:
        headers["x-should-retry"] = "false"  # the OpenAI and Anthropic clients repeat any 5xx
    return Response(
        msgspec.json.encode(body),
        status_code=error.http_status,
        headers=headers,
        media_type=JSON_TYPE,
    )
