"""Ends of an engine process: while it loads, while requests live, and errors of its start."""

import asyncio
import os
import signal

import pytest

from tests.engine_process import (
    Maker,
    is_alive,
    make_client,
    open_client,
    read,
)
from tests.gguf_files import tiny_model
from tests.ipc.test_client import SMALL
from tests.patience import PATIENCE_S
from tests.tiny_llm import LLAMA, greedy
from tiercel.errors import (
    ArgumentError,
    EngineDeadError,
    ModelFormatError,
    ModelNotFoundError,
    OutOfMemoryError,
)
from tiercel.ipc.supervisor import EngineState


def test_who_waits_for_an_engine_to_forget_hears_of_its_death():
    async def main():
        client = await open_client(**SMALL)
        os.kill(client.pid, signal.SIGSTOP)
        forgetting = asyncio.create_task(client.forget())
        await asyncio.sleep(0.1)
        assert not forgetting.done()
        os.kill(client.pid, signal.SIGKILL)
        await asyncio.wait_for(forgetting, PATIENCE_S)
        await client.forget()  # nobody is there
        await client.close()

    asyncio.run(main())


def test_what_is_live_at_the_end_is_drained_then_aborted(monkeypatch):
    # From the 40th step on the longer one takes 5 s at least.
    monkeypatch.setenv("TIERCEL_FAULTS", ",".join(f"sleep:0.02@{n}" for n in range(40, 290)))

    async def main():
        client = await open_client(**SMALL, enable_fault_injection=True)
        make = Maker(client.info)
        pid = client.pid
        short, long = make("a", greedy(8)), make("a", greedy(2000))
        streams = [client.submit(short), client.submit(long)]
        await anext(streams[1])
        closing = asyncio.create_task(client.close(1.5))
        await asyncio.sleep(0)
        assert client.state is EngineState.DRAINING
        with pytest.raises(EngineDeadError, match="draining"):
            client.submit(make("a"))
        outcome = await asyncio.gather(*(read(stream) for stream in streams))
        await closing
        await client.close()
        assert [updates[-1].finish_reason for updates in outcome] == ["length", "abort"]
        assert not is_alive(pid)
        with pytest.raises(EngineDeadError):
            await client.wait_ready()

    asyncio.run(main())


def test_an_engine_may_be_closed_while_it_loads():
    async def main():
        client = make_client()
        await client.start()
        pid = client.pid
        assert client.state is EngineState.LOADING
        with pytest.raises(EngineDeadError, match="loading"):
            client.check_room()
        waiting = asyncio.create_task(client.wait_ready())
        await asyncio.sleep(0.1)
        await asyncio.wait_for(client.close(), PATIENCE_S)
        assert not is_alive(pid)
        with pytest.raises(EngineDeadError):
            await waiting

    asyncio.run(main())


@pytest.mark.reliability
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ModelNotFoundError, "gone.gguf"),
        (ModelFormatError, "cut.gguf"),
        (OutOfMemoryError, "one sequence of 131072 tokens"),
        (ArgumentError, "TIERCEL_FAULTS is set"),
    ],
)
def test_errors_of_loading_keep_their_class_and_are_final(tmp_path, monkeypatch, kind, words):
    path = tmp_path / words
    if kind is ModelFormatError:
        path.write_bytes(LLAMA.read_bytes()[:5000])
    elif kind is OutOfMemoryError:
        # 1 MiB of cache a token and 256 GiB in all, but 17 MB of weights.
        path = tiny_model(
            tmp_path / "wide.gguf",
            layers=16,
            hidden=32,
            heads=64,
            kv_heads=64,
            head_dim=128,
            context=2**18,
        )
    elif kind is ArgumentError:
        path = LLAMA
        monkeypatch.setenv("TIERCEL_FAULTS", "exit@start")

    async def main():
        client = make_client(path)
        await client.start()
        with pytest.raises(kind, match=words) as caught:
            await client.wait_ready()
        assert type(caught.value) is kind
        await asyncio.wait_for(client.wait_ended(), PATIENCE_S)
        assert client.state is EngineState.DEAD
        assert client.num_restarts == 0
        assert words in client.failure
        assert client.pid is None
        with pytest.raises(EngineDeadError, match="dead"):
            client.check_room()
        await client.close()

    asyncio.run(main())
