"""Time of a server's first requests compared with later ones: nothing may load or compile late.

    python -m benchmarks.synthetic_model qwen3-0.6b qwen3-0.6b.gguf
    python -m benchmarks.e2e_first_request qwen3-0.6b.gguf --out first_request.json

Servers are started for each prompt length and get requests from the moment they are ready: ten
requests one after another, each with its own prompt. Nothing may compile or load then, so the first
request's time to its first token should be that of the tenth (required: at most 1.2 times). Then
the engine process is killed, and the new engine is measured in the same way. All requests come
after the same pause, since idle processors run slower for a while.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.common import environment
from benchmarks.figures import save

LENGTHS = (77, 300, 1000)  # of prompts, tokens
STARTS = 2  # of a server, for each length
REQUESTS = 10
PAUSE_S = 0.3  # before each request: a server that has just become ready has been idle too
START_S = 300.0


@contextmanager
def run_server(model: Path, device: str) -> Iterator[tuple[str, int]]:
    """The address and the process of a ready server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from tiercel.cli.main import main; main()", "serve"]
    command += [str(model), "--port", str(port)]
    command += ["--device", device, "--max-model-len", "4096", "--gpu-memory-utilization", "0.4"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_ready(address, process)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait()


def wait_ready(address: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until a server accepts requests.

    Raises:
        SystemExit: its process has ended, or it takes too long.
    """
    deadline = time.monotonic() + START_S
    while not is_ready(address):
        has_ended = process is not None and process.poll() is not None
        if has_ended or time.monotonic() > deadline:
            raise SystemExit("the server did not become ready")
        time.sleep(0.05)


def kill_engine(server: int) -> None:
    """End the engine process of a server."""
    for children in Path(f"/proc/{server}/task").glob("*/children"):
        for child in children.read_text().split():
            if b"tiercel.ipc.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
                return
    raise SystemExit("the server has no engine process")


def is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


def model_id(address: str) -> str:
    """The server's name of its model."""
    with urllib.request.urlopen(f"{address}/v1/models", timeout=5) as answer:
        return str(json.load(answer)["data"][0]["id"])


def first_token_ms(address: str, prompt: list[int]) -> float:
    """Milliseconds from sending a request to the first event of its stream."""
    body = {
        "model": model_id(address),
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        taken = 1e3 * (time.perf_counter() - began)
        answer.read()
    return taken


def ask(address: str, num_tokens: int, seed: int) -> list[float]:
    """Milliseconds to the first token of one request after another."""
    times = []
    for i in range(REQUESTS):
        time.sleep(PAUSE_S)
        prompt = [(31 * i + 7 * j + seed) % 250 for j in range(num_tokens)]
        times.append(first_token_ms(address, prompt))
    return times


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--starts", type=int, default=STARTS)
    parser.add_argument("--no-restart", action="store_true", help="let the engine live")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    head = environment(torch.device(arguments.device))
    for length in arguments.lengths:
        for start in range(arguments.starts):
            with run_server(arguments.model, arguments.device) as (address, pid):
                samples = {"a start": ask(address, length, 0)}
                if start == 0 and not arguments.no_restart:
                    kill_engine(pid)
                    while is_ready(address):
                        time.sleep(0.01)
                    wait_ready(address)
                    samples["a restart of the engine"] = ask(address, length, 1)
            for behind, times in samples.items():
                row = {
                    "prompt_tokens": length,
                    "behind": behind,
                    "first_ms": times[0],
                    "later_ms": times[1:],
                    "last_ms": times[-1],
                    "first_over_last": times[0] / times[-1],
                    "first_over_median": times[0] / statistics.median(times[1:]),
                }
                rows.append(row)
                text = " ".join(f"{x:.2f}" for x in times)
                ratio = times[0] / times[-1]
                print(f"{length} tokens after {behind}: {text} ms, {ratio:.2f} times")
                sys.stdout.flush()
                save(arguments.out, head, rows)


if __name__ == "__main__":
    run()
