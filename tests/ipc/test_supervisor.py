"""Engine processes that die, hang, fail and are left behind."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from tests.engine_process import (
    QUICK,
    Maker,
    descriptors,
    halted,
    is_alive,
    make_client,
    open_client,
    read,
    wait_idle,
    wait_restarted,
    wait_until,
)
from tests.patience import PATIENCE_S, wait_for
from tests.tiny_llm import LLAMA, greedy
from tiercel.errors import EngineDeadError
from tiercel.ipc import spawn
from tiercel.ipc.supervisor import EngineState, RestartPolicy, SupervisorSettings

pytestmark = pytest.mark.reliability
ROOT = Path(__file__).parents[2]
CHUNKED = {"max_num_seqs": 2, "max_num_batched_tokens": 16}


def test_delays_double_and_come_to_an_end():
    policy = RestartPolicy(SupervisorSettings())
    assert [policy.next_delay(t) for t in range(5)] == [1, 2, 4, 8, 16]
    assert policy.next_delay(500) is None
    assert policy.next_delay(600) is None
    assert policy.next_delay(601.5) == 8, "two restarts are forgotten, three are not"
    assert policy.next_delay(2000) == 1
    assert RestartPolicy(SupervisorSettings(max_restarts=0)).next_delay(0) is None


class Bench:
    """A client whose engine dies in each test, and the answer that each next engine must give."""

    def __init__(self):
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.num_deaths = 0
        self.client = self.runner.run(open_client(**CHUNKED))
        self.make = Maker(self.client.info)
        self.answer = self.runner.run(self.ask())

    async def ask(self):
        request = self.make("the thin man", greedy(20))
        await read(self.client.submit(request))
        assert request.finish_reason == "length"
        return request.output_token_ids

    def run(self, main, *, dies=True):
        """Run a test; if the engine dies in it, the next one must come and give the same answer."""

        async def whole():
            await asyncio.wait_for(main(self.client, self.make), 2 * PATIENCE_S)
            self.num_deaths += dies
            await wait_restarted(self.client, self.num_deaths)
            assert await self.ask() == self.answer
            await wait_idle(self.client, self.make)

        before = descriptors()
        self.runner.run(whole())
        assert descriptors() <= before


@pytest.fixture(scope="module")
def bench():
    made = Bench()
    yield made
    made.runner.run(made.client.close())
    made.runner.close()


async def assert_dies(stream, words="under way"):
    """A stream ends with the error of a dead engine, for whose death no heartbeat is awaited."""
    with pytest.raises(EngineDeadError, match=words):
        await asyncio.wait_for(read(stream), PATIENCE_S)
    assert stream.request.finish_reason == "error"


def test_killed_while_idle(bench):
    async def main(client, make):
        pid = client.pid
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: client.state is EngineState.RESTARTING)
        with pytest.raises(EngineDeadError, match="restarting"):
            client.submit(make("a"))
        await wait_until(lambda: client.failure is not None)
        assert "SIGKILL" in client.failure
        assert not is_alive(pid)

    bench.run(main)


def test_killed_in_prefill(bench):
    async def main(client, make):
        streams = [client.submit(make([9] * 1800, greedy(5))) for _ in range(3)]
        await wait_until(lambda: streams[0].entered_s is not None)
        os.kill(client.pid, signal.SIGKILL)
        await assert_dies(streams[-1])
        assert streams[-1].request.output_token_ids == []
        await wait_until(lambda: "SIGKILL" in (client.failure or ""))

    bench.run(main)


def test_killed_in_decode_with_others_waiting(bench, caplog):
    async def main(client, make):
        streams = [client.submit(make("a", greedy(1500))) for _ in range(4)]
        for stream in streams[:2]:
            await anext(stream)
        os.kill(client.pid, signal.SIGKILL)
        await asyncio.gather(*(assert_dies(stream) for stream in streams))
        names = [stream.request.request_id for stream in streams]
        (line,) = [r.getMessage() for r in caplog.records if "last step" in r.getMessage()]
        assert all(name in line for name in names[:2]), "those that ran are suspects"
        assert not any(name in line for name in names[2:])
        assert client.num_running == client.num_waiting == 0

    with caplog.at_level(logging.ERROR):
        bench.run(main)


def test_a_stopped_engine_is_killed_when_there_is_work():
    async def main():
        watched = SupervisorSettings(heartbeat_s=1.0, max_restarts=0)
        client = await open_client(settings=watched, **CHUNKED)
        pid = client.pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.3)
        assert client.state is EngineState.READY, "without work its silence means nothing"
        stream = client.submit(Maker(client.info)("a", greedy(5)))
        await assert_dies(stream, "is dead")
        await wait_until(lambda: (client.failure or "").startswith("no progress in"))
        assert not is_alive(pid)
        await client.close()

    asyncio.run(main())


def test_signals_of_the_terminal_are_for_the_parent(bench):
    async def main(client, make):
        stream = client.submit(make("a", greedy(100)))
        await anext(stream)
        assert os.getsid(client.pid) != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(client.pid, number)
        assert (await read(stream))[-1].finish_reason == "length"

    bench.run(main, dies=False)


def test_an_engine_that_fails_at_each_start_is_given_up(monkeypatch):
    monkeypatch.setenv("TIERCEL_FAULTS", "exit@start")
    settings = SupervisorSettings(first_delay_s=0.01, max_restarts=3)

    async def main():
        client = make_client(settings=settings, enable_fault_injection=True)
        await client.start()
        with pytest.raises(EngineDeadError, match="status 3"):
            await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
        await asyncio.wait_for(client.wait_ended(), PATIENCE_S)
        assert client.state is EngineState.DEAD
        assert client.num_restarts == 1, "the second one ended alike"
        assert client.pid is None
        await client.close()
        assert client.state is EngineState.DEAD

    asyncio.run(main())


def test_a_client_may_be_closed_while_the_next_engine_is_awaited(monkeypatch):
    monkeypatch.setenv("TIERCEL_FAULTS", "exit@start")

    async def main():
        settings = SupervisorSettings(first_delay_s=60)
        client = make_client(settings=settings, enable_fault_injection=True)
        await client.start()
        await wait_until(lambda: client.failure is not None)
        assert client.state is EngineState.RESTARTING
        await asyncio.wait_for(client.close(), PATIENCE_S)  # not the delay
        assert client.state is EngineState.DRAINING
        with pytest.raises(EngineDeadError, match="status 3"):
            await client.wait_ready()

    asyncio.run(main())


def test_a_step_that_fails_names_its_requests_and_why(monkeypatch, caplog):
    monkeypatch.setenv("TIERCEL_FAULTS", "sleep:0.3@1,raise@4")

    async def main():
        once = SupervisorSettings(heartbeat_s=4 * PATIENCE_S, max_restarts=0)
        client = await open_client(settings=once, enable_fault_injection=True, **CHUNKED)
        make = Maker(client.info)
        with halted(client.pid):
            streams = [client.submit(make("a", greedy(50))) for _ in range(3)]
        await asyncio.gather(*(assert_dies(stream, "is dead") for stream in streams))
        lengths = [len(stream.request.output_token_ids) for stream in streams]
        assert (lengths[0], lengths[2]) == (3, 0)
        assert lengths[1] in (2, 3)  # it may have come while the first step was asleep
        await client.wait_ended()
        assert client.state is EngineState.DEAD
        assert client.failure == "RuntimeError: step 4 failed, as TIERCEL_FAULTS asks."
        await client.close()
        return [stream.request.request_id for stream in streams]

    with caplog.at_level(logging.ERROR):
        names = asyncio.run(main())
    (line,) = [r.getMessage() for r in caplog.records if "last step" in r.getMessage()]
    assert line.endswith(": " + ", ".join(names[:2]))
    assert "Traceback" in caplog.text


def test_faults_of_one_request_leave_the_engine_alive(monkeypatch):
    # The first pair has ended by step 5, whichever request came a step later; step 8 finds both of
    # the second. The first step of a pair waits for the other request to come.
    pauses = ",".join(f"sleep:0.3@{step}" for step in (1, 4, 5, 6))
    monkeypatch.setenv("TIERCEL_FAULTS", f"nan:0@2,oom@8,{pauses}")

    async def main():
        client = await open_client(enable_fault_injection=True, max_num_seqs=2)
        make = Maker(client.info)

        async def ask_two(*lengths):
            requests = [make("the thin man", greedy(length)) for length in lengths]
            with halted(client.pid):
                streams = [client.submit(request) for request in requests]
            await asyncio.gather(*map(read, streams))
            await wait_idle(client, make)
            return requests

        broken, sound = await ask_two(8, 3)
        assert (broken.finish_reason, broken.stop_reason) == ("error", "nonfinite_logits")
        assert (sound.finish_reason, len(broken.output_token_ids)) == ("length", 1)
        older, newest = await ask_two(12, 12)
        assert (newest.finish_reason, newest.stop_reason) == ("error", "out_of_memory")
        assert older.finish_reason == "length"
        assert older.output_token_ids[:3] == sound.output_token_ids
        assert client.stats.num_nonfinite == 1
        assert client.num_restarts == 0
        await client.close()

    asyncio.run(main())


@pytest.mark.usefixtures("own_processes")
def test_a_process_that_speaks_another_language_is_ended(monkeypatch):
    monkeypatch.setattr(
        spawn,
        "_BOOT",
        "import os, sys, time; os.write(int(sys.argv[3]), b'GET / HTTP/1.1'); time.sleep(60)",
    )

    async def main():
        settings = SupervisorSettings(max_restarts=0, exit_grace_s=0.2)
        client = make_client(settings=settings)
        await client.start()
        pid = client.pid
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
        assert not is_alive(pid)
        await client.close()

    asyncio.run(main())


@pytest.mark.usefixtures("own_processes")
def test_without_a_process_start_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")

    async def main():
        before = descriptors()
        client = make_client()
        with pytest.raises(EngineDeadError, match="No such file"):
            await client.start()
        await client.close()
        assert descriptors() == before

    asyncio.run(main())


PARENT = """
import asyncio, sys
from tests.engine_process import make_client
async def main():
    client = make_client(enable_fault_injection=True)
    await client.start()
    if sys.argv[1] == "ready":
        await client.wait_ready()
    print(client.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["starting", "ready"])
