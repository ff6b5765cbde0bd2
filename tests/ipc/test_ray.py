"""Engines on a Ray cluster of two hosts, emulated on this machine: placed, lost, and placed again.

Each host has one CPU for one rank, so that two replicas, or two ranks of one engine, need both.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import uvloop

from tests.cli.harness import tiercel
from tests.engine_process import Maker, is_alive, read, wait_until
from tests.gguf_files import tiny_model
from tests.patience import wait_for
from tests.serve.harness import NAME, check_alive, start_server
from tests.tiny_llm import greedy, open_tiny
from tiercel.cli.serve import make_client
from tiercel.config import LoadOptions
from tiercel.errors import EngineDeadError, NoHostError
from tiercel.ipc import nodes
from tiercel.ipc.nodes import Cluster
from tiercel.ipc.supervisor import EngineState, SupervisorSettings

pytest.importorskip("ray", reason="needs Ray: pip install 'tiercel[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.reliability]
ROOT = Path(__file__).parents[2]
SETTINGS = SupervisorSettings(first_delay_s=0.1, heartbeat_s=20.0)
SECONDS = 120  # to find a host, start Ray's process there and import PyTorch on a busy machine


class RayCluster:
    """A head without CPUs, and two hosts."""

    def __init__(self, folder):
        self.folder = folder
        self.num_started = 0
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.head = self.start("--head", f"--port={self.port}", "--num-cpus=0",
                               "--include-dashboard=false", f"--temp-dir={folder}")  # fmt: skip
        self.hosts = [self.add_host() for _ in range(2)]
        self.cluster = Cluster.parse(f"127.0.0.1:{self.port}")

    def start(self, *arguments):
        ray = Path(sys.executable).parent / "ray"
        command = [ray, "start", "--block", "--num-gpus=0", "--disable-usage-stats",
                   "--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]  # fmt: skip
        self.num_started += 1
        with open(self.folder / "ray.log", "ab") as log:
            return subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )

    def add_host(self):
        wait_for(self.is_up, SECONDS)
        host = self.start(f"--address=127.0.0.1:{self.port}", "--num-cpus=1")
        wait_for(self.is_up, SECONDS)
        return host

    def is_up(self):
        """Whether all that was started has joined: two that start together disturb each other."""
        return (self.folder / "ray.log").read_text().count(
            "Ray runtime started"
        ) == self.num_started

    def lose_host(self, process):
        """A host without power: everything on it is gone in the same moment."""
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                child.kill()
        process.wait(20)

    def close(self):
        for process in (*self.hosts, self.head):
            if process.poll() is None:
                self.lose_host(process)


@pytest.fixture(scope="module")
def ray_cluster():
    # The path of a Unix socket in it may have 107 characters.
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    made = RayCluster(folder)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose heads and widths 2 ranks can share."""
    return tiny_model(tmp_path_factory.mktemp("ray") / "tiny.gguf", head_dim=32, context=2048)


@pytest.fixture(scope="module")
def expected(model):
    with contextlib.closing(open_tiny(model)) as llm:
        return llm.generate("the thin man", greedy(20))[0].outputs[0].token_ids


@pytest.fixture(autouse=True)
def _cpu_ranks(monkeypatch):
    monkeypatch.setenv("TIERCEL_CPU_RANKS", "1")


def run(main):
    """Run a test on the event loop that the server has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), 4 * SECONDS))


@contextlib.asynccontextmanager
async def opened(ray_cluster, model, count, **options):
    merged = {"model": str(model), "device": "cpu", "dtype": "float32", "threads": 1, **options}
    client = make_client(LoadOptions(**merged), count, 512, SETTINGS, ray_cluster.cluster)
    try:
        await client.start()
        info = await client.wait_ready()
        yield client, Maker(info)
    finally:
        await client.close()
        await wait_until(lambda: not hosts(), SECONDS)


def hosts(kind="EngineHost"):
    """Ray's processes that are parents of engines, and the ranks that they have started."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if any(f"ray::{kind}" in part for part in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[process.pid] = [child.pid for child in process.children()]
    return found


async def ask(client, make, num_tokens=20):
    request = make("the thin man", greedy(num_tokens))
    await read(client.submit(request))
    return request.output_token_ids


def are_ready(client):
    return all(replica.state is EngineState.READY for replica in client.replicas)


