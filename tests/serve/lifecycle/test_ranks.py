"""A server whose engine is several processes: it answers, loses one of them, and ends with all."""

import os
import signal

import pytest

from tests.cli.harness import error_line, tiercel
from tests.patience import PATIENCE_S, wait_for
from tests.serve.harness import NAME, check_alive, children_of, is_running, start_server

pytestmark = pytest.mark.reliability
CPU_RANKS = {"TIERCEL_CPU_RANKS": "1"}
LONG = {"model": NAME, "prompt": "a", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


def processes_of(server):
    """The engine's processes, rank 0 first."""
    listed = {pid: command_of(pid) for pid in children_of(server.process.pid)}
    return [pid for pid, command in listed.items() if "tiercel.ipc.process" in command]


def command_of(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().decode()


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 9))]
)
def test_a_signal_ends_every_process(tiny, log_path, signum):
    quick = ("-tp", 2, "--enable-fault-injection")  # which leaves out rehearsals
    with start_server(tiny, *quick, log_path=log_path, env=CPU_RANKS) as server:
        assert len(processes_of(server)) == 2
        assert " ranks=2" in server.log
        children = children_of(server.process.pid)
        check_alive(server)
        status = server.stop(signum)
        assert status == (-signum if signum == signal.SIGKILL else 0)
        wait_for(lambda: not any(map(is_running, children)))


@pytest.mark.slow
def test_two_servers_live_side_by_side_and_one_loses_a_rank(tiny, log_path, tmp_path):
    other_log = tmp_path / "other.log"
    options = {"env": CPU_RANKS}
    with (
        start_server(tiny, "-tp", 2, log_path=log_path, **options) as server,
        start_server(tiny, "-tp", 2, log_path=other_log, **options) as other,
    ):
        assert server.expected == other.expected
        zero, one = processes_of(server)
        os.kill(one, signal.SIGKILL)
        response = server.post("/v1/completions", LONG)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_restarting"
        check_alive(other)
        wait_for(lambda: not is_running(zero))
        wait_for(lambda: server.get("/ready").status_code == 200, 2 * PATIENCE_S)
        check_alive(server)
        assert "rank 1 was ended by signal SIGKILL" in server.log


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-tp", "3"], "3 is not a power of two up to 64; use 1, 2, 4 or 8"),
        (["--tensor-parallel-size", "0"], "0 is not a power of two"),
        (["-tp", "two"], 'unable to convert "two" into int'),
    ],
)
def test_a_wrong_number_is_one_line(arguments, words, here):
    assert words in error_line(here("serve", "missing.gguf", *arguments), status=2)


def test_gpus_that_are_not_there_are_one_line(tiny):
    line = error_line(tiercel("generate", "a", "-m", tiny, "--device", "cpu", "-tp", "2"))
    assert "tensor_parallel_size=2 needs 2 GPUs, but the device is the CPU" in line
    line = error_line(tiercel("bench", "kernels", "-m", tiny, "-tp", "2"), status=2)
    assert "--tensor-parallel-size 2: this measures one GPU" in line
