"""The server in poor surroundings: few descriptors, many connections, closed pipes, no home."""

import contextlib
import os
import resource
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.cli.harness import COMMAND, environment, error_line, tiercel
from tests.patience import PATIENCE_S, wait_for
from tests.serve.harness import (
    NAME,
    check_alive,
    is_answering,
    num_descriptors,
    read_all,
    start_server,
    status_of,
)


def limit_files(count):
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def test_too_few_descriptors_for_any_connection(tiny):
    result = tiercel("serve", tiny, preexec_fn=lambda: limit_files(40))
    assert error_line(result) == (
        "error: This process may open 40 files; the server needs 49 at least. "
        "Raise the limit: ulimit -n 1024."
    )


def test_few_descriptors(tiny, log_path):
    """F12: with `ulimit -n 64` connections too many are refused, and nothing spins."""
    with start_server(tiny, log_path=log_path, preexec_fn=lambda: limit_files(64)) as server:
        crowd = [server.connect() for _ in range(150)]
        wait_for(lambda: is_at_rest(server.process.pid))
        assert num_descriptors(server.process.pid) <= 64
        answers = [status_of(read_now(sock)) for sock in crowd]
        assert 503 in answers
        for sock in crowd:
            sock.close()
        wait_for(lambda: is_answering(server))
        check_alive(server)


def read_now(sock):
    sock.settimeout(0.01)
    return read_all(sock)


def is_at_rest(pid):
    """Whether a process uses less than half a core for half a second."""
    spent = cpu_seconds(pid)
    time.sleep(0.5)
    return cpu_seconds(pid) - spent < 0.25


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def descriptors(count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"this machine allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_thousand_connections(server):
    """E2: 1000 idle ones leave the service unhurt; over the bound of 2048 the answer is 503."""
    with descriptors(2500):
        idle = [server.connect() for _ in range(1000)]
        check_alive(server)
        idle += [server.connect() for _ in range(1048)]
        with server.connect() as sock:
            assert status_of(read_all(sock)) == 503
        for sock in idle:
            sock.close()
    wait_for(lambda: is_answering(server))
    check_alive(server)


SURROUNDINGS = {
    "no standard streams, no HOME": {
        "closed": [0, 1, 2], "without": ["HOME", "TMPDIR", "XDG_CACHE_HOME"],
    },
    "no standard output": {"closed": [1]},
    "no standard error": {"closed": [2]},
    "a cache folder that cannot be": {"env": {"TIERCEL_CACHE": "/proc/nowhere"}},
}  # fmt: skip
FIRST, *OTHERS = SURROUNDINGS


@pytest.mark.parametrize(
    "name", [FIRST, *[pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]]
)
def test_surroundings_that_lack_things(name, tiny, log_path, tmp_path):
    case = SURROUNDINGS[name]
    env = environment(OMP_NUM_THREADS="1", **case.get("env", {}))
    env = {key: value for key, value in env.items() if key not in case.get("without", ())}
    path = tmp_path / "t.sock"  # a port would have to be read from the standard output

    def close():
        for number in case.get("closed", ()):
            os.close(number)

    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [*COMMAND, "serve", str(tiny), "--uds", str(path), "--served-model-name", NAME],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, preexec_fn=close,
        )  # fmt: skip
    try:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(
            transport=transport, base_url="http://localhost", timeout=PATIENCE_S
        ) as http:
            wait_for(lambda: is_ready(http), 3 * PATIENCE_S)
            body = {"model": NAME, "prompt": "a", "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def is_ready(http):
    with contextlib.suppress(httpx.HTTPError):
        return http.get("/ready").status_code == 200
    return False


@pytest.mark.slow
def test_a_closed_pipe_behind_the_log_does_not_stop_the_server(tiny):
    process = subprocess.Popen(
        [*COMMAND, "serve", str(tiny), "--port", "0", "--served-model-name", NAME],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    try:
        url = process.stdout.readline().decode().strip()
        process.stdout.close()
        process.stderr.close()
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            wait_for(lambda: is_ready(http), 3 * PATIENCE_S)
            for _ in range(3):
                assert http.get("/nowhere").status_code == 404
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait(PATIENCE_S)
