"""The web page at `/`: files of the package, read once and served from memory by exact name.

No name in a request ever reaches the file system: a name that is not in the table is 404.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tiercel.serve.http.errors import client_error

_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_INDEX: Final = "index.html"
_ICON: Final = "favicon.svg"
# A packaged library is in a directory of its version, so the content of its URLs never changes.
_VERSIONED: Final = re.compile(r"[a-z]+-[0-9.]+/")
_IMMUTABLE: Final = "public, max-age=31536000, immutable"
_REVALIDATED: Final = "no-cache"  # at each use; the response is mostly 304
_POLICY: Final = (
    "default-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'none';"
    " object-src 'none'; require-trusted-types-for 'script'"
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str
    cache_control: str


@functools.cache
def read_files() -> Mapping[str, StaticFile]:
    """The files of the page by name; the name of a library's file begins with its directory."""
    files = {}
    for name, entry in _entries(resources.files("tiercel.serve").joinpath("web"), ""):
        kind = _MEDIA_TYPES.get(f".{name.rpartition('.')[2]}")
        if kind is not None:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            cache_control = _IMMUTABLE if _VERSIONED.match(name) else _REVALIDATED
            files[name] = StaticFile(content, kind, etag, cache_control)
    return files


def _entries(directory: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    """All files under a directory with their names from there."""
    for entry in directory.iterdir():
        if entry.is_dir():
            yield from _entries(entry, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry


def routes() -> list[BaseRoute]:
    """The routes of the page."""
    files = read_files()

    async def index(request: Request) -> Response:
        return _answer(request, files.get(_INDEX))

    async def icon(request: Request) -> Response:
        return _answer(request, files.get(_ICON))

    async def file(request: Request) -> Response:
        return _answer(request, files.get(request.path_params["name"]))

    # Browsers request /favicon.ico by themselves where a document names no icon, such as /metrics.
    return [Route("/", index), Route("/favicon.ico", icon), Route("/ui/{name:path}", file)]


def _answer(request: Request, file: StaticFile | None) -> Response:
    if file is None:
        raise client_error(404, "not_found", "The page has no such file.")
    headers = {
        "content-security-policy": _POLICY,
        "cache-control": file.cache_control,
        "etag": file.etag,
        "referrer-policy": "no-referrer",
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
