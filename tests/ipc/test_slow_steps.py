"""Engine processes on a machine that is slow, or seems to be; see `slow` in `faults.py`."""

import asyncio

import pytest

from tests.engine_process import Maker, open_client, read, wait_until
from tests.gguf_files import tiny_model
from tests.patience import PATIENCE_S
from tests.tiny_llm import LLAMA, greedy
from tiercel.errors import EngineDeadError
from tiercel.ipc.supervisor import SupervisorSettings

pytestmark = pytest.mark.reliability
WATCHED = SupervisorSettings(first_delay_s=0.05, heartbeat_s=2.0, max_restarts=0)
LONG_PROMPT = [9] * 6000


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "long.gguf", context=8192)


def test_a_stream_goes_on_while_a_long_prompt_enters(long_model, monkeypatch):
    """0.5 ms a token: three steps of 2,048 tokens would take a second each."""
    monkeypatch.setenv("TIERCEL_FAULTS", "slow:0.5@start")

    async def main():
        client = await open_client(long_model, enable_fault_injection=True)
        make = Maker(client.info)
        stream = client.submit(make("a", greedy(200)))
        for _ in range(10):
            await anext(stream)
        reading = asyncio.create_task(read(stream))
        prompt = client.submit(make(LONG_PROMPT, greedy(2)))
        before = len(stream.request.output_token_ids)
        await anext(prompt)
        num_beside = len(stream.request.output_token_ids) - before
        await asyncio.gather(reading, read(prompt))
        lengths = [len(s.request.output_token_ids) for s in (stream, prompt)]
        assert client.num_restarts == 0
        await client.close()
        return num_beside, lengths

    num_beside, lengths = asyncio.run(main())
    assert num_beside >= 10, "tokens of the stream while 3 s of prompt were computed"
    assert lengths == [200, 2]


def test_a_step_that_advances_may_last_longer_than_the_watchdog_waits(monkeypatch):
    monkeypatch.setenv("TIERCEL_FAULTS", "slow:60@start")

    async def main():
        client = await open_client(LLAMA, settings=WATCHED, enable_fault_injection=True)
        make = Maker(client.info)
        request = make([9] * 50, greedy(2))  # 3 s in one step
        await asyncio.wait_for(read(client.submit(request)), 5 * PATIENCE_S)
        assert request.finish_reason == "length"
        assert client.stats.num_steps <= 4
        assert client.num_restarts == 0
        await client.close()

    asyncio.run(main())


def test_a_step_that_hangs_ends_the_engine(monkeypatch, capfd):
    monkeypatch.setenv("TIERCEL_FAULTS", "sleep:600@3")

    async def main():
        client = await open_client(LLAMA, settings=WATCHED, enable_fault_injection=True)
        make = Maker(client.info)
        stream = client.submit(make("a", greedy(9)))
        with pytest.raises(EngineDeadError, match="engine is dead"):
            await asyncio.wait_for(read(stream), PATIENCE_S)
        await wait_until(lambda: client.failure is not None)
        assert client.failure.startswith("no progress in ")
        assert len(stream.request.output_token_ids) == 2
        await client.close()

    asyncio.run(main())
    assert "before_step" in capfd.readouterr().err, "the stacks tell where it hung"
