"""A real `tiercel serve` on a tiny model, and what tests ask of it.

with start_server(model) as server:
    server.post("/v1/completions", {...})
    with server.connect() as sock: ...      # raw bytes, for what no client library sends
    check_alive(server)                     # promise P1
"""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.cli.harness import COMMAND, environment
from tests.patience import PATIENCE_S

START_SECONDS = 180  # importing PyTorch on a busy machine
NAME = "tiny"
PROBE = {"model": NAME, "prompt": "the thin man", "max_tokens": 8, "temperature": 0}


@dataclass
class RunningServer:
    """A server process of its own."""

    process: subprocess.Popen
    url: str
    log_path: Path
    headers: dict = field(default_factory=dict)
    expected: str | None = None  # the answer to `PROBE` when the server had just started

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    @property
    def log(self):
        return self.log_path.read_text()

    def get(self, path, **options):
        return httpx.get(self.url + path, headers=self.headers, timeout=2 * PATIENCE_S, **options)

    def post(self, path, body, **options):
        headers = {**self.headers, **options.pop("headers", {})}
        return httpx.post(
            self.url + path, json=body, headers=headers, timeout=2 * PATIENCE_S, **options
        )

    def connect(self, timeout=PATIENCE_S):
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def send_raw(self, data, timeout=PATIENCE_S):
        """Send bytes on a connection of their own; returns all that comes until it is closed."""
        with self.connect(timeout) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
            return read_all(sock)

    def wait_ready(self, seconds=START_SECONDS):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log
            with contextlib.suppress(httpx.HTTPError):
                if self.get("/ready").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready in {seconds} s: {self.log}")

    def stop(self, signum=signal.SIGTERM, seconds=PATIENCE_S):
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.process.wait(seconds)


def read_all(sock):
    """Everything up to the end of the connection, however it ends."""
    chunks = []
    with contextlib.suppress(ConnectionError, TimeoutError):
        while chunk := sock.recv(1 << 16):
            chunks.append(chunk)
    return b"".join(chunks)


def read_answer(sock):
    """One answer that says its length; the connection may be kept."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0 or len(data) < end + 4 + length_of(data):
        chunk = sock.recv(4096)
        assert chunk, f"the connection ended after {data!r}"
        data += chunk
    return data


def length_of(head):
    return int(re.search(rb"\r\ncontent-length: (\d+)\r\n", head)[1])


def status_of(data):
    """The status of a raw answer; None if there was none."""
    return int(data.split()[1]) if data.startswith(b"HTTP/1.1 ") else None


def error_of(data):
    """The error object of a raw answer."""
    return json.loads(data.partition(b"\r\n\r\n")[2])["error"]


def spawn(model, *arguments, log_path, env=None, **options):
    """Start `tiercel serve`; returns the process and its URL as soon as the port is bound."""
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [*COMMAND, "serve", *map(str, [model] if model else []), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(OMP_NUM_THREADS="1", **(env or {})),
            **options,
        )
    ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
    url = process.stdout.readline().decode().strip() if ready else ""
    return process, url


@contextlib.contextmanager
def start_server(
    model, *arguments, log_path, key=None, is_ready=True, is_probed=True, env=None, **options
):
    """Run a server for the length of the block; by default it is ready when the block begins."""
    process, url = spawn(
        model, "--port", 0, "--served-model-name", NAME, *arguments, log_path=log_path, env=env,
        **options,
    )  # fmt: skip
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    server = RunningServer(process, url, log_path, headers)
    try:
        assert url, server.log
        if is_ready:
            server.wait_ready()
            server.expected = probe(server) if is_probed else None
        yield server
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.stop(seconds=5)
        if process.poll() is None:
            process.kill()
        process.stdout.close()
        process.wait(PATIENCE_S)


def probe(server):
    """A greedy answer."""
    response = server.post("/v1/completions", PROBE)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def check_alive(server):
    """Promise P1 without its second: health, and the answer that was given at the start."""
    assert server.process.poll() is None, server.log
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
    assert probe(server) == server.expected


def children_of(pid):
    """Process ids of all descendants."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid:
                    found += [int(entry.name), *children_of(int(entry.name))]
    return found


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def num_descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def is_answering(server):
    with contextlib.suppress(httpx.HTTPError):
        return server.get("/health").status_code == 200
    return False
