"""The server's log: one line per event, as text or JSON, with text of clients escaped.

    2026-01-31T12:00:00.123Z INFO serve request_id=... status=200 ... message

A record may carry fields (`extra={"fields": {...}}`); text puts them before the message, JSON makes
them keys. Prompts and completions are never among them, except with `--log-prompts`.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from starlette.requests import Request

from tiercel.serve.http.errors import escaped

LogFormat = Literal["text", "json"]
MAX_LINE_CHARS: Final = 64 << 10  # a traceback is one escaped line too
_ERASE_LINE: Final = "\r\x1b[K"
_LEAST_COLUMNS: Final = 20
REQUEST_LOG: Final = "tiercel.request_log"
PROBES: Final = frozenset({"/health", "/ready", "/metrics", "/version"})
_LOGGER: Final = logging.getLogger("tiercel.serve.request")


@dataclass(slots=True)
class RequestLog:
    """Fields of the line at the end of a request; the route that generates fills them in.

    Attributes:
        request_id: id of the HTTP request.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens found in the prefix cache.
        completion_tokens: tokens of all completions.
        queue_ms: time until the first step.
        ttft_ms: time until the first token.
        finish_reason: finish reason of the first completion.
        error: code of the error that ended the request.
        trace_id: id of the request's trace, if traces are sent.
    """

    request_id: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    trace_id: str | None = None


def request_log(request: Request) -> RequestLog:
    """The line of this request, to be filled in."""
    line: RequestLog = request.scope[REQUEST_LOG]
    return line


def log_request(scope: Mapping[str, object], line: RequestLog, status: int, total_s: float) -> None:
    """Write the line of a request that has ended; for probes only at the level debug."""
    path = str(scope["path"])
    level = logging.DEBUG if path in PROBES else logging.INFO
    if not _LOGGER.isEnabledFor(level):
        return
    fields: dict[str, object] = {
        "request_id": line.request_id,
        "method": scope["method"],
        "path": path,
        "status": status,
        **{name: getattr(line, name) for name in RequestLog.__dataclass_fields__},
        "total_ms": round(total_s * 1000, 1),
    }
    present = {name: value for name, value in fields.items() if value is not None}
    _LOGGER.log(level, "request", extra={"fields": present})


class TextFormatter(logging.Formatter):
    """`time LEVEL source key=value ... message`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        fields = getattr(record, "fields", {})
        shown = "".join(f"{name}={_value(value)} " for name, value in fields.items())
        source = record.name.removeprefix("tiercel.")
        text = f"{shown}{_message(self, record)}"
        return f"{_time(record)} {record.levelname} {source} {text}"


class JsonFormatter(logging.Formatter):
    """The same as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": _time(record),
            "level": record.levelname,
            "source": record.name.removeprefix("tiercel."),
            **getattr(record, "fields", {}),
            "message": _message(self, record),
        }
        return msgspec.json.encode(line, enc_hook=str).decode()


def _time(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    text = escaped(str(value), 500)
    return text if text and not set(text) & set(' "=') else f'"{text.replace(chr(34), chr(39))}"'


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info is not None and record.exc_info[0] is not None:
        text = f"{text}\n{formatter.formatException(record.exc_info)}"
    return escaped(text, MAX_LINE_CHARS)


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error; a line that cannot be written is dropped silently.

    A terminal may show a last line that is not part of the log and is rewritten.
    """

    _status = ""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Nothing: a closed pipe at standard error must not stop the server."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log line above the status line."""
        status = self._status
        self._rewrite("")
        super().emit(record)
        self._rewrite(status)

    def show_status(self, text: str) -> None:
        """Rewrite the status line; "" removes it."""
        with contextlib.nullcontext() if self.lock is None else self.lock:
            self._rewrite(text)

    def _rewrite(self, text: str) -> None:
        if text == self._status:
            return
        self._status = text
        columns = shutil.get_terminal_size().columns
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(_ERASE_LINE + escaped(text, max(_LEAST_COLUMNS, columns) - 1))
            self.stream.flush()


def set_up_logs(level: int, log_format: LogFormat) -> Callable[[str], None]:
    """Send the package's log to standard error, and of the libraries' logs only errors.

    Returns:
        The function that rewrites the status line, for terminals only.
    """
    handler = _Stderr(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    others = max(level, logging.ERROR)
    for name, least in (("tiercel", level), ("uvicorn", others), ("opentelemetry", others)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(least)
    return handler.show_status
