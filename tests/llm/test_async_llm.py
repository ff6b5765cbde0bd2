"""The asyncio API: the answers of `LLM`, many concurrently, and nothing left after cancellation."""

import asyncio
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

import tiercel
from tests.gguf_files import tiny_model
from tests.patience import PATIENCE_S
from tests.tiny_llm import BOS, LLAMA, PROMPTS, greedy, ids_of, joined, open_tiny
from tiercel.async_llm import AsyncLLM
from tiercel.errors import (
    ArgumentError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    OutOfMemoryError,
)
from tiercel.params import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]


def open_async(path=LLAMA, **options):
    return AsyncLLM(path, device="cpu", **({"dtype": "float32"} | options))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("async") / "m.gguf", context=2048)


@pytest.fixture(scope="module")
def llm(path):
    opened = open_async(path, max_num_batched_tokens=64)
    yield opened
    asyncio.run(opened.close())


@pytest.fixture(scope="module")
def plain(path):
    with open_tiny(path, max_num_batched_tokens=64) as opened:
        yield opened


def run(llm, main):
    """Run a test, then check that all blocks are free."""

    async def whole():
        result = await asyncio.wait_for(main(), 2 * PATIENCE_S)
        loop = llm._bridge.loop
        idle = asyncio.Event()
        here = asyncio.get_running_loop()
        await asyncio.sleep(0)  # a stream that was left is closed in the next turn of the loop
        loop.call(lambda: here.call_soon_threadsafe(idle.set))
        await idle.wait()
        assert loop.num_live == 0
        assert loop._engine.scheduler.cache.usage == 0.0
        assert not llm._bridge._by_engine_request
        assert not llm._bridge._by_request
        return result

    return asyncio.run(whole())


def test_it_is_exported():
    assert tiercel.AsyncLLM is AsyncLLM


def test_answers_are_those_of_llm(llm, plain):
    params = [greedy(12, logprobs=2, prompt_logprobs=1) for _ in PROMPTS]
    params[1] = SamplingParams(n=3, seed=4, max_tokens=9, logprobs=0)

    async def main():
        return await llm.generate(PROMPTS, params)

    for ours, theirs in zip(run(llm, main), plain.generate(PROMPTS, params), strict=True):
        assert ours.prompt == theirs.prompt
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert ids_of([ours]) == ids_of([theirs])
        for ours_one, theirs_one in zip(ours.outputs, theirs.outputs, strict=True):
            assert ours_one.text == theirs_one.text
            assert ours_one.finish_reason == theirs_one.finish_reason
            assert [e.token_id for e in ours_one.logprobs] == ours_one.token_ids
            assert ours_one.cumulative_logprob == pytest.approx(theirs_one.cumulative_logprob)
        assert (ours.prompt_logprobs is None) == (theirs.prompt_logprobs is None)
        if ours.prompt_logprobs is not None:
            assert len(ours.prompt_logprobs) == len(ours.prompt_token_ids)
        assert 0 < ours.metrics.first_token_s <= ours.metrics.finished_s < 2 * PATIENCE_S
        assert ours.metrics.num_output_tokens == theirs.metrics.num_output_tokens


def test_streams_are_those_of_llm(llm, plain):
    params = SamplingParams(n=2, seed=3, max_tokens=20, ignore_eos=True, logprobs=1)

    async def main():
        return [delta async for delta in llm.stream("the thin man", params)]

    deltas = run(llm, main)
    theirs = list(plain.stream("the thin man", params))
    for index in range(2):
        ours = [delta for delta in deltas if delta.index == index]
        expected = [delta for delta in theirs if delta.index == index]
        assert [delta.text for delta in ours] == [delta.text for delta in expected]
        assert joined(ours, "token_ids") == joined(expected, "token_ids")
        assert [len(delta.logprobs) for delta in ours] == [1] * 20
        reasons = [delta.finish_reason for delta in ours]
        assert reasons == [None] * 19 + ["length"]


