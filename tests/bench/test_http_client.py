"""The measuring client with servers that keep the protocol, stretch it and break it."""

import asyncio
import contextlib
import time

import pytest

from tests.patience import PATIENCE_S
from tiercel.bench.http_client import (
    Exchange,
    ExchangeError,
    HttpClient,
    parse_address,
)
from tiercel.errors import ArgumentError

HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Thing: A\r\n\r\nhello"


@pytest.mark.parametrize(
    ("text", "url", "port", "base"),
    [
        ("http://h:8000", "http://h:8000", 8000, ""),
        ("http://h:8000/v1/", "http://h:8000", 8000, ""),
        ("https://h/api/v1", "https://h/api", 443, "/api"),
        ("http://[::1]:80", "http://[::1]:80", 80, ""),
        ("http://h", "http://h", 80, ""),
    ],
)
def test_addresses(text, url, port, base):
    address = parse_address(text)
    assert (address.url, address.port, address.base) == (url, port, base)
    assert address.is_tls == text.startswith("https")


@pytest.mark.parametrize(
    "text",
    [
        *("", "h:8000", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://h/\r\nX: y"),
        *("http://u:p@h", "http://h?q", "http://h#f", "http://\u00e4", "http://[::1"),
    ],
)
def test_what_is_no_address(text):
    with pytest.raises(ArgumentError):
        parse_address(text)


def talk(answers, *, requests=1, timeout_s=PATIENCE_S, body=None):
    """Send requests to a server whose connections follow `answers`, one after the other.

    Returns:
        One exchange or error for each request, and the bytes that each connection received.
    """

    async def main():
        received = []
        behaviours = iter(answers)

        async def on_connection(reader, writer):
            received.append(b"")
            number = len(received) - 1
            behaviour = next(behaviours)
            with contextlib.suppress(ConnectionError):
                for answer in behaviour:
                    data = await reader.readuntil(b"\r\n\r\n")
                    if b"Content-Length: " in data:
                        size = int(data.split(b"Content-Length: ")[1].split(b"\r\n")[0])
                        data += await reader.readexactly(size)
                    received[number] += data
                    for piece in answer:
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0)
                writer.close()

        server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        address = parse_address(f"http://127.0.0.1:{port}")
        client = HttpClient(address, api_key="secret", timeout_s=timeout_s)
        results = []
        for _ in range(requests):
            exchange = Exchange()
            try:
                await client.run("POST" if body else "GET", "/v1/x", exchange, body)
                results.append(exchange)
            except ExchangeError as error:
                results.append(error)
            await asyncio.sleep(0.01)  # a server that closes now has closed
        client.close()
        server.close()
        return results, received

    return asyncio.run(main())


def kinds(results):
    return [result.kind if isinstance(result, ExchangeError) else "ok" for result in results]


def test_a_request_and_its_answer():
    (exchange,), (received,) = talk([[[HELLO]]], body=b'{"a": 1}')
    assert (exchange.status, exchange.headers["x-thing"], exchange.body) == (200, "A", b"hello")
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer secret" in head
    assert b"\r\nContent-Length: 8" in head
    assert body == b'{"a": 1}'


def test_a_connection_is_used_again():
    results, received = talk([[[HELLO]] * 3], requests=3)
    assert kinds(results) == ["ok"] * 3
    assert len(received) == 1


def test_pieces_of_any_size():
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
    )
    single = [chunked[i : i + 1] for i in range(len(chunked))]
    results, received = talk([[single, [HELLO]]], requests=2)
    assert [bytes(result.body) for result in results] == [b"hello", b"hello"]
    assert len(received) == 1


def test_an_idle_connection_that_was_closed_is_no_error():
    results, received = talk([[[HELLO]], [[HELLO]]], requests=2)
    assert kinds(results) == ["ok", "ok"]
    assert len(received) == 2


def test_a_connection_that_closes_under_the_request_is_tried_once_more_only_if_it_was_kept():
    # the second answer never comes: the kept connection reads the request and closes
    results, received = talk([[[HELLO], []], [[HELLO]]], requests=2)
    assert kinds(results) == ["ok", "ok"]
    assert len(received) == 2
    results, received = talk([[[]], [[HELLO]]], requests=1)
    assert kinds(results) == ["dropped"]  # a new connection that does so is a fault of the server
    assert len(received) == 1


def test_an_answer_that_breaks_off_is_not_asked_for_again():
    results, received = talk([[[HELLO], [HELLO[:-1]]], [[HELLO]]], requests=2)
    assert kinds(results) == ["ok", "dropped"]
    assert len(received) == 1


def test_a_connection_that_is_not_to_be_kept_is_not_used_again():
    last = HELLO.replace(b"X-Thing: A", b"Connection: close")
    results, received = talk([[[last], [HELLO]], [[HELLO]]], requests=2)
    assert kinds(results) == ["ok", "ok"]
    assert [data.count(b"HTTP/1.1") for data in received] == [1, 1]


def test_an_answer_that_ends_with_its_connection():
    results, received = talk([[[b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo"]], [[HELLO]]], requests=2)
    assert [bytes(result.body) for result in results] == [b"hello", b"hello"]
    assert len(received) == 2


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello", "dropped"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", "dropped"),
        (b"HTTP/1.1 200 OK\r\nContent-", "dropped"),
        (b"hello, world\r\n\r\n", "bad_http"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "bad_http"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 400_000 + b"\r\n", "bad_http"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * (17 << 20), "bad_http"),
    ],
    ids=["cut body", "cut chunk", "cut head", "no http", "no length", "headers", "huge"],
)
def test_broken_answers_have_a_kind(answer, kind):
    results, _ = talk([[[answer]], [[HELLO]]], requests=2)
    assert kinds(results) == [kind, "ok"]


def test_silence_ends_at_its_time():
    began_s = time.perf_counter()
    results, _ = talk(
        [[[b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel"], [HELLO]]], timeout_s=0.2
    )
    assert kinds(results) == ["timeout"]
    assert time.perf_counter() - began_s >= 0.2


def test_nobody_listens():
    async def main():
        server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        client = HttpClient(
            parse_address(f"http://127.0.0.1:{port}"), api_key=None, timeout_s=PATIENCE_S
        )
        await client.run("GET", "/", Exchange())

    with pytest.raises(ExchangeError) as caught:
        asyncio.run(main())
    assert caught.value.kind == "connect"
