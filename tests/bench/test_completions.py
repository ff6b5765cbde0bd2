"""A streamed answer is parsed the same however it is cut; every other answer has an error kind."""

import asyncio
import contextlib

import msgspec
import pytest

from tests.patience import PATIENCE_S
from tiercel.bench.completions import Completion, CompletionServer
from tiercel.bench.http_client import HttpClient, parse_address


def event(**fields):
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def piece(text, reason=None):
    return event(choices=[{"index": 0, "text": text, "finish_reason": reason}], usage=None)


USAGE = event(choices=[], usage={"prompt_tokens": 4, "completion_tokens": 7})
DONE = b"data: [DONE]\n\n"
GOOD = piece("") + b": keep-alive\n\n" + piece(" a") + piece("\n\u00e4", "length") + USAGE + DONE


def measure(pieces, *, status=b"200 OK", output_len=7, gap_s=0.0, timeout_s=PATIENCE_S):
    """The sample of one request that is answered with these pieces of a body."""

    async def main():
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 %s\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
            with contextlib.suppress(ConnectionError):  # the client may give up
                for data in pieces:
                    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                    await writer.drain()
                    await asyncio.sleep(gap_s)
                writer.write(b"0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address = parse_address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        client = HttpClient(address, api_key=None, timeout_s=timeout_s)
        completions = CompletionServer(client, "m", temperature=0.0)
        sample = await completions.measure(Completion("p", output_len), index=3, began_s=0.0)
        client.close()
        server.close()
        return sample

    return asyncio.run(main())


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_however_it_is_cut(size):
    sample = measure([GOOD[i : i + size] for i in range(0, len(GOOD), size)])
    assert (sample.error, sample.detail) == (None, "")
    assert (sample.prompt_tokens, sample.completion_tokens) == (4, 7)
    assert sample.finish_reason == "length"
    assert sample.index == 3
    assert len(sample.piece_s) <= 2  # seven tokens, two pieces with text; one if together


def test_times():
    sample = measure(
        [piece(""), piece(" a"), piece(" b"), piece("", "stop"), USAGE, DONE], gap_s=0.2
    )
    assert len(sample.piece_s) == 2
    assert sample.first_s == pytest.approx(sample.piece_s[0], abs=1e-6)
    assert sample.first_s >= 0.2  # a piece without text is no first token
    assert sample.piece_s[1] - sample.piece_s[0] >= 0.05
    assert sample.latency_s - sample.piece_s[1] >= 0.05  # to the last piece


def test_pieces_that_come_together_are_one_to_the_reader():
    sample = measure([piece(" a") + piece(" b"), piece(" c") + USAGE + DONE], gap_s=0.02)
    assert len(sample.piece_s) == 2
    assert sample.completion_tokens == 7


def test_comments_are_no_progress():
    sample = measure([b": keep-alive\n\n"] * 100, gap_s=0.02, timeout_s=0.2)
    assert sample.error == "timeout"


def test_an_answer_without_any_text_counts_from_its_first_piece():
    sample = measure([piece(""), piece("", "length"), USAGE, DONE], gap_s=0.02)
    assert sample.error is None
    assert sample.piece_s == []
    assert 0 < sample.first_s < sample.latency_s


def test_cached_tokens():
    usage = {
        "prompt_tokens": 4,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert measure([piece("a"), event(choices=[], usage=usage), DONE]).cached_tokens == 3
    usage["prompt_tokens_details"] = None
    assert measure([piece("a"), event(choices=[], usage=usage), DONE]).cached_tokens == 0


@pytest.mark.parametrize(
    ("body", "kind", "detail"),
    [
        (piece("a") + USAGE, "dropped", "without [DONE]"),
        (piece("a") + DONE, "no_usage", "no usage"),
        (USAGE + DONE, "bad_answer", "no choice"),
        (b"data: {not json\n\n" + GOOD, "bad_answer", "not a completion"),
        (b'data: {"choices": 5}\n\n' + GOOD, "bad_answer", "not a completion"),
        (event(choices=[], usage={"prompt_tokens": 4}), "bad_answer", "not a completion"),
        (piece("a") + event(error={"message": "it died"}), "stream_error", "it died"),
        (event(error="oh") + DONE, "stream_error", "oh"),
        (b"", "dropped", "without [DONE]"),
        (b"<html>", "dropped", "without [DONE]"),
        (b"data: " + b"x" * (17 << 20), "bad_answer", "a line has over"),
    ],
    ids=range(11),
)
def test_what_is_no_answer(body, kind, detail):
    sample = measure([body] if body else [])
    assert sample.error == kind
    assert detail in sample.detail


@pytest.mark.parametrize(
    ("status", "body", "detail"),
    [
        (b"429 Too Many", b'{"error": {"message": "queue is full"}}', "queue is full"),
        (b"503 No", b'{"message": "later"}', "later"),
        (b"500 No", b"plain words", "plain words"),
        (b"404 No", b"x" * 5000, "x" * 200),
        (b"204 No", b"", ""),
    ],
)
def test_other_statuses_are_kinds_of_their_own(status, body, detail):
    sample = measure([body] if body else [], status=status)
    assert sample.error == f"http_{status.split()[0].decode()}"
    assert sample.detail == detail


def test_what_is_asked():
    bodies = []

    class Client:
        async def run(self, method, path, exchange, body):
            bodies.append((method, path, msgspec.json.decode(body)))
            exchange.status = 200

    async def main():
        server = CompletionServer(Client(), "the-model", temperature=0.5)
        await server.measure(Completion([1, 2], 9), index=0, began_s=0.0)

    asyncio.run(main())
    assert bodies == [
        (
            "POST",
            "/v1/completions",
            {
                "model": "the-model",
                "prompt": [1, 2],
                "max_tokens": 9,
                "temperature": 0.5,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
    ]
