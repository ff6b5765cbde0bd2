"""Heads, trailers and connections at the bound itself: taken there, refused one byte beyond."""

import contextlib

import pytest

from tests.serve.harness import error_of, read_all, read_answer, status_of
from tests.serve.thread_server import thread_server
from tiercel.params import Limits

pytestmark = pytest.mark.reliability

MAX_BYTES, MAX_HEADERS, MAX_BODY = 400, 7, 90
LIMITS = Limits(max_header_bytes=MAX_BYTES, max_headers=MAX_HEADERS, max_body_bytes=MAX_BODY)


@pytest.fixture(scope="module")
def small():
    with thread_server(limits=LIMITS) as running:
        yield running


def head_of(path, headers):
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode()


def size_of(path, headers):
    """What counts: the target, names and values."""
    return len(path) + sum(len(name) + len(value) for name, value in headers.items())


@pytest.mark.parametrize("where", ["a value", "a name", "the target", "many values"])
@pytest.mark.parametrize("more", [0, 1])
def test_bytes_of_a_head(small, where, more):
    path, headers = "/health", {"Host": "localhost", "Connection": "close", "X": ""}
    left = MAX_BYTES + more - size_of(path, headers)
    if where == "a value":
        headers["X"] = "v" * left
    elif where == "a name":
        headers["N" * left] = ""
    elif where == "the target":
        path += "?" + "q" * (left - 1)
    else:
        share = left // 3
        headers |= {"A": "v" * (share - 1), "B": "v" * (share - 1), "C": "v" * (share - 1)}
        headers["X"] = "v" * (left - 3 * share)
    assert size_of(path, headers) == MAX_BYTES + more
    answer = small.send_raw(head_of(path, headers))
    if more:
        assert status_of(answer) == 431
        assert error_of(answer)["code"] == "headers_too_large"
        assert f"more than {MAX_BYTES} bytes" in error_of(answer)["message"]
    else:
        assert status_of(answer) == 200


def test_number_of_headers(small):
    for count in (MAX_HEADERS, MAX_HEADERS + 1):
        headers = {"Host": "localhost", "Connection": "close"}
        headers |= {f"X-{i}": "v" for i in range(count - 2)}
        answer = small.send_raw(head_of("/health", headers))
        assert status_of(answer) == (200 if count == MAX_HEADERS else 431)


def post_of(body, *lines):
    head = ["POST /tokenize HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


def body_of(num_bytes):
    return b'{"prompt":"a"}'.ljust(num_bytes)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_bytes_of_a_body(small, is_chunked, more):
    body = body_of(MAX_BODY + more)
    if is_chunked:
        pieces = [body[:50], body[50:]]
        data = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        request = post_of(data, "Transfer-Encoding: chunked", "Connection: close")
    else:
        request = post_of(body, f"Content-Length: {len(body)}", "Connection: close")
    answer = small.send_raw(request)
    assert status_of(answer) == (413 if more > 0 else 200)
    if more > 0:
        assert error_of(answer)["code"] == "body_too_large"


def test_heads_are_counted_one_by_one(small):
    """A kept connection takes any number of heads, each as long as it may be."""
    headers = {"Host": "localhost", "X": ""}
    headers["X"] = "v" * (MAX_BYTES - size_of("/health", headers))
    with small.connect() as sock:
        for _ in range(5):
            sock.sendall(head_of("/health", headers))
            assert status_of(read_answer(sock)) == 200


def test_trailers_are_counted_from_the_last_byte_of_the_body(small, apart):
    body = body_of(20)
    start = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    request = post_of(start, "Transfer-Encoding: chunked", "Connection: close")
    for num_bytes, status in ((MAX_BYTES, 200), (MAX_BYTES + 1, 431)):
        trailer = b"X: ".ljust(num_bytes, b"t")
        with small.connect() as sock:
            apart.send(sock, request, trailer)  # so the trailer is counted alone
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"\r\n\r\n")
            assert status_of(read_all(sock)) == status
