"""Keys, hosts, origins, secrets, static files, and what reaches the log."""

import getpass
import json
import logging
import socket
from pathlib import Path

import pytest

from tests.serve.fake_client import FakeClient, ask, fake_info
from tests.serve.harness import status_of
from tests.serve.thread_server import thread_server
from tiercel.serve.http import access
from tiercel.serve.http.access import LOOPBACK_HOSTS, digest, is_known_key, is_loopback
from tiercel.serve.http.logs import JsonFormatter, TextFormatter
from tiercel.serve.http.static_files import read_files
from tiercel.serve.settings import AccessSettings

pytestmark = pytest.mark.reliability

KEY = "sk-correct-horse"
LOCKED = AccessSettings(key_digests=(digest("another"), digest(KEY)), is_metrics_open=False)
LOCAL = AccessSettings(allowed_hosts=LOOPBACK_HOSTS)
OPEN_PATHS = ["/health", "/ready", "/version", "/"]
LOCKED_PATHS = ["/metrics", "/props", "/v1/models", "/tokenizer_info", "/openapi.json", "/nowhere"]


def bearer(key, **headers):
    return {"headers": {"authorization": f"Bearer {key}", **headers}}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY.upper()}"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"authorization": "Bearer schlüssel".encode()},
        {"x-api-key": ""},
        {"x-api-key": KEY[1:]},
        {"x-api-key": "\N{GRINNING FACE}".encode()},
    ],
    ids=repr,
)
def test_a_wrong_key_is_401(headers):
    for response in ask(*[("GET", path, {"headers": headers}) for path in LOCKED_PATHS],
                        access=LOCKED):  # fmt: skip
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"x-api-key": KEY},
        {"x-api-key": "another"},
        {"x-api-key": "wrong", "authorization": f"Bearer {KEY}"},
    ],
    ids=repr,
)
def test_a_right_key_is_taken(headers):
    (response,) = ask(("GET", "/v1/models", {"headers": headers}), access=LOCKED)
    assert response.status_code == 200


def test_probes_and_the_page_need_no_key():
    for response in ask(*[("GET", path) for path in OPEN_PATHS], access=LOCKED):
        assert response.status_code == 200


def test_anthropic_routes_get_401_in_their_shape():
    (response,) = ask(("POST", "/v1/messages", {"json": {}}), access=LOCKED)
    assert response.status_code == 401
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "authentication_error"
    assert body["request_id"] == response.headers["x-request-id"]


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(left, right):
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    digests = [digest(key) for key in ("a", "b", "c")]
    assert is_known_key(b"a", digests)
    assert compared == [(digest("a"), known) for known in digests]
    assert not is_known_key(b"x", digests)
    assert len(compared) == 6


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::2]", "0.0.0.0"],
)
def test_foreign_hosts_are_refused_on_loopback(host):
    (response,) = ask(("GET", "/v1/models", {"headers": {"host": host}}), access=LOCAL)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:80", "[::1]", "localhost."]
)
def test_loopback_hosts_are_taken(host):
    (response,) = ask(("GET", "/v1/models", {"headers": {"host": host}}), access=LOCAL)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("192.0.2.1", False), ("example.org", False)],
)  # fmt: skip
def test_what_counts_as_loopback(host, expected):
    assert is_loopback(host) is expected


