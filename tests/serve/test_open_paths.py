"""Which paths need a key, over a table of paths as they arrive: doubled, encoded, with dots."""

import asyncio
import contextlib
import itertools
import json
from urllib.parse import unquote

import pytest

from tests.serve.fake_client import fake_app, running
from tiercel.errors import InvalidRequestError
from tiercel.serve.http.access import ApiKeyMiddleware, digest
from tiercel.serve.http.static_files import read_files
from tiercel.serve.settings import AccessSettings

pytestmark = pytest.mark.reliability

KEY = "sk-right"
OPEN = {"/health", "/ready", "/version", "/", "/favicon.ico"}
PARTS = [
    *("", "ui", "v1", "models", "chat", "completions", "messages", "health", "ready", "version"),
    *("metrics", "props", "tokenize", "openapi.json", "favicon.ico", "app.js", "..", ".", "UI"),
    *("%75i", "ui%2f", "%2e%2e", "ui;x", "ui?x", "x ui", "ui\\"),
]  # fmt: skip


def is_open(path):
    """The rule: probes and the page by their exact names, and what begins with /ui/."""
    return path in OPEN or path[:4] == "/ui/"


def scope_of(raw, headers=(), method="GET"):
    """What a server makes of a request line: the path decoded, nothing else changed."""
    path, _, query = raw.partition("?")
    return {
        "type": "http",
        "method": method,
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"localhost"), *headers],
        "http_version": "1.1",
        "scheme": "http",
    }


async def receive():
    return {"type": "http.request", "body": b"", "more_body": False}


async def call(app, scope):
    """(status, body)."""
    messages = []

    async def send(message):
        messages.append(message)

    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in messages[1:])
    return messages[0]["status"], body


def raw_paths():
    for length in (1, 2, 3):
        for parts in itertools.product(PARTS, repeat=length):
            if length < 3 or "ui" in parts or "" in parts:
                yield "/" + "/".join(parts)


@pytest.mark.parametrize("is_metrics_open", [True, False])
def test_a_path_is_open_by_its_whole_name_or_its_beginning(is_metrics_open):
    passed = []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    settings = AccessSettings(key_digests=(digest(KEY),), is_metrics_open=is_metrics_open)
    check = ApiKeyMiddleware(app, settings)

    async def try_all():
        for raw in raw_paths():
            scope = scope_of(raw)
            passed.clear()
            with contextlib.suppress(InvalidRequestError):
                await check(scope, receive, None)
            path = scope["path"]
            may_pass = is_open(path) or (is_metrics_open and path == "/metrics")
            assert bool(passed) == may_pass, raw

    asyncio.run(try_all())


def test_no_path_without_a_key_reaches_more_than_the_page_and_the_probes():
    """The whole application: what answers 200 without a key is known beforehand."""
    names = read_files()
    allowed = OPEN | {f"/ui/{name}" for name in names}
    paths = [
        *("/v1/x/ui/", "/v1/models/ui/", "/ui/../v1/models", "/ui/%2e%2e/v1/models"),
        *("/ui/..%2fprops", "//v1/models", "/v1//models", "/v1/models/", "/%76%31/models"),
        *("/V1/models", "/v1/models?/ui/", "//ui/app.js", "/ui//app.js", "/UI/app.js"),
        *("/x/ui/app.js", "/ui", "/ui/", "/uix", "/ui%2fapp.js", "//health", "/health/"),
        *("/health?x", "/healthz", "/x/health", "/HEALTH", "/version/x", "//", "/metrics"),
        *("/metrics/", "/props", "/tokenizer_info", "/openapi.json", "/docs", "/v1/models"),
        *(f"/ui/{name}" for name in names),
        *OPEN,
    ]
    access = AccessSettings(key_digests=(digest(KEY),), is_metrics_open=False)

    async def ask_all():
        app = fake_app(access=access)
        async with running(app):
            for raw in paths:
                scope = scope_of(raw)
                status, body = await call(app, scope)
                code = "" if status == 200 else json.loads(body)["error"]["code"]
                path = scope["path"]
                if path in allowed or path == "/ui/app.js":
                    assert status == 200, raw
                elif is_open(path):
                    assert (status, code) == (404, "not_found"), raw
                else:
                    assert (status, json.loads(body)["error"]["code"]) == (
                        401,
                        "invalid_api_key",
                    ), raw
            for header in ((b"authorization", b"Bearer sk-right"), (b"x-api-key", b"sk-right")):
                status, _ = await call(app, scope_of("/v1/models", [header]))
                assert status == 200

    asyncio.run(ask_all())


def test_every_method_needs_the_key():
    access = AccessSettings(key_digests=(digest(KEY),))

    async def ask_all():
        app = fake_app(access=access)
        async with running(app):
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
                status, _ = await call(app, scope_of("/v1/completions", method=method))
                assert status == 401, method

    asyncio.run(ask_all())