def test_an_engine_does_not_outlive_its_parent(state):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if state == "starting":
        environment["TIERCEL_FAULTS"] = "sleep:60@start"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state],
        stdout=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
        text=True,
    )
    try:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
    finally:
        parent.kill()
        parent.communicate()
    wait_for(lambda: not is_alive(pid))


@pytest.mark.parametrize("state", ["starting", "idle"])
def test_an_engine_leaves_when_its_socket_closes(state, monkeypatch):
    """What ends it where no signal tells of the parent's death."""
    if state == "starting":
        monkeypatch.setenv("TIERCEL_FAULTS", "sleep:60@start")

    async def main():
        client = make_client(enable_fault_injection=True)
        await client.start()
        pid = client.pid
        if state == "idle":
            await client.wait_ready()
        else:
            await asyncio.sleep(0.5)
        monkeypatch.setattr(spawn.EngineProcess, "kill", lambda _: pytest.fail("it did not leave"))
        client._supervisor._stopping.set()
        client._supervisor._engine.close()
        await wait_until(lambda: not is_alive(pid))
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("is_offline", [False, True])
@pytest.mark.usefixtures("own_processes")
def test_no_key_reaches_an_engine_process_and_a_token_only_one_that_fetches(
    is_offline, monkeypatch
):
    monkeypatch.setenv("TIERCEL_API_KEY", "secret-key")
    monkeypatch.setenv("HF_TOKEN", "secret-token")

    async def main():
        client = make_client(offline=is_offline)
        await client.start()
        environment = Path(f"/proc/{client.pid}/environ")
        # exec reports success before the kernel has the new process's strings.
        async with asyncio.timeout(PATIENCE_S):
            while not (found := environment.read_text()):
                await asyncio.sleep(0.01)
        await client.close()
        return found

    found = asyncio.run(main())
    assert "PATH=" in found
    assert "secret-key" not in found
    assert ("secret-token" in found) is not is_offline


@pytest.mark.usefixtures("own_processes")
def test_the_engine_loads_nothing_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "msgspec.py").write_text("raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)

    async def main():
        client = make_client(LLAMA.resolve(), settings=QUICK)
        await client.start()
        await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
        assert client.num_restarts == 0
        await client.close()

    with contextlib.chdir(tmp_path):
        asyncio.run(main())
