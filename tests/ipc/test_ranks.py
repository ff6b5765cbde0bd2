"""An engine of several processes: any of them may die, and all of them start again."""

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path

import pytest
import uvloop

from tests.dsv4_engine import open_v4, write_repeating
from tests.engine_process import (
    Maker,
    is_alive,
    make_client,
    open_client,
    read,
    wait_idle,
    wait_restarted,
    wait_until,
)
from tests.gguf_files import tiny_model
from tests.patience import PATIENCE_S
from tests.tiny_llm import LLAMA, greedy, ids_of, open_tiny
from tiercel.errors import ArgumentError, EngineDeadError
from tiercel.ipc.supervisor import SupervisorSettings

pytestmark = pytest.mark.reliability
TWO = {"tensor_parallel_size": 2, "threads": 1, "max_num_batched_tokens": 16}


@pytest.fixture(autouse=True)
def _cpu_ranks(monkeypatch):
    monkeypatch.setenv("TIERCEL_CPU_RANKS", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose heads and widths 4 ranks can share."""
    return tiny_model(tmp_path_factory.mktemp("ranks") / "tiny.gguf", head_dim=32, context=2048)


def run(main):
    """Run a test on the event loop that the server has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), 5 * PATIENCE_S))


def ranks_of(client):
    """Process ids of all ranks of a client's engine, in order."""
    children = Path(f"/proc/{client.pid}/task").glob("*/children")
    others = sorted(int(pid) for path in children for pid in path.read_text().split())
    return [client.pid, *others]


@contextlib.asynccontextmanager
async def opened(model, **options):
    client = await open_client(model, **(TWO | options))
    try:
        yield client, Maker(client.info)
    finally:
        ranks = ranks_of(client) if client.pid else []
        await client.close()
        await wait_until(lambda: not any(map(is_alive, ranks)))


async def answer(client, make, num_tokens=20):
    request = make("the thin man", greedy(num_tokens))
    await read(client.submit(request))
    return request.output_token_ids


async def assert_dies(client, streams, ranks, words):
    """Every stream ends by the death itself, for which no heartbeat is awaited; nothing is left."""
    for stream in streams:
        with pytest.raises(EngineDeadError, match="under way") as caught:
            await asyncio.wait_for(read(stream), PATIENCE_S)
        assert (caught.value.http_status, caught.value.code) == (503, "engine_restarting")
    await wait_until(lambda: words in (client.failure or ""))  # before, that of an earlier death
    await wait_until(lambda: not any(map(is_alive, ranks)))


