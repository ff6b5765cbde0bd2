"""A model hub on loopback: the three routes that a download uses, and faults on demand."""

import asyncio
import hashlib
import re

from starlette.applications import Starlette
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1000  # bytes; larger files are in large-file storage, after a redirect


class Place:
    """An application whose hub changes from test to test, so that one server start is enough."""

    def __init__(self):
        self.hub = None

    async def __call__(self, scope, receive, send):
        await self.hub(scope, receive, send)


def git_digest(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """Repositories as {name: {file: bytes}}, and their faults.

    Attributes:
        requests: (path, headers) of all requests.
        refusals: repository or file -> (status, X-Error-Code, X-Error-Message).
        cut_after: file -> list of byte counts; each answer takes one and breaks off there.
        served_instead: file -> other bytes than the listing promises.
        storage: address of the large-file storage; None for this server.
        has_ranges: whether Range is honoured.
        range_shifts: offsets; each partial answer takes one and begins so many bytes too late.
        pause_s: pause between pieces of 64 KiB.
        listing: body of the listing instead of the right one.
        silence_s: delay before a listing is sent.
    """

    def __init__(self, repositories):
        self.repositories = repositories
        self.revisions = {"main": COMMIT, COMMIT: COMMIT}
        self.requests = []
        self.refusals = {}
        self.cut_after = {}
        self.served_instead = {}
        self.storage = None
        self.has_ranges = True
        self.range_shifts = []
        self.pause_s = 0.0
        self.listing = None
        self.silence_s = 0.0

        model = "{owner}/{name}"
        self._app = Starlette(
            routes=[
                Route(f"/api/models/{model}/revision/{{revision:path}}", self._info),
                Route(f"/{model}/resolve/{{revision}}/{{file:path}}", self._resolve),
                Route("/storage/{owner}/{name}/{file:path}", self._storage),
            ]
        )

    async def __call__(self, scope, receive, send):
        await self._app(scope, receive, send)

    def asked(self, kind):
        """The requests whose path contains `kind`."""
        return [headers for path, headers in self.requests if kind in path]

    def _refusal(self, request, *keys):
        self.requests.append((request.url.path, dict(request.headers)))
        for key in keys:
            if key in self.refusals:
                status, code, message = self.refusals[key]
                headers = {"X-Error-Code": code, "X-Error-Message": message}
                return Response(message, status, {k: v for k, v in headers.items() if v})
        return None

    async def _info(self, request):
        owner, name, revision = (request.path_params[k] for k in ("owner", "name", "revision"))
        await asyncio.sleep(self.silence_s)
        refusal = self._refusal(request, f"{owner}/{name}")
        if refusal is not None:
            return refusal
        files = self.repositories.get(f"{owner}/{name}")
        if files is None:
            return _refuse(404, "RepoNotFound", "Repository not found")
        if revision not in self.revisions:
            return _refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if self.listing is not None:
            return Response(self.listing, media_type="application/json")
        siblings = [self._sibling(file, data) for file, data in files.items()]
        return JSONResponse(
            {"id": f"{owner}/{name}", "sha": self.revisions[revision], "siblings": siblings}
        )

    def _sibling(self, file, data):
        entry = {"rfilename": file, "size": len(data), "blobId": git_digest(data)}
        if len(data) > LARGE:
            digest = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
        return entry

    async def _resolve(self, request):
        owner, name, file = (request.path_params[key] for key in ("owner", "name", "file"))
        refusal = self._refusal(request, file)
        if refusal is not None:
            return refusal
        data = self.repositories[f"{owner}/{name}"].get(file)
        if data is None:
            return _refuse(404, "EntryNotFound", "Entry not found")
        if len(data) > LARGE:
            base = self.storage if self.storage is not None else str(request.base_url)
            return RedirectResponse(f"{base.rstrip('/')}/storage/{owner}/{name}/{file}", 302)
        return self._bytes(request, file, data)

    async def _storage(self, request):
        owner, name, file = (request.path_params[key] for key in ("owner", "name", "file"))
        self.requests.append((request.url.path, dict(request.headers)))
        return self._bytes(request, file, self.repositories[f"{owner}/{name}"][file])

    def _bytes(self, request, file, data):
        data = self.served_instead.get(file, data)
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("range", ""))
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        status = 200
        if wanted and self.has_ranges:
            start, status = int(wanted.group(1)), 206
            if start >= len(data):
                return Response(status_code=416)
            start += self.range_shifts.pop(0) if self.range_shifts else 0
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        rest = data[start:]
        headers["Content-Length"] = str(len(rest))
        cuts = self.cut_after.get(file)
        if cuts:
            rest = rest[: cuts.pop(0)]
        return StreamingResponse(self._pieces(rest), status, headers)

    async def _pieces(self, data):
        for begin in range(0, len(data), 1 << 16):
            yield data[begin : begin + (1 << 16)]
            await asyncio.sleep(self.pause_s)


def _refuse(status, code, message):
    return Response(message, status, {"X-Error-Code": code, "X-Error-Message": message})
