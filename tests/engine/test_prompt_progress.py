"""Progress of prompts: which steps are reported, and what a reader in another process gets."""

import asyncio

import pytest

from tests.engine_process import Maker, open_client, read
from tests.tiny_llm import LLAMA, greedy
from tiercel.async_llm import AsyncLLM
from tiercel.engine.prompt_progress import REPORT_SECONDS, ProgressReports, num_computed
from tiercel.llm import LLM
from tiercel.params import SamplingParams
from tiercel.request.request import Request, Status

PROMPT = [5] * 100
SMALL = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_batched_tokens": 32,
    "max_num_seqs": 2,
}


def running(num_committed, *, num_tokens=100, num_cached=0):
    request = Request("a", [5] * num_tokens, SamplingParams(), 0, 0, frozenset(), 4)
    request.status = Status.RUNNING
    request.num_committed, request.num_cached = num_committed, num_cached
    return request


def test_only_a_prompt_that_is_partly_computed_is_reported():
    partly = running(40)
    waiting = running(40)
    waiting.status = Status.WAITING
    others = [running(0), running(100), running(32, num_cached=32), waiting]
    assert ProgressReports().take([*others, partly], 1.0) == (partly,)


def test_a_request_is_reported_at_most_four_times_a_second():
    reports = ProgressReports()
    first, second = running(16), running(16)
    assert reports.take([first], 1.0) == (first,)
    assert reports.take([first, second], 1.1) == (second,)
    assert reports.take([first, second], 1.0 + REPORT_SECONDS) == (first,)
    first.num_committed = 100  # done; then its place is another's
    assert reports.take([first, second], 2.0) == (second,)
    assert reports.take([], 2.1) == ()
    assert reports.take([second], 2.1) == (second,)
    assert REPORT_SECONDS == 0.25


def test_a_prompt_counts_as_computed_once_it_has_an_answer():
    request = running(40)
    assert num_computed(request) == 40
    request.num_committed = 103  # with three tokens of the answer
    assert num_computed(request) == 100
    request.output_token_ids = [1]
    request.num_committed = 0  # preempted
    assert num_computed(request) == 100


def slow_steps(monkeypatch, *steps):
    monkeypatch.setenv("TIERCEL_FAULTS", ",".join(f"sleep:0.3@{step}" for step in steps))


@pytest.mark.usefixtures("forked_engines")
def test_progress_travels_from_the_engine_process(monkeypatch):
    """100 tokens in steps of 32: reports come after steps 1 to 3, the rest of them slow."""
    slow_steps(monkeypatch, 2, 3)

    async def main():
        client = await open_client(
            max_num_batched_tokens=32, max_num_seqs=2, enable_fault_injection=True
        )
        try:
            request = Maker(client.info)(PROMPT, greedy(3))
            stream, seen = client.submit(request), []
            stream.on_progress = seen.append
            assert len(await read(stream)) == 3
            short = client.submit(Maker(client.info)([6] * 20, greedy(2)))
            short.on_progress = seen.append
            await read(short)
            return seen
        finally:
            await client.close()

    assert asyncio.run(main()) == [32, 64, 96]


def test_progress_reaches_readers_in_this_process():
    async def main():
        seen = []
        async with AsyncLLM(LLAMA, **SMALL) as llm:
            llm._bridge.loop._reports.take = lambda requests, now_s: _partly_computed(requests)
            stream = llm.stream({"prompt_token_ids": PROMPT}, greedy(3), progress=note(seen))
            assert len([delta async for delta in stream]) == 3
        return seen

    assert asyncio.run(main()) == [(32, 100), (64, 100), (96, 100)]


def _partly_computed(requests):
    """What `ProgressReports` reports where each step takes a quarter of a second."""
    return ProgressReports().take(requests, 0.0)


def note(seen):
    return lambda *numbers: seen.append(numbers)


def test_progress_of_a_call_in_this_process():
    steps = [(32, 100), (64, 100), (96, 100)]
    prompt = {"prompt_token_ids": PROMPT}
    with LLM(LLAMA, **SMALL) as llm:
        seen = []
        assert len(list(llm.stream(prompt, greedy(3), progress=note(seen)))) == 3
        assert seen == steps
        llm._engine.forget()
        seen = []
        llm.generate([prompt], greedy(2, n=2), progress=note(seen))
        assert seen == steps
        seen = []
        llm.generate([{"prompt_token_ids": [6] * 20}], greedy(2), progress=note(seen))
        assert not seen
