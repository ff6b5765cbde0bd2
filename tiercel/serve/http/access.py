"""Access control as ASGI middleware: API keys, the `Host` header, CORS.

A key is compared by its SHA-256 digest in constant time, and always with every accepted key, so
that the time reveals neither how much of a key was right nor which key it was. `Host` is checked on
loopback: otherwise a web page whose host name resolves to 127.0.0.1 could reach the server through
a browser (DNS rebinding). No `Access-Control-*` header is sent unless an origin is allowed.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tiercel.errors import InvalidRequestError
from tiercel.serve.http.errors import client_error
from tiercel.serve.settings import AccessSettings

LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
# No key needed: probes, and the page, which asks the user for the key.
_OPEN_PATHS: Final = frozenset({"/health", "/ready", "/version", "/", "/favicon.ico"})
_OPEN_PREFIX: Final = "/ui/"
_CORS_METHODS: Final = "GET, POST, HEAD, OPTIONS"
# The official clients add headers of their own; a star matches all but `authorization`.
_CORS_HEADERS: Final = "authorization, content-type, x-api-key, x-request-id, *"
_CORS_SECONDS: Final = "600"
_CORS_EXPOSED: Final = b"x-request-id, x-tiercel-ignored, retry-after"
# Keys of the ASGI scope: hex digest of the request's API key, if keys are needed; headers of the
# response, of an error too.
KEY_DIGEST: Final = "tiercel.key_digest"
CORS_ANSWER: Final = "tiercel.cors"


def digest(key: str) -> bytes:
    """The SHA-256 digest of a key, which is all that is stored of it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_known_key(key: bytes, digests: Iterable[bytes]) -> bool:
    """Compare a key with every accepted one."""
    found = hashlib.sha256(key).digest()
    matches = [hmac.compare_digest(found, known) for known in digests]
    return any(matches)


class HostMiddleware:
    """Refuses requests to another host name with 403."""

    def __init__(self, app: ASGIApp, access: AccessSettings) -> None:
        self._app = app
        self._hosts = access.allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if its `Host` is one of ours.

        Raises:
            InvalidRequestError: 403, or 400 for HTTP/1.1 without a host.
        """
        if scope["type"] == "http":
            hosts = Headers(scope=scope).getlist("host")
            if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0"):
                raise InvalidRequestError("the request needs one Host header.")
            is_ours = self._hosts is None or not hosts or _host_name(hosts[0]) in self._hosts
            if not is_ours:
                raise client_error(
                    403,
                    "host_not_allowed",
                    "This server does not answer to the name in the Host header.",
                    hint="Use localhost, or start it with --allowed-host NAME.",
                )
        await self._app(scope, receive, send)


def _host_name(host: str) -> str:
    """Lower case, without port, brackets and final dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


class CorsMiddleware:
    """Lets pages of allowed origins read the responses, and answers their preflight requests."""

    def __init__(self, app: ASGIApp, access: AccessSettings) -> None:
        self._app = app
        self._origins = frozenset(access.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and note the headers of its response; a preflight ends here."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        allowed = self._allowed(origin)
        if allowed is None:
            await self._app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            preflight = {
                "access-control-allow-origin": allowed,
                "access-control-allow-methods": _CORS_METHODS,
                "access-control-allow-headers": _CORS_HEADERS,
                "access-control-max-age": _CORS_SECONDS,
                "vary": "origin",
            }
            await Response(status_code=204, headers=preflight)(scope, receive, send)
            return

        scope[CORS_ANSWER] = (
            (b"access-control-allow-origin", allowed.encode("latin-1")),
            (b"access-control-expose-headers", _CORS_EXPOSED),
            (b"vary", b"origin"),
        )
        await self._app(scope, receive, send)

    def _allowed(self, origin: str | None) -> str | None:
        """The value of Access-Control-Allow-Origin; credentials are never allowed with it."""
        if origin is None:
            return None
        if "*" in self._origins:
            return "*"
        return origin if origin in self._origins else None


class ApiKeyMiddleware:
    """Requires an API key, as `Authorization: Bearer` or `x-api-key`."""

    def __init__(self, app: ASGIApp, access: AccessSettings) -> None:
        self._app = app
        self._digests = access.key_digests
        self._open = _OPEN_PATHS | ({"/metrics"} if access.is_metrics_open else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it has a key or needs none.

        Raises:
            InvalidRequestError: 401.
        """
        if scope["type"] == "http" and self._digests and not self._is_open(scope["path"]):
            keys = list(_keys(scope))
            matches = [is_known_key(key, self._digests) for key in keys]
            if not any(matches):
                raise client_error(
                    401,
                    "invalid_api_key",
                    "The API key is wrong." if keys else "An API key is needed.",
                    hint="Send Authorization: Bearer KEY, or x-api-key: KEY.",
                )
            known = keys[matches.index(True)]
            scope[KEY_DIGEST] = hashlib.sha256(known).hexdigest()
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open or path.startswith(_OPEN_PREFIX)


def _keys(scope: Scope) -> Iterable[bytes]:
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield value
        elif name == b"authorization":
            kind, _, key = value.partition(b" ")
            if kind.lower() == b"bearer":
                yield key.strip()