def test_chat_logits_encode_and_decode(llm, plain):
    async def main():
        ids = await llm.encode("the thin man", add_special_tokens=True)
        text = await llm.decode(ids)
        long = await llm.encode("ab " * 3000)
        logits = await llm.logits([BOS, 5, 6])
        chat = await llm.chat(MESSAGES, greedy(6))
        deltas = [delta async for delta in llm.stream_chat(MESSAGES, greedy(6))]
        return ids, text, long, logits, chat, deltas

    ids, text, long, logits, chat, deltas = run(llm, main)
    assert (ids, text) == (plain.encode("the thin man", add_special_tokens=True), "the thin man")
    assert long == plain.encode("ab " * 3000)
    assert np.array_equal(logits, plain.logits([BOS, 5, 6]))
    expected = plain.chat(MESSAGES, greedy(6))
    assert chat.prompt_token_ids == expected.prompt_token_ids
    assert ids_of([chat]) == ids_of([expected]) == [[joined(deltas, "token_ids")]]


def test_a_stop_string_cuts_text_and_tokens(llm, plain):
    (whole,) = plain.generate("the thin man", greedy(40))
    text = whole.outputs[0].text
    params = replace(greedy(200), stop=[text[9:11]])

    async def main():
        (output,) = await llm.generate("the thin man", params)
        return output, [delta async for delta in llm.stream("the thin man", params)]

    output, deltas = run(llm, main)
    (expected,) = plain.generate("the thin man", params)
    assert ids_of([output]) == ids_of([expected]) == [[joined(deltas, "token_ids")]]
    assert output.outputs[0].text == expected.outputs[0].text
    assert "".join(delta.text for delta in deltas) == expected.outputs[0].text
    assert deltas[-1].finish_reason == output.outputs[0].finish_reason == "stop"
    assert deltas[-1].stop_reason == text[9:11]


def test_many_tasks_run_together(llm, plain):
    params = greedy(10)
    expected = ids_of(plain.generate(PROMPTS, params))

    async def main():
        calls = [llm.generate(prompt, params) for prompt in PROMPTS * 3]
        return [ids_of(result)[0] for result in await asyncio.gather(*calls)]

    assert run(llm, main) == expected * 3


@pytest.mark.reliability
@pytest.mark.parametrize("phase", ["at once", "prefill", "decode"])
def test_cancelling_a_task_frees_its_requests(llm, phase):
    async def main():
        seen = asyncio.Event()

        async def call():
            if phase == "decode":
                async for _ in llm.stream("a", greedy(1500)):
                    seen.set()
            else:
                await llm.generate([{"prompt_token_ids": [7] * 1500}] * 20, greedy(400))

        task = asyncio.create_task(call())
        if phase == "decode":
            await seen.wait()
        elif phase == "prefill":
            await asyncio.sleep(0.02)
        else:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(llm, main)


async def divide_by_tokens(stream):
    async for delta in stream:
        _ = 1 // (len(delta.token_ids) - 1)


@pytest.mark.reliability
@pytest.mark.parametrize("way", ["break", "aclose", "raise"])
def test_leaving_a_stream_frees_its_request(llm, way):
    async def main():
        if way == "break":
            async for _ in llm.stream("a", greedy(1500)):
                break
        elif way == "aclose":
            async with aclosing(llm.stream("a", greedy(1500))) as deltas:
                await anext(deltas)
        else:
            with pytest.raises(ZeroDivisionError):
                await divide_by_tokens(llm.stream("a", greedy(1500)))
        for _ in range(3):  # the event loop closes what was left in its next turns
            await asyncio.sleep(0)

    run(llm, main)


@pytest.mark.reliability
def test_hundreds_of_cancels_leave_nothing_behind(llm):
    async def main():
        async def one(number):
            async for _ in llm.stream("the thin man", greedy(300)):
                if number % 3 == 0:
                    break
                await asyncio.sleep(0)

        for _ in range(5):
            tasks = [asyncio.create_task(one(number)) for number in range(60)]
            await asyncio.sleep(0.03)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await asyncio.sleep(0.01)

    run(llm, main)


def test_a_request_that_fails_leaves_no_task_of_the_others(llm, monkeypatch):
    engine = llm._bridge.loop._engine
    submit = engine.submit

    def submit_some(request):
        if request.prompt_token_ids == [7]:
            raise OutOfMemoryError("no room.")
        submit(request)

    monkeypatch.setattr(engine, "submit", submit_some)

    async def main():
        before = asyncio.all_tasks()
        prompts = [{"prompt_token_ids": ids} for ids in ([5], [7], [9])]
        with pytest.raises(OutOfMemoryError):
            await llm.generate(prompts, greedy(1000))
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before

    run(llm, main)


