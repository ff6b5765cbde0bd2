"""Heads and bodies that no client library sends, over raw sockets; and deadlines, short ones."""

import asyncio
import contextlib
import json
import threading
import time

import httpx
import pytest
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.patience import PATIENCE_S, wait_for
from tests.serve.harness import error_of, read_all, read_answer, status_of
from tests.serve.thread_server import is_healthy, thread_server
from tiercel.params import Limits

pytestmark = pytest.mark.reliability

SIZES = {"max_body_bytes": 1 << 20, "max_connections": 700}
SHORT = Limits(max_head_seconds=0.8, max_body_gap_seconds=0.8, **SIZES)
HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


class Slow:
    """A route whose answer begins immediately and ends when a test says so."""

    def __init__(self):
        self.may_end = threading.Event()

    async def answer(self, _request):
        async def pieces():
            yield b"begin"
            while not self.may_end.is_set():
                await asyncio.sleep(0.01)
            yield b" end"

        return StreamingResponse(pieces())


class Gone:
    """A route that waits until its client has left, and counts those that have."""

    def __init__(self):
        self.num_begun = self.num_left = 0

    async def __call__(self, scope, receive, send):
        self.num_begun += 1
        while (await receive())["type"] != "http.disconnect":
            pass
        self.num_left += 1


SLOW = Slow()


@pytest.fixture(scope="module")
def quick():
    """A server whose deadlines pass within a second, for tests of deadlines."""
    with thread_server(limits=SHORT, extra_routes=[Route("/slow", SLOW.answer)]) as running:
        yield running
        wait_for(lambda: is_healthy(running))


@pytest.fixture(scope="module")
def patient():
    """A server whose deadlines no test reaches."""
    with thread_server(limits=Limits(**SIZES)) as running:
        yield running


@pytest.fixture(autouse=True)
def _alive(patient):
    yield
    assert is_healthy(patient)


HUGE_HEADS = {
    "one header of 1 MB": HEAD + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "100 000 headers": HEAD + b"X: a\r\n" * 100_000 + b"\r\n",
    "101 headers": HEAD + b"X: a\r\n" * 100 + b"\r\n",
    "a name of 100 KB": HEAD + b"X" * 100_000 + b": a\r\n\r\n",
    "a path of 100 KB": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a header without an end": HEAD + b"X: " + b"a" * 100_000,
    "66 KiB in all": HEAD + (b"X: " + b"a" * 1000 + b"\r\n") * 66 + b"\r\n",
}


@pytest.mark.parametrize("name", HUGE_HEADS)
def test_a_huge_head_is_431_and_closed(patient, name):
    answer = patient.send_raw(HUGE_HEADS[name])
    assert status_of(answer) == 431
    assert error_of(answer)["code"] == "headers_too_large"
    assert b"connection: close" in answer
    assert b"x-request-id: req_" in answer


def test_refused_heads_are_counted(patient):
    patient.send_raw(HEAD + b"nonsense\r\n\r\n")
    name = 'tiercel:requests_rejected_total{engine="0",model_name="tiny",reason="invalid_http"} '
    assert name in patient.get("/metrics").text


def test_a_large_head_within_the_bounds_is_served(patient):
    head = HEAD + (b"X: " + b"a" * 600 + b"\r\n") * 98 + b"Connection: close\r\n\r\n"
    assert status_of(patient.send_raw(head)) == 200


def test_only_the_head_counts_towards_its_bound(patient):
    body = json.dumps({"prompt": "a b " * 3000, "x": "y" * 200_000}).encode()
    head = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert status_of(patient.send_raw(head + body)) == 200


@pytest.mark.parametrize("num_bytes", [70_000, 120_000, 250_000, 1_000_000])
def test_a_body_that_comes_in_few_pieces_is_no_head(patient, apart, num_bytes):
    """Clients send the body apart from the head."""
    body = json.dumps({"prompt": "a", "x": "y" * num_bytes}).encode()
    with patient.connect() as sock:
        for _ in range(2):  # a kept connection counts anew
            apart.send(sock, POST + b"Content-Length: %d\r\n\r\n" % len(body), body)
            assert status_of(read_answer(sock)) == 200


