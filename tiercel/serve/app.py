"""The ASGI application: its routes, the middleware around them, and the engine monitor.

    RequestMiddleware -> HostMiddleware -> CorsMiddleware -> ApiKeyMiddleware -> router -> route

`RequestMiddleware` gives each request its id, turns every error into a response in the format of
its route, and writes the log line. It is the only code that catches every exception of a route.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import AsyncIterator, Mapping
from time import perf_counter
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiercel.errors import InternalError, TiercelError
from tiercel.serve.api import info_routes, tokenize_routes
from tiercel.serve.api.anthropic import messages as anthropic
from tiercel.serve.api.openai import chat as openai_chat
from tiercel.serve.api.openai import completions as openai_completions
from tiercel.serve.api.openai import embeddings, responses
from tiercel.serve.api.scoring import decisions, rerank, score
from tiercel.serve.http import openapi, static_files
from tiercel.serve.http.access import CORS_ANSWER, ApiKeyMiddleware, CorsMiddleware, HostMiddleware
from tiercel.serve.http.errors import (
    anthropic_error_response,
    client_error,
    error_response,
    escaped,
    new_request_id,
)
from tiercel.serve.http.ignored_fields import ignored_header
from tiercel.serve.http.logs import REQUEST_LOG, RequestLog, log_request
from tiercel.serve.lifecycle.engine_monitor import EngineMonitor
from tiercel.serve.state import ServerState

# Each has `routes` and their `DOCS`. The router tries them in this order: probes come first.
_MODULES: Final = (
    info_routes,
    tokenize_routes,
    openai_chat,
    openai_completions,
    responses,
    anthropic,
    embeddings,
    score,
    rerank,
    decisions,
)
_LOG: Final = logging.getLogger(__name__)
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_ANTHROPIC_PATHS: Final = "/v1/messages"
_SHOWN_CHARS: Final = 100


def create_app(state: ServerState) -> Starlette:
    """Make the application of a state; `app.state.server` is that state."""
    access = state.settings.access
    app = Starlette(
        routes=_routes(state),
        middleware=[
            Middleware(RequestMiddleware, state=state),
            Middleware(HostMiddleware, access=access),
            Middleware(CorsMiddleware, access=access),
            Middleware(ApiKeyMiddleware, access=access),
        ],
        exception_handlers={HTTPException: _raise_again},
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


def _routes(state: ServerState) -> list[BaseRoute]:
    """All routes, with `/openapi.json` and the web page."""
    found = [route for module in _MODULES for route in module.routes(state)]
    pages = static_files.routes() if state.settings.has_ui else []
    docs = [doc for module in _MODULES for doc in module.DOCS]
    return [*found, *openapi.routes(docs), *pages]


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    """Start the engine and monitor it; release everything at the end."""
    state: ServerState = app.state.server
    monitor = EngineMonitor(state, _bare_app)
    monitor.start()
    app.state.engine_monitor = monitor
    try:
        yield
    finally:
        await monitor.stop()
        await state.client.close(0.0)
        if state.tracing:
            await state.tracing.close()
        state.close()


def _bare_app(state: ServerState) -> Starlette:
    """The routes without middleware, for warm-up requests."""
    app = Starlette(routes=_routes(state), exception_handlers={HTTPException: _raise_again})
    app.state.server = state
    return app


async def _raise_again(_request: object, error: Exception) -> Response:
    """Leave the router's 404 and 405 to `RequestMiddleware`."""
    raise error


class RequestMiddleware:
    """The outermost middleware: request id, errors, log line, trace."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._metrics = state.metrics
        self._tracing = state.tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request, whatever happens inside."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = perf_counter()
        request_id = _request_id(scope)
        scope["tiercel.request_id"] = request_id
        log = scope[REQUEST_LOG] = RequestLog(request_id)
        span = self._tracing.begin(scope, log) if self._tracing else None
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    *scope.get(CORS_ANSWER, ()),
                    *ignored_header(scope),
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except ClientDisconnect:
            self._metrics.count_disconnect()
            log.error = "client_disconnect"
        except Exception as error:  # the request boundary
            known = _known(error, scope, request_id)
            log.error = known.code
            if status:
                raise  # the response has begun: only closing the connection is left
            self._metrics.count_rejected(known.code)
            answer = _answer(known, scope, request_id)
            if isinstance(error, HTTPException) and error.headers:
                allow = sorted(error.headers.get("Allow", "").split(", "))
                answer.headers["allow"] = ", ".join(allow)
            await answer(scope, receive, send_marked)
        finally:
            if self._tracing and span is not None:
                self._tracing.end(span, scope, log, status, request_id)
            log_request(scope, log, status, perf_counter() - started_s)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            text: str = value.decode()
            return text
    return new_request_id()


def _known(error: Exception, scope: Scope, request_id: str) -> TiercelError:
    """The error as a `TiercelError`; any other goes to the log with its traceback."""
    if isinstance(error, HTTPException):
        return _router_error(error, scope)
    fields: Mapping[str, object] = {"request_id": request_id}
    if isinstance(error, TiercelError):
        if error.http_status == InternalError.http_status and not error.is_final:
            _LOG.error("%s: %s", error.code, error, exc_info=error, extra={"fields": fields})
        return error
    _LOG.error("a request failed", exc_info=error, extra={"fields": fields})
    return InternalError("a request failed.")


def _router_error(error: HTTPException, scope: Scope) -> TiercelError:
    method, path = escaped(scope["method"], 20), escaped(scope["path"], _SHOWN_CHARS)
    if error.status_code == 405:
        return client_error(405, "method_not_allowed", f"{path} does not take {method}.")
    return client_error(404, "not_found", f"There is no route {path}.", hint="See /openapi.json.")


def _answer(error: TiercelError, scope: Scope, request_id: str) -> Response:
    if scope["path"].startswith(_ANTHROPIC_PATHS):
        return anthropic_error_response(error, request_id)
    return error_response(error, request_id)