def test_wrong_calls_are_refused_before_anything_runs(llm):
    async def main():
        for error, match, call in (
            (ArgumentError, "2 prompts but 1", llm.generate(["a", "b"], [greedy()])),
            (ArgumentError, "cannot be read", llm.generate([5])),
            (ArgumentError, "of type int", llm.generate(5)),
            (InvalidRequestError, "prompt_token_ids", llm.generate({"prompt_token_ids": [-1]})),
            (ArgumentError, "SamplingParams", llm.chat(MESSAGES, {"n": 1})),
            (ContextLengthError, "2048", llm.logits([1] * 2049)),
            (InvalidRequestError, "role", llm.chat([{"role": "x", "content": ""}])),
            (ContextLengthError, "2048", anext(llm.stream({"prompt_token_ids": [1] * 2048}))),
        ):
            with pytest.raises(error, match=match):
                await call

    run(llm, main)
    with pytest.raises(ModelNotFoundError):
        AsyncLLM("nowhere.gguf")


def test_it_serves_one_event_loop_after_the_other(llm):
    async def main():
        return ids_of(await llm.generate("a", greedy(3)))

    assert run(llm, main) == run(llm, main)


@pytest.mark.reliability
def test_an_event_loop_that_vanishes_leaves_nothing_behind(llm):
    loop = asyncio.new_event_loop()

    async def leave_open():
        stream = llm.stream("a", greedy(1500))
        await anext(stream)
        return stream

    left = loop.run_until_complete(leave_open())
    reading = asyncio.all_tasks(loop)
    loop.close()

    async def main():
        while llm._bridge._by_engine_request:
            await asyncio.sleep(0.001)

    run(llm, main)
    assert left.ag_frame is not None
    with warnings.catch_warnings():  # asyncio warns that the task had not ended, which is true
        warnings.simplefilter("ignore")
        for task in reading:
            task._log_destroy_pending = False
        with pytest.raises(RuntimeError):
            left.athrow(GeneratorExit).send(None)


def test_a_fork_is_told_that_nothing_would_answer(llm, monkeypatch):
    monkeypatch.setattr(llm, "_pid", 0)

    async def main():
        with pytest.raises(InvalidRequestError, match="the process that forked"):
            await llm.generate("a", greedy())

    asyncio.run(main())


def test_closing_ends_open_streams_and_the_thread():
    async def main():
        async with open_async() as llm:
            thread = llm._thread
            stream = llm.stream("a", greedy(1500))
            await anext(stream)
            waiting = asyncio.create_task(llm.generate("a", greedy(1500)))
            await asyncio.sleep(0.01)
        assert not thread.is_alive()
        with pytest.raises(InvalidRequestError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(InvalidRequestError, match="closed"):
            await waiting
        for call in (llm.generate("a"), llm.logits([5]), anext(llm.stream("a"))):
            with pytest.raises(InvalidRequestError, match="closed"):
                await call
        await llm.close()
        assert await llm.decode(await llm.encode("still text")) == "still text"

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_ends_every_stream_with_its_cause(monkeypatch):
    async def main():
        async with open_async() as llm:
            engine = llm._bridge.loop._engine
            step, left = engine.step, [5]

            def broken():
                left[0] -= 1
                if left[0] == 0:
                    raise RuntimeError("CUDA error")
                return step()

            monkeypatch.setattr(engine, "step", broken)
            calls = (llm.generate("a", greedy(50)) for _ in range(3))
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, EngineDeadError)
                assert str(error.__cause__) == "CUDA error"
            with pytest.raises(EngineDeadError):
                await llm.generate("a")

    asyncio.run(main())


def test_one_that_is_dropped_ends_its_thread():
    llm = open_async()
    thread, gone = llm._thread, weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert thread not in threading.enumerate()


def test_a_program_that_forgets_to_close_ends_quietly():
    program = f"""
import asyncio
from tiercel import AsyncLLM, SamplingParams
llm = AsyncLLM({str(LLAMA.resolve())!r}, device="cpu")
async def main():
    async for delta in llm.stream("a", SamplingParams(max_tokens=500, ignore_eos=True)):
        return len(delta.token_ids)
print(asyncio.run(main()))
"""
    root = LLAMA.parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