PREFLIGHT = {
    "headers": {
        "origin": "https://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
}


def cors_headers(response):
    return {name for name in response.headers if name.startswith("access-control-")}


def test_no_origin_is_allowed_by_default():
    preflight, plain = ask(("OPTIONS", "/v1/models", PREFLIGHT), ("GET", "/v1/models", PREFLIGHT))
    assert preflight.status_code == 405
    assert plain.status_code == 200
    assert cors_headers(preflight) == cors_headers(plain) == set()


@pytest.mark.parametrize(
    ("allowed", "origin", "expected"),
    [
        (("https://page.example",), "https://page.example", "https://page.example"),
        (("https://page.example",), "https://evil.example", None),
        (("https://page.example",), "https://page.example.evil.example", None),
        (("https://page.example",), "null", None),
        (("*",), "https://evil.example", "*"),
    ],
)
def test_only_named_origins_are_allowed(allowed, origin, expected):
    options = {"headers": {**PREFLIGHT["headers"], "origin": origin}}
    setting = AccessSettings(cors_origins=allowed, key_digests=(digest(KEY),))
    preflight, plain = ask(
        ("OPTIONS", "/v1/models", options), ("GET", "/health", options), access=setting
    )
    for response in (preflight, plain):
        assert response.headers.get("access-control-allow-origin") == expected
        assert "access-control-allow-credentials" not in response.headers
    assert preflight.status_code == (204 if expected else 401)
    assert plain.status_code == 200


def test_a_page_of_an_allowed_origin_can_read_refusals():
    origin = "https://page.example"
    setting = AccessSettings(cors_origins=(origin,), key_digests=(digest(KEY),))
    preflight, *refused = ask(
        ("OPTIONS", "/v1/completions", {"headers": {**PREFLIGHT["headers"], "origin": origin}}),
        ("GET", "/v1/models", {"headers": {"origin": origin}}),
        ("GET", "/none", bearer(KEY, origin=origin)),
        ("POST", "/v1/completions", {**bearer(KEY, origin=origin), "json": {}}),
        access=setting,
    )
    assert "*" in preflight.headers["access-control-allow-headers"]  # of the clients' own
    assert [response.status_code for response in refused] == [401, 404, 400]
    for response in refused:
        assert response.headers["access-control-allow-origin"] == origin
        assert response.headers["vary"] == "origin"
        assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_answers_hold_no_secret():
    info = fake_info(model_name="model.gguf")
    paths = ["/props", "/tokenizer_info", "/metrics", "/openapi.json", "/v1/models", "/ready"]
    responses = ask(
        *[("GET", path, bearer(KEY)) for path in paths],
        client=FakeClient(info=info),
        access=LOCKED,
    )
    secrets = [KEY, str(Path.home()), str(Path(__file__).parents[3]), socket.gethostname()]
    secrets += [getpass.getuser()] if len(getpass.getuser()) > 4 else []
    for path, response in zip(paths, responses, strict=True):
        assert response.status_code == 200, path
        assert not [secret for secret in secrets if secret in response.text], path


def test_only_files_of_the_page_are_served():
    """Raw paths: a client library would tidy them up."""
    paths = [
        "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/..%2fapp.py", "/ui//etc/passwd", "/ui/%2fetc",
        "/ui/..\\app.py", "/ui/%5c..%5capp.py", "/ui/", "/ui", "/ui/app.js/", "/ui/app.js%00",
        "/ui/./app.js", "/index.html", "/ui/APP.JS", "/ui/app%252ejs", "//ui/app.js",
    ]  # fmt: skip
    with thread_server() as server:
        for path in paths:
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            assert status_of(server.send_raw(head.encode())) in (400, 404), path
        head = b"GET /ui/app.js HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert status_of(server.send_raw(head)) == 200


def test_the_page_is_served_under_its_policy():
    names = sorted(read_files())
    page, *files = ask(("GET", "/"), *[("GET", f"/ui/{name}") for name in names])
    assert "index.html" in names
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for response in (page, *files):
        assert response.status_code == 200
        assert response.headers["content-security-policy"].startswith("default-src 'self';")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "unsafe" not in response.headers["content-security-policy"]
    again, head = ask(
        ("GET", "/", {"headers": {"if-none-match": page.headers["etag"]}}), ("HEAD", "/")
    )
    assert (again.status_code, again.content) == (304, b"")
    assert head.headers["content-length"] == str(len(page.content))


def test_a_packaged_library_is_kept_by_browsers_and_the_page_is_asked_for_again():
    """The library's addresses hold its version: what they hold never changes."""
    library = sorted(name for name in read_files() if "/" in name)
    own = sorted(set(read_files()) - set(library))
    assert {name.rpartition(".")[2] for name in library} == {"css", "js", "txt", "woff2"}
    kept = ask(*[("GET", f"/ui/{name}") for name in library])
    checked = ask(("GET", "/"), *[("GET", f"/ui/{name}") for name in own])
    immutable = "public, max-age=31536000, immutable"
    assert {response.headers["cache-control"] for response in kept} == {immutable}
    assert {response.headers["cache-control"] for response in checked} == {"no-cache"}
    fonts = [r for name, r in zip(library, kept, strict=True) if name.endswith(".woff2")]
    assert {response.headers["content-type"] for response in fonts} == {"font/woff2"}


def test_the_page_can_be_switched_off():
    paths = ["/", "/favicon.ico", "/ui/app.js"]
    for response in ask(*[("GET", path) for path in paths], has_ui=False):
        assert response.status_code == 404


def test_documents_without_an_icon_of_their_own_have_one():
    icon, own = ask(("GET", "/favicon.ico"), ("GET", "/ui/favicon.svg"), access=LOCKED)
    assert (icon.status_code, icon.content) == (200, own.content)
    assert icon.headers["content-type"] == "image/svg+xml"


@pytest.mark.parametrize("given", ["abc", "A-1_b.C", "x" * 128])
def test_a_request_id_is_kept(given):
    responses = ask(
        ("GET", "/health", {"headers": {"x-request-id": given}}),
        ("GET", "/nowhere", {"headers": {"x-request-id": given}}),
    )
    assert [response.headers["x-request-id"] for response in responses] == [given, given]


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "ä".encode(), "a;b", None])
def test_a_new_request_id_is_made(given):
    headers = {} if given is None else {"x-request-id": given}
    first, second = ask(*[("GET", "/health", {"headers": headers})] * 2)
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_logged_input_cannot_break_a_line(formatter, caplog):
    caplog.set_level(logging.INFO, "tiercel.serve")
    hostile = "a\nERROR forged \x1b[31m\u2028\r"
    ask(
        ("GET", "/%0aERROR%20forged%1b%5b31m"),
        ("POST", "/tokenize", {"json": {"prompt": "a", "model": hostile, "user": hostile}}),
    )
    records = [record for record in caplog.records if record.name == "tiercel.serve.request"]
    assert len(records) == 2
    for record in records:
        line = formatter.format(record)
        assert line.isprintable()
        if isinstance(formatter, JsonFormatter):
            assert json.loads(line)["status"] == 404
        else:
            assert "status=404" in line


def test_a_traceback_is_one_line_of_the_log_and_not_in_the_answer(caplog, monkeypatch):
    monkeypatch.setattr("tiercel.serve.api.info_routes.Version", lambda version: 1 / 0)
    (response,) = ask(("GET", "/version"))
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "server_error"
    assert response.headers["x-request-id"] in error["message"]
    assert "division" not in response.text
    assert "ZeroDivision" not in response.text
    (record,) = [record for record in caplog.records if record.exc_info]
    line = TextFormatter().format(record)
    assert "ZeroDivisionError" in line
    assert "\n" not in line
    assert response.headers["x-request-id"] in line
