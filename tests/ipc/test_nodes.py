"""Engines on hosts of a cluster, as far as no cluster is needed: layout, knocks, meetings, ends."""

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
import threading

import pytest

from tests.cli.harness import error_line, tiercel
from tests.engine_process import QUICK, wait_until
from tests.patience import PATIENCE_S
from tiercel import env
from tiercel.cli import serve
from tiercel.cli.serve_options import ServerOptions
from tiercel.cli.terminal import UsageError
from tiercel.config import LoadOptions
from tiercel.errors import ArgumentError, EngineDeadError, ModelFormatError, NoHostError
from tiercel.ipc import knock as knock_module
from tiercel.ipc import meeting, nodes
from tiercel.ipc.client import EngineClient
from tiercel.ipc.deaths import Deaths
from tiercel.ipc.knock import TOKEN_BYTES, Listener, knock, listen, make_token, own_address
from tiercel.ipc.layout import Layout, spread
from tiercel.ipc.meeting import Meeting
from tiercel.ipc.messages import ErrorInfo, Outputs, encode
from tiercel.ipc.nodes import Cluster
from tiercel.ipc.siblings import OpenedFiles
from tiercel.ipc.spawn import Connection
from tiercel.loader.stamps import FileStamp

pytestmark = pytest.mark.reliability
HOST = "127.0.0.1"