def test_a_replica_dies_with_its_host_process_and_is_placed_again(ray_cluster, model, expected):
    async def main():
        async with opened(ray_cluster, model, 2) as (client, make):
            assert await ask(client, make) == expected
            assert len(hosts()) == 2
            whole = await ask(client, make, 1500)
            requests = [make("the thin man", greedy(1500)) for _ in range(6)]
            streams = [client.submit(request) for request in requests]
            assert [replica.num_live for replica in client.replicas] == [3, 3]
            await wait_until(lambda: all(stream.entered_s for stream in streams))
            (actor, processes), *_ = hosts().items()
            os.kill(actor, signal.SIGKILL)
            results = await asyncio.gather(*map(read, streams), return_exceptions=True)
            lost = [isinstance(result, EngineDeadError) for result in results]
            assert sum(lost) == 3
            for request, is_lost in zip(requests, lost, strict=True):
                if not is_lost:
                    assert request.output_token_ids == whole
            await wait_until(lambda: not any(map(is_alive, processes)))
            assert client.state is EngineState.READY
            assert await ask(client, make) == expected, "the other replica answers meanwhile"
            await wait_until(lambda: are_ready(client), SECONDS)
            assert sum(replica.num_restarts for replica in client.replicas) == 1
            answers = await asyncio.gather(*(ask(client, make) for _ in range(6)))
            assert answers == [expected] * 6

    run(main)


def test_ranks_of_one_engine_are_on_two_hosts(ray_cluster, model, expected):
    async def main():
        async with opened(ray_cluster, model, 1, tensor_parallel_size=2) as (client, make):
            assert client.info.tensor_parallel_size == 2
            assert await ask(client, make) == expected
            for length, part in ((1900, "run_ranks"), (1901, "run_engine")):
                ((rank,),) = hosts(f"EngineHost.{part}").values()
                stream = client.submit(make("the thin man", greedy(length)))
                await wait_until(lambda stream=stream: stream.entered_s)
                os.kill(rank, signal.SIGKILL)
                with pytest.raises(EngineDeadError):
                    await read(stream)
                await wait_until(lambda: are_ready(client), SECONDS)
                assert await ask(client, make) == expected
                assert len(hosts()) == 2

    run(main)


def test_a_host_is_lost_and_another_one_takes_its_engine(ray_cluster, model, expected):
    async def main():
        async with opened(ray_cluster, model, 2) as (client, make):
            ray_cluster.lose_host(ray_cluster.hosts.pop())
            await wait_until(lambda: not are_ready(client), SECONDS)
            for _ in range(4):
                assert await ask(client, make) == expected
            ray_cluster.hosts.append(ray_cluster.add_host())
            await wait_until(lambda: are_ready(client), 2 * SECONDS)
            answers = await asyncio.gather(*(ask(client, make) for _ in range(6)))
            assert answers == [expected] * 6

    run(main)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_takes_its_engines_on_other_hosts_with_it(ray_cluster, model, tmp_path, signum):
    address = f"127.0.0.1:{ray_cluster.port}"
    options = ("--nodes", address, "--replicas", 2, "--device", "cpu", "--threads", 1)
    with start_server(model, *options, log_path=tmp_path / "server.log") as server:
        assert server.get("/ready").json() == {"status": "ready", "engines_ready": 2}
        check_alive(server)
        body = {"model": NAME, "prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 4}
        choices = server.post("/v1/completions", body).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 4
        ranks = [rank for children in hosts().values() for rank in children]
        assert len(ranks) == 2
        assert server.stop(signum) == (0 if signum == signal.SIGTERM else -signum)
        wait_for(lambda: not any(map(is_alive, ranks)))
        wait_for(lambda: not hosts())


def test_a_cluster_that_is_too_small_is_an_error_of_its_own(ray_cluster, model, monkeypatch):
    """Not at once: hosts may come later than the server."""
    monkeypatch.setattr(nodes, "PLACE_S", 25.0)

    async def main(count, **options):
        async with opened(ray_cluster, model, count, **options):
            pass

    for count, options, words in (
        (3, {}, "--replicas 3 with --tensor-parallel-size 1 needs 3 CPUs: the Ray cluster has 2"),
        (1, {"device": "auto"}, "--replicas 1 .* needs 1 GPU: the Ray cluster has 0"),
    ):
        with pytest.raises(NoHostError, match=words):
            run(lambda count=count, options=options: main(count, **options))


def test_a_head_that_is_not_there_is_one_line(model):
    process = tiercel("serve", model, "--port", "0", "--nodes", "127.0.0.1:1")
    assert process.returncode == 1
    words = "error: --nodes 127.0.0.1:1: the head of the Ray cluster cannot be reached: Connection "
    assert process.stderr.splitlines()[-1].startswith(words), process.stderr