def test_the_next_head_may_come_with_the_end_of_a_large_body(patient, apart):
    body = json.dumps({"prompt": "a", "x": "y" * 100_000}).encode()
    with patient.connect() as sock:
        apart.send(sock, POST + b"Content-Length: %d\r\n\r\n" % len(body))
        sock.sendall(body + HEAD + b"Connection: close\r\n\r\n")
        assert read_all(sock).count(b"HTTP/1.1 200 OK") == 2


def test_a_head_that_stops_behind_a_large_body_is_closed(quick, apart):
    body = json.dumps({"prompt": "a", "x": "y" * 100_000}).encode()
    with quick.connect() as sock:
        apart.send(sock, POST + b"Content-Length: %d\r\n\r\n" % len(body))
        sock.sendall(body + HEAD)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b" 408 " in answer


def test_a_head_behind_a_body_is_counted_too(patient):
    body = b'{"prompt": "a"}'
    first = POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    answers = patient.send_raw(first + HEAD + b"X: " + b"a" * 300_000 + b"\r\n\r\n")
    assert b" 431 " in answers or answers == b""


MALFORMED = {
    "negative length": POST + b"Content-Length: -1\r\n\r\n{}",
    "length that is no number": POST + b"Content-Length: ten\r\n\r\n{}",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    "huge length": POST + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    "length and chunks": POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    "bad chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/3.7": b"GET /health HTTP/3.7\r\nHost: 127.0.0.1\r\n\r\n",
    "unknown method": b"BREW /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
    "NUL in a header": HEAD + b"X: a\0b\r\n\r\n",
    "space before the colon": HEAD + b"X : a\r\n\r\n",
    "no colon": HEAD + b"nonsense\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": HEAD + b"Host: localhost\r\n\r\n",
    "websocket": HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "CONNECT": b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "absolute garbage": b"\r\n\r\n\xff\xfe\xfd\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_request_is_400(patient, name):
    with patient.connect() as sock:
        sock.sendall(MALFORMED[name])
        answer = read_answer(sock) if name in ("no host", "two hosts") else read_all(sock)
    assert status_of(answer) == 400
    assert error_of(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize("method", ["TRACE", "OPTIONS", "DELETE", "PATCH"])
def test_other_methods_are_405(patient, method):
    head = f"{method} /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    answer = patient.send_raw(head.encode())
    assert status_of(answer) == 405
    assert b"allow: GET, HEAD" in answer


def test_a_length_over_the_limit_is_refused_unread(patient):
    with patient.connect() as sock:
        sock.sendall(POST + b"Content-Length: 9999999\r\n\r\n")
        answer = read_all(sock)  # no byte of the body was sent
    assert status_of(answer) == 413


def test_a_client_that_sends_on_can_read_why_it_was_refused(patient):
    with patient.connect() as sock:
        sock.sendall(POST + b"Content-Length: 9000000\r\n\r\n")
        for _ in range(90):  # a reset would end this with an error, before the answer is read
            sock.sendall(b"x" * 100_000)
        assert status_of(read_all(sock)) == 413


def test_chunks_over_the_limit_are_refused(patient):
    chunk = b"%x\r\n%b\r\n" % (100_000, b" " * 100_000)
    with patient.connect() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 12)
        assert status_of(read_all(sock)) == 413


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b'e\r\n{"prompt":"a"}\r\n'


@pytest.mark.parametrize(
    "data",
    [CHUNK + b"0\r\nX: " + b"a" * 300_000, b"e;" + b"a" * 300_000, b"0" * 300_000,
     CHUNK + b"0\r\n" + b"X: a\r\n" * 50_000],
    ids=["a trailer", "an extension", "a size", "trailers"],
)  # fmt: skip
def test_what_stands_around_a_body_is_bounded(patient, data):
    with patient.connect() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(CHUNKED + data)
        assert status_of(read_all(sock)) == 431


def test_a_trailer_is_no_header(patient):
    with patient.connect() as sock:
        sock.sendall(CHUNKED + CHUNK + b"0\r\nHost: evil.example\r\nX-Request-Id: mine\r\n\r\n")
        answer = read_answer(sock)
    assert status_of(answer) == 200
    assert b"x-request-id: mine" not in answer


def trickle(sock, data, gap=0.05):
    """Send a byte now and then until the other side closes; returns the answer and what was sent.

    Where no deadline counts from the first byte, all of the data gets through.
    """
    sock.settimeout(gap)
    received = b""
    for place in range(len(data)):
        try:
            sock.sendall(data[place : place + 1])
            chunk = sock.recv(4096)
        except TimeoutError:
            continue
        except ConnectionError:
            return received, place
        received += chunk
        if not chunk:
            return received, place
    return received, len(data)


def test_a_connection_that_says_nothing_is_closed(quick):
    started = time.monotonic()
    with quick.connect() as sock:
        assert sock.recv(4096) == b""
    assert time.monotonic() - started > SHORT.max_head_seconds - 0.01


@pytest.mark.parametrize("data", [HEAD + b"X: y\r\n" * 50, b"\r\n" * 170])
def test_a_head_byte_by_byte_is_closed_at_the_deadline(quick, data):
    with quick.connect() as sock:
        answer, num_sent = trickle(sock, data)
    assert num_sent < len(data)
    assert status_of(answer) in (408, None)


def test_a_second_head_byte_by_byte_is_closed_too(quick):
    with quick.connect() as sock:
        sock.sendall(HEAD + b"\r\n")
        assert status_of(read_answer(sock)) == 200
        data = HEAD + b"X: y\r\n" * 50
        answer, num_sent = trickle(sock, data)
    assert num_sent < len(data)
    assert status_of(answer) in (408, None)


def test_a_kept_connection_may_be_idle_longer_than_a_head_may_take(quick):
    with quick.connect() as sock:
        sock.sendall(HEAD + b"\r\n")
        assert status_of(read_answer(sock)) == 200
        time.sleep(2 * SHORT.max_head_seconds)
        sock.sendall(HEAD + b"\r\n")
        assert status_of(read_answer(sock)) == 200


def test_a_body_that_stops_is_408(quick):
    with quick.connect() as sock:
        sock.sendall(POST + b'Content-Length: 100\r\n\r\n{"prompt"')
        answer = read_all(sock)
    assert status_of(answer) == 408
    error = error_of(answer)
    assert error["code"] == "request_timeout"
    assert error["message"] == "nothing more of the request's body came for 0.8 seconds."


def test_a_body_byte_by_byte_is_408_at_its_deadline():
    with thread_server(limits=Limits(max_body_seconds=0.6)) as patient, patient.connect() as sock:
        sock.sendall(POST + b"Content-Length: 1000\r\n\r\n")
        answer, num_sent = trickle(sock, b" " * 999)
    assert num_sent < 999
    assert status_of(answer) == 408
    assert error_of(answer)["message"] == "the body of the request took more than 0.6 seconds."


def test_an_answer_may_take_longer_than_any_deadline_of_its_request(quick):
    SLOW.may_end.clear()
    with quick.connect() as sock:
        sock.sendall(HEAD.replace(b"/health", b"/slow") + b"Connection: close\r\n\r\n")
        begin = sock.recv(4096)
        time.sleep(2 * SHORT.max_head_seconds)
        SLOW.may_end.set()
        assert status_of(begin) == 200
        assert (begin + read_all(sock)).endswith(b"\r\n4\r\n end\r\n0\r\n\r\n")


def test_an_old_client_gets_a_stream_without_chunks(quick):
    SLOW.may_end.set()
    answer = quick.send_raw(b"GET /slow HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status_of(head) == 200
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"begin end"
    answer = quick.send_raw(b"GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
    assert b"content-length: 15\r\n" in answer
    assert answer.endswith(b'{"status":"ok"}')


def test_a_stray_line_break_behind_a_request_does_not_end_its_answer(quick):
    SLOW.may_end.clear()
    with quick.connect() as sock:
        sock.sendall(HEAD.replace(b"/health", b"/slow") + b"Connection: close\r\n\r\n")
        assert status_of(sock.recv(4096)) == 200
        sock.sendall(b"\r\n")
        time.sleep(2 * SHORT.max_head_seconds)  # were the line break the beginning of a head
        SLOW.may_end.set()
        assert read_all(sock).endswith(b"0\r\n\r\n")


def test_pipelined_requests_are_answered_in_order(patient):
    heads = [b"GET /health", b"GET /version", b"GET /none"]
    data = b"".join(head + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" for head in heads[:2])
    last = heads[2] + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    answers = patient.send_raw(data + last).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"200", b"404"]


@pytest.mark.parametrize("num_bytes", [10, 9_000, 100_000])
@pytest.mark.parametrize("is_split", [False, True])
def test_an_offer_of_http2_is_declined_and_the_body_read(patient, apart, num_bytes, is_split):
    body = json.dumps({"prompt": "a", "x": "y" * num_bytes}).encode()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAA\r\n"
    head = POST + offer + b"Content-Length: %d\r\n\r\n" % len(body)
    with patient.connect() as sock:
        apart.send(sock, *((head, body) if is_split else (head + body,)))
        assert b'"tokens":[' in read_answer(sock)
        # The connection is kept, and later requests are read as ever.
        get = HEAD + offer
        sock.sendall(get + b"\r\n" + get + b"Upgrade: x\r\n\r\n" + HEAD)
        sock.sendall(b"Connection: close\r\n\r\n")
        assert read_all(sock).count(b"HTTP/1.1 200 OK") == 3


def test_expect_continue(patient):
    body = b'{"prompt": "a"}'
    with patient.connect() as sock:
        sock.sendall(POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        sock.sendall(body)
        assert status_of(read_answer(sock)) == 200


def test_slow_connections_leave_others_unhurt(quick):
    """A14: 500 connections that send a byte each 50 ms, beside requests."""
    slow = [quick.connect() for _ in range(500)]
    stop = threading.Event()

    def send_slowly():
        for place in range(10):
            for sock in slow:
                with contextlib.suppress(OSError):
                    sock.send(HEAD[place : place + 1])
            stop.wait(0.05)

    thread = threading.Thread(target=send_slowly)
    thread.start()
    try:
        with httpx.Client(base_url=quick.url, timeout=PATIENCE_S) as http:
            for _ in range(20):
                response = http.post("/tokenize", json={"prompt": "a b"})
                assert response.json()["count"] == 4
    finally:
        stop.set()
        thread.join()
    for sock in slow:
        with sock, contextlib.suppress(ConnectionError):
            while sock.recv(4096):  # or a TimeoutError
                pass


def test_connections_over_the_bound_are_503():
    with thread_server(limits=Limits(max_connections=20)) as small:
        idle = [small.connect() for _ in range(20)]
        for _ in range(3):
            with small.connect() as sock:  # told so before it asks
                answer = read_all(sock)
            assert status_of(answer) == 503
            assert error_of(answer)["code"] == "too_many_connections"
        idle.pop().close()
        wait_for(lambda: is_healthy(small))
        for sock in idle:
            sock.close()


def test_a_crowd_is_told_or_closed_and_leaves_room():
    with thread_server(limits=Limits(max_connections=20, max_head_seconds=0.3)) as small:
        crowd = [small.connect() for _ in range(100)]
        for sock in crowd:
            assert status_of(read_all(sock)) in (503, None)
            sock.close()
        wait_for(lambda: is_healthy(small))


def test_every_request_of_a_lost_connection_hears_of_it():
    """Pipelined: the first is being served while the second waits."""
    endpoint = Gone()
    with thread_server(extra_routes=[Route("/gone", endpoint)]) as running:
        with running.connect() as sock:
            sock.sendall(HEAD.replace(b"/health", b"/gone") + b"\r\n" + HEAD + b"\r\n")
            wait_for(lambda: endpoint.num_begun)
            assert endpoint.num_left == 0
        wait_for(lambda: endpoint.num_left)
        assert endpoint.num_left == 1