@pytest.mark.parametrize("seed", range(20))
def test_ranks_are_spread_over_the_fewest_hosts_that_hold_all(seed):
    draw = random.Random(seed)
    for _ in range(50):
        hosts = [draw.randint(0, 8) for _ in range(draw.randint(1, 5))]
        num_ranks, num_engines = 2 ** draw.randint(0, 3), draw.randint(1, 6)
        fitting = [
            size
            for size in (8, 4, 2, 1)
            if size <= num_ranks and sum(n // size * size for n in hosts) >= num_engines * num_ranks
        ]
        if not fitting:
            with pytest.raises(NoHostError) as caught:
                spread(num_ranks, num_engines, "GPU", hosts)
            needed = num_ranks * num_engines
            assert f"needs {needed} GPU" in str(caught.value)
            assert str(caught.value).endswith(f"the Ray cluster has {sum(hosts)}.")
            continue
        layout = spread(num_ranks, num_engines, "GPU", hosts)
        assert layout == Layout(num_ranks // fitting[0], fitting[0])
        ranks = [rank for host in range(layout.num_hosts) for rank in layout.ranks(host)]
        assert ranks == list(range(num_ranks))


@pytest.fixture
def listener():
    made = Listener(listen(HOST), make_token())
    yield made
    made.close()


def test_who_knows_the_token_comes_in(listener):
    with knock(HOST, listener.port, listener._token, 7, PATIENCE_S) as ours:
        theirs, number = listener.accept(PATIENCE_S)
        with theirs:
            assert number == 7
            ours.sendall(b"x" * 100_000)
            received = b""
            while len(received) < 100_000:
                received += theirs.recv(1 << 16)
            theirs.sendall(b"back")
            assert ours.recv(10) == b"back"
            assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert ours.gettimeout() is theirs.gettimeout() is None


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n" + b" " * 100, bytes(TOKEN_BYTES + 4), b"short", None],
    ids=["nothing", "http", "zeros", "short", "one-bit"],
)
def test_others_stay_outside_and_cost_no_more_than_time(listener, said, monkeypatch):
    monkeypatch.setattr(knock_module, "_KNOCK_S", 0.2)
    if said is None:
        said = bytes([listener._token[0] ^ 1]) + listener._token[1:] + bytes(4)
    with socket.create_connection((HOST, listener.port)) as stranger:
        stranger.sendall(said)
        with knock(HOST, listener.port, listener._token, 3, PATIENCE_S):
            accepted, number = listener.accept(PATIENCE_S)
            accepted.close()
            assert number == 3
        stranger.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b"", "it gets no byte"


def test_a_knock_may_come_in_pieces(listener):
    data = listener._token + (9).to_bytes(4, "little")
    with socket.create_connection((HOST, listener.port)) as slow:

        def say():
            for byte in data:
                slow.sendall(bytes([byte]))

        threading.Thread(target=say).start()
        accepted, number = listener.accept(PATIENCE_S)
        accepted.close()
        assert number == 9


def test_waiting_ends_by_time_and_by_close(listener):
    assert listener.accept(0.3) is None
    assert not listener.is_closed
    port = listener.port
    threading.Timer(0.1, listener.close).start()
    assert listener.accept(PATIENCE_S) is None
    assert listener.is_closed
    with pytest.raises(ConnectionRefusedError):
        knock(HOST, port, bytes(32), 0, 1)


def test_an_empty_token_lets_nobody_in():
    with listen(HOST) as listening, pytest.raises(AssertionError):
        Listener(listening, b"")


def test_own_address_is_the_one_that_leads_there():
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(socket.gaierror):
        own_address("no.such.host.invalid", 1)


def test_ranks_of_other_hosts_come_in_any_order():
    token = make_token()
    meeting = Meeting(4, Listener(listen(HOST), token), ranks_per_host=1)
    try:
        assert meeting.address.startswith(f"tcp://{HOST}:")
        port = meeting._listener.port
        knocking = {rank: knock(HOST, port, token, rank, PATIENCE_S) for rank in (3, 1, 2)}
        for rank in (1, 2, 3):
            process, ours = meeting.start(rank)
            ours.sendall(bytes([rank]))
            assert knocking[rank].recv(1) == bytes([rank])
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
            process.send_signal(10)
            process.kill()
            assert knocking[rank].recv(1) == b"", "closing ends a rank of another host"
            assert process.wait() == 0
            ours.close()
            knocking[rank].close()
    finally:
        meeting.close()
        meeting.close()


@pytest.mark.parametrize("ranks", [(1, 1), (0,), (4,), (2**32 - 1,)])
def test_a_rank_that_cannot_be_is_the_end(ranks):
    token = make_token()
    meeting = Meeting(4, Listener(listen(HOST), token), ranks_per_host=1)
    try:
        port = meeting._listener.port
        knocking = [knock(HOST, port, token, rank, PATIENCE_S) for rank in ranks]
        with pytest.raises(EngineDeadError, match="came twice, or is not expected"):
            meeting.start(2)
        for connection in knocking:
            connection.close()
    finally:
        meeting.close()


def test_a_rank_that_does_not_come_is_the_end(monkeypatch):
    monkeypatch.setattr(meeting, "_KNOCK_S", 0.3)
    waiting = Meeting(2, Listener(listen(HOST), make_token()), ranks_per_host=1)
    with pytest.raises(EngineDeadError, match=r"did not come within 0\.3 s"):
        waiting.start(1)
    waiting.close()


def test_ranks_of_this_host_need_no_port():
    meeting = Meeting(2)
    assert meeting.address.startswith("file:")
    process, ours = meeting.start(1)
    assert ours.family is socket.AF_UNIX
    ours.close()
    process.wait(PATIENCE_S)
    meeting.close()


@pytest.mark.parametrize("text", ["", "head", "head:", "head:0", "head:70000", ":6379",
                                  "ray://head:10001", "head:6379/x", "head:-1"])  # fmt: skip
def test_an_address_that_is_none_is_one_line(text):
    with pytest.raises(ArgumentError, match="not the address of a Ray cluster"):
        Cluster.parse(text)


def test_addresses():
    assert Cluster.parse("127.0.0.1:6379") == Cluster("127.0.0.1", 6379, "127.0.0.1")
    assert Cluster("::1", 6379, "::1").address == "[::1]:6379"
    with pytest.raises(ArgumentError, match=r"--nodes no\.such\.host\.invalid:6379: "):
        Cluster.parse("no.such.host.invalid:6379")


def test_without_ray_it_is_one_line(monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--nodes needs a package that is missing: ray") as caught:
        serve.make_cluster(ServerOptions(nodes="127.0.0.1:6379"))
    assert caught.value.hint == "Install it on all hosts: pip install 'tiercel[ray]'."
    assert serve.make_cluster(ServerOptions()) is None


def test_without_ray_the_command_is_one_line():
    if serve.find_spec("ray"):
        pytest.skip("Ray is installed")
    line = error_line(tiercel("serve", "missing.gguf", "--nodes", "127.0.0.1:1"), status=2)
    assert "--nodes needs a package that is missing: ray. Install it on all hosts" in line


def test_copies_of_files_on_other_hosts_have_other_stamps():
    one = FileStamp(b"/here/m.gguf", 10, 1, 2)
    for files, same, copy, other in (
        (OpenedFiles(), True, False, False),
        (OpenedFiles(are_here=False), True, True, False),
    ):
        assert files.note((one,))
        assert files.note((one,)) is same
        assert files.note((FileStamp(b"/there/m.gguf", 10, 3, 4),)) is copy
        assert files.note((FileStamp(b"/there/m.gguf", 11, 1, 2),)) is other
        assert files.note((FileStamp(b"/there/n.gguf", 10, 1, 2),)) is other
        assert files.stamps == ((one,) if not copy else ())


def test_hosts_that_are_not_there_are_waited_for_again():
    """Else two deaths alike end the attempts. At the first start one is enough: it is an error."""
    deaths, cause = Deaths(OpenedFiles()), ErrorInfo(NoHostError.__name__, "no host")
    for _ in range(4):
        deaths.note_start()
        deaths.note_loss()
        deaths.note_cause(cause)
    assert isinstance(deaths.load_error(), NoHostError)
    assert deaths.is_hopeless
    deaths.note_start()
    deaths.note_ready()
    for _ in range(4):
        deaths.note_loss()
        deaths.note_cause(cause)
        assert not deaths.is_hopeless
        deaths.note_start()


def test_switches_of_the_server_hold_on_other_hosts(monkeypatch):
    monkeypatch.setenv("TIERCEL_EXACT", "1")
    monkeypatch.setenv("TIERCEL_CACHE", "/here")
    monkeypatch.setenv("TIERCEL_API_KEY", "secret")
    shared = env.shared_variables()
    assert shared["TIERCEL_EXACT"] == "1"
    assert not {"TIERCEL_CACHE", "TIERCEL_API_KEY"} & shared.keys()
    monkeypatch.setenv("TIERCEL_EXACT", "0")  # now of another host
    monkeypatch.setenv("TIERCEL_CACHE", "/there")
    monkeypatch.setenv("TIERCEL_PDL", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # by Ray
    child = env.child_environment(shared=shared)
    assert (child["TIERCEL_EXACT"], child["TIERCEL_CACHE"]) == ("1", "/there")
    assert not {"TIERCEL_PDL", "TIERCEL_API_KEY", "OMP_NUM_THREADS"} & child.keys()
    assert env.child_environment()["TIERCEL_PDL"] == "0"


class FakePlacer:
    """Stands for the process that asks Ray; `said` is what it ends with."""

    pid = 1

    def __init__(self):
        self.failed = None
        self.lost = asyncio.get_running_loop().create_future()
        self.calls = []

    def give_up(self, why):
        self.failed = why
        self.kill()

    def kill(self):
        self.close()

    def close(self):
        if not self.lost.done():
            self.lost.set_result(None)

    async def wait_lost(self):
        await asyncio.shield(self.lost)

    async def reap(self, _grace_s):
        await self.wait_lost()
        return 0


def run_engine(monkeypatch, main):
    """Run a test with an engine that waits for its process, and what was heard of it."""

    async def whole():
        async def start_with(order, _on_message, *, has_hub_token):
            assert not has_hub_token
            placers.append((FakePlacer(), order))
            return placers[0][0]

        placers, heard = [], []
        monkeypatch.setattr(nodes, "start_with", start_with)
        cluster = Cluster(HOST, 6379, HOST)
        engine = await cluster.start(3, LoadOptions(tensor_parallel_size=2), heard.append)
        placer, order = placers[0]
        assert (order.num_ranks, order.num_engines, order.resource) == (2, 3, "GPU")
        try:
            await asyncio.wait_for(main(engine, placer, order, heard), 2 * PATIENCE_S)
        finally:
            engine.close()
            assert await engine.reap(1.0) == 0
            await asyncio.wait_for(engine.wait_lost(), PATIENCE_S)

    asyncio.run(whole())


def test_an_engine_that_knocks_is_spoken_with(monkeypatch):
    async def main(engine, _placer, order, heard):
        engine.send(b"nobody is there yet")
        with knock(order.host, order.port, order.token, 0, PATIENCE_S) as theirs:
            await wait_until(lambda: engine._link is not None)
            theirs.setblocking(False)
            start = await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
            assert order.token in start
            theirs.sendall(encode(Outputs(1e12, 1, (), ())))
            await wait_until(lambda: heard)
            assert heard[0].started_s < 1e9, "the clock of another host says nothing here"
            waiting = asyncio.create_task(engine.wait_lost())
            await asyncio.sleep(0.1)
            assert not waiting.done()
        await waiting

    run_engine(monkeypatch, main)


@pytest.mark.parametrize("is_met", [False, True])
def test_it_is_lost_with_the_placer(monkeypatch, is_met):
    async def main(engine, placer, order, _heard):
        theirs = knock(order.host, order.port, order.token, 0, PATIENCE_S) if is_met else None
        if theirs is not None:
            await wait_until(lambda: engine._link is not None)
        waiting = asyncio.create_task(engine.wait_lost())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        placer.close()
        await waiting
        assert await engine.reap(1.0) == 0
        if theirs is not None:
            theirs.settimeout(PATIENCE_S)
            with contextlib.suppress(ConnectionError):
                while await asyncio.to_thread(theirs.recv, 1 << 16):
                    pass  # its first message, then the end
            theirs.close()

    run_engine(monkeypatch, main)


def test_one_that_does_not_come_in_time_is_given_up(monkeypatch):
    monkeypatch.setattr(nodes, "PLACE_S", 0.3)

    async def main(engine, _placer, _order, _heard):
        await engine.wait_lost()
        assert isinstance(engine.failed, NoHostError)
        assert "no host of the Ray cluster was reached within 0.3 s" in str(engine.failed)

    run_engine(monkeypatch, main)


def test_one_that_was_closed_is_not_late(monkeypatch):
    async def main(engine, placer, _order, _heard):
        engine.close()
        await engine.wait_lost()
        await engine._meeting
        assert placer.failed is None

    run_engine(monkeypatch, main)


def test_an_engine_of_another_host_is_a_process_to_its_supervisor(tmp_path):
    """The whole way but Ray: a process of this machine that knocks, as `EngineHost` starts it."""
    code = (
        "import sys\n"
        "from tiercel.ipc.engine_host import EngineHost\n"
        "host, port, token = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])\n"
        "made = EngineHost(lambda: host, {})\n"
        "assert made.address().host == host\n"
        "print(made.run_engine(host, port, token, 0))\n"
    )

    class HostPlacer(FakePlacer):
        def __init__(self, order):
            super().__init__()
            arguments = [order.host, str(order.port), order.token.hex()]
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
            )

        def close(self):
            self.process.kill()
            self.process.wait()
            super().close()

        async def reap(self, grace_s):
            self.said = self.process.stdout.read()
            self.process.stdout.close()
            self.close()
            return await super().reap(grace_s)

    async def main():
        placers = []

        async def start_with(order, _on_message, *, has_hub_token):
            placers.append(HostPlacer(order))
            return placers[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nodes, "start_with", start_with)
            path = tmp_path / "broken.gguf"
            path.write_bytes(b"GGUF")
            options = LoadOptions(model=str(path), device="cpu")
            cluster = Cluster(HOST, 6379, HOST)
            client = EngineClient(
                options, settings=QUICK, start=lambda *arguments: cluster.start(1, *arguments)
            )
            await client.start()
            with pytest.raises(ModelFormatError, match="the file has 4 bytes"):
                await client.wait_ready()
            await client.close()
        assert placers[0].said == "ended with status 1\n"

    asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))


def test_a_connection_is_one_of_messages(listener):
    """What an engine of another host sends is read as what one of this machine sends."""

    async def main():
        heard = []
        with knock(HOST, listener.port, listener._token, 0, PATIENCE_S) as theirs:
            sock, _ = listener.accept(PATIENCE_S)
            loop = asyncio.get_running_loop()
            _, link = await loop.create_connection(lambda: Connection(heard.append), sock=sock)
            theirs.sendall(encode(Outputs(1.0, 5, (), ())))
            await wait_until(lambda: heard == [Outputs(1.0, 5, (), ())])
        await asyncio.wait_for(link.lost, PATIENCE_S)

    asyncio.run(main())
