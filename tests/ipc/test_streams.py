"""A stream changes its request when an update is read, and ends once."""

import asyncio

import pytest

from tiercel.errors import EngineDeadError
from tiercel.ipc.streams import TokenStream, stop
from tiercel.params import SamplingParams
from tiercel.request.request import ABORTED, Request, Status, TokenLogprobs, TokenUpdate


def make_stream():
    request = Request("request-0", [1], SamplingParams(), 0, 0, frozenset(), 8)
    return TokenStream(request, 0.0)


def update(*ids, reason=None):
    return TokenUpdate(ids, tuple(TokenLogprobs(i, -1.0, ()) for i in ids), reason, None)


async def read(stream):
    return [item async for item in stream]


def test_the_request_follows_its_reader_not_the_engine():
    async def main():
        stream = make_stream()
        request = stream.request
        for item in (update(1), update(2, 3), update(4, reason="length")):
            stream.push(item)
        assert (request.output_token_ids, request.finish_reason) == ([], None)
        await anext(stream)
        assert (request.output_token_ids, request.status) == ([1], Status.RUNNING)
        await anext(stream)
        assert request.output_token_ids == [1, 2], "tokens of one step come one by one"
        await anext(stream)
        assert request.output_token_ids == [1, 2, 3]
        assert [entry.token_id for entry in request.logprobs] == [1, 2, 3]
        assert request.finish_reason is None
        await anext(stream)
        assert (request.finish_reason, request.status) == ("length", Status.FINISHED)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(main())


def test_a_reader_that_waits_is_woken():
    async def main():
        stream = make_stream()
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        stream.push(update(1))
        await asyncio.sleep(0)
        stream.push(update(2))
        stream.push(ABORTED)
        assert [item.finish_reason for item in await reading] == [None, None, "abort"]
        assert stream.request.finish_reason == "abort"

    asyncio.run(main())


def test_nothing_shows_behind_a_stop_string():
    async def main():
        stream = make_stream()
        for item in (update(1), update(2), update(3, reason="length")):
            stream.push(item)
        await anext(stream)
        stop(stream.request, "x")
        assert await read(stream) == []
        request = stream.request
        assert (request.output_token_ids, request.finish_reason) == ([1], "stop")
        assert request.stop_reason == "x"

    asyncio.run(main())


def test_an_error_comes_behind_what_was_answered():
    async def main():
        stream = make_stream()
        stream.push(update(1))
        stream.push(EngineDeadError("gone"))
        assert (await anext(stream)).new_token_ids == (1,)
        with pytest.raises(EngineDeadError, match="gone"):
            await anext(stream)
        assert stream.request.finish_reason == "error"
        assert await read(stream) == []

    asyncio.run(main())


def test_an_answer_that_is_complete_stays_so_when_the_engine_dies():
    async def main():
        stream = make_stream()
        stream.push(update(1, reason="stop"))
        stream.push(EngineDeadError("gone"))
        assert [item.new_token_ids for item in await read(stream)] == [(1,)]
        assert stream.request.finish_reason == "stop"

    asyncio.run(main())


def test_a_reader_that_was_cancelled_loses_nothing():
    async def main():
        stream = make_stream()
        for token_id in (1, 2):
            reading = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            if token_id == 2:
                stream.push(update(1))  # it comes in the same turn of the loop as the cancelling
            reading.cancel()
            await asyncio.wait([reading])
        stream.push(update(2, reason="length"))
        assert [item.new_token_ids for item in await read(stream)] == [(1,), (2,)]

    asyncio.run(main())


def test_a_reader_may_stop_between_tokens_of_one_step():
    async def main():
        stream = make_stream()
        stream.push(update(1, 2, 3, 4, reason="length"))
        async for _ in stream:
            if stream.request.output_token_ids == [1, 2]:
                stop(stream.request, "END")
        request = stream.request
        assert (request.output_token_ids, request.finish_reason) == ([1, 2], "stop")
        assert [entry.token_id for entry in request.logprobs] == [1, 2]

    asyncio.run(main())