@pytest.mark.parametrize(
    "victims",
    [
        [1],
        pytest.param([0, 0], marks=pytest.mark.slow),
        pytest.param([1, 1], marks=pytest.mark.slow),
        pytest.param([1, 2, 3], marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_ends_all_and_they_come_back(model, victims, caplog):
    """In decode, and then in prefill; then they answer as one rank does."""
    size = {"tensor_parallel_size": 4 if len(victims) == 3 else 2}

    async def main():
        with open_tiny(model, threads=1) as alone:
            expected = alone.generate("the thin man", greedy(20))[0].outputs[0].token_ids
        async with opened(model, **size) as (client, make):
            for restart, victim in enumerate(victims, 1):
                assert await answer(client, make) == list(expected)
                ranks = ranks_of(client)
                assert len(ranks) == size["tensor_parallel_size"]
                in_prefill = restart == 2
                # Contents that died before would be suspects.
                prompt, count = ([9] * 1800, 5) if in_prefill else ([restart, 9], 1500)
                streams = [client.submit(make(prompt, greedy(count))) for _ in range(2)]
                if in_prefill:
                    await wait_until(lambda streams=streams: streams[0].entered_s is not None)
                else:
                    await anext(streams[0])
                os.kill(ranks[victim], signal.SIGKILL)
                words = f"rank {victim} was ended by signal SIGKILL" if victim else "SIGKILL"
                await assert_dies(client, streams, ranks, words)
                await wait_restarted(client, restart)
            assert await answer(client, make) == list(expected)
            await wait_idle(client, make)

    with caplog.at_level(logging.ERROR):
        run(main)
    assert "last step" in caplog.text, "the requests that ran are suspects"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        # Its request ends, so rank 0 goes on alone: words differ, or it waits for a sum for 30 s.
        pytest.param("nan:0@3/1", "rank ", marks=pytest.mark.slow),
        pytest.param("oom@3/1", "rank 1 failed: step 3 ran out", marks=pytest.mark.slow),
        pytest.param("raise@3/1", "rank 1 failed: RuntimeError: step 3", marks=pytest.mark.slow),
        pytest.param("exit@3/1", "rank 1 ended with status 3", marks=pytest.mark.slow),
        pytest.param("raise@3/0", "RuntimeError: step 3", marks=pytest.mark.slow),
        pytest.param("sleep:40@3/1", "rank 1 hung for 30 s", marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_one_rank_ends_all(model, monkeypatch, fault, words):
    monkeypatch.setenv("TIERCEL_FAULTS", fault)

    async def main():
        settings = SupervisorSettings(first_delay_s=0.05)  # where a rank waits for another one
        async with opened(model, enable_fault_injection=True, settings=settings) as (client, make):
            ranks = ranks_of(client)
            streams = [client.submit(make("a", greedy(1500)))]
            await assert_dies_in_time(client, streams, ranks, words)

    run(main)


async def assert_dies_in_time(client, streams, ranks, words):
    """Like `assert_dies`; with whole models on all ranks the streams may end before."""
    with contextlib.suppress(EngineDeadError):
        for stream in streams:
            await read(stream)
    await wait_until(lambda: client.failure is not None, 45)
    assert words in client.failure
    await wait_until(lambda: not any(map(is_alive, ranks)))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_it_loads_is_started_again(model, victim):
    async def main():
        client = make_client(model, **TWO)
        await client.start()
        await wait_until(lambda: client.pid is not None and len(ranks_of(client)) == 2, 30)
        first = ranks_of(client)
        os.kill(first[victim], signal.SIGKILL)
        await client.wait_ready()
        assert client.num_restarts == 1
        assert not any(map(is_alive, first))
        assert await answer(client, Maker(client.info))
        await client.close()

    run(main)


@pytest.mark.slow
def test_a_rank_that_ends_while_it_loads_is_started_again(model, monkeypatch):
    monkeypatch.setenv("TIERCEL_FAULTS", "exit@start/1")

    async def main():
        client = make_client(model, enable_fault_injection=True, **TWO)
        await client.start()
        with pytest.raises(EngineDeadError, match="rank 1 ended with status 3"):
            await client.wait_ready()  # the second one ended alike
        assert client.num_restarts == 1
        await client.close()

    run(main)


def test_options_that_cannot_be_end_the_start(monkeypatch):
    """Before another process is started, with the error of the option."""
    monkeypatch.delenv("TIERCEL_CPU_RANKS")

    async def main():
        client = make_client(LLAMA, **TWO)
        await client.start()
        with pytest.raises(ArgumentError, match="needs 2 GPUs, but the device is the CPU"):
            await client.wait_ready()
        assert client.num_restarts == 0
        await client.close()

    run(main)


@pytest.mark.slow
def test_requests_of_each_rank_are_answered_and_end(tmp_path):
    """Many together, some aborted, over a socket; then a rank is killed in the middle of others."""
    path = write_repeating(tmp_path, tokenizer=True)
    prompts = [[5 + number] * (3 + 17 * number) for number in range(5)]
    precise = {"dtype": "float32", "spec": "ngram", "max_num_batched_tokens": 64}
    with open_v4(path, **precise) as alone:
        listed = [{"prompt_token_ids": prompt} for prompt in prompts]
        expected = [answer for (answer,) in ids_of(alone.generate(listed, greedy(20)))]

    async def main():
        options = precise | {"data_parallel_attention": True, "max_num_seqs": 2}
        async with opened(path, **options) as (client, make):
            assert client.info.max_num_seqs == 4, "of both ranks"
            requests = [make(prompt, greedy(20)) for prompt in prompts]
            streams = [client.submit(request) for request in requests]
            for number in (0, 3):
                await anext(streams[number])
                client.abort(requests[number])
            await asyncio.gather(*map(read, streams))
            for request, wanted in zip(requests, expected, strict=True):
                found = request.output_token_ids
                assert list(found) == wanted[: len(found)]
            assert sum(len(request.output_token_ids) == 20 for request in requests) >= 3
            ranks = ranks_of(client)
            streams = [client.submit(make([9, 8], greedy(250))) for _ in range(3)]
            await anext(streams[0])
            os.kill(ranks[1], signal.SIGKILL)
            await assert_dies(client, streams, ranks, "rank 1 was ended by signal SIGKILL")
            await wait_until(lambda: client.num_restarts == 1)
            await client.wait_ready()
            request = make(prompts[4], greedy(20))
            await read(client.submit(request))
            assert list(request.output_token_ids) == expected[4]

    run(main)
