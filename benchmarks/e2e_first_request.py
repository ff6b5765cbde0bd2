"""Whether a server's first answers wait for anything that later ones do not.

    python -m benchmarks.synthetic_model qwen3-0.6b qwen3-0.6b.gguf
    python -m benchmarks.e2e_first_request qwen3-0.6b.gguf --out first_request.json

A server is started for each prompt length and asked from the moment it is ready: ten requests one
after another, each with a prompt of its own. Nothing may compile or load then, so the first one's
time to its first token should be that of the tenth (needed: at most 1.2 times). All come after the
same pause, since processors that rest run slower for a while.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.common import environment, save

LENGTHS = (300, 1000, 77)  # of prompts, tokens
REQUESTS = 10
PAUSE_S = 0.3  # before each request: a server that has just become ready has rested too
START_S = 300.0


@contextmanager
def run_server(model: Path, device: str) -> Iterator[str]:
    """The address of a server that is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from tiercel.cli.main import main; main()", "serve"]
    command += [str(model), "--port", str(port)]
    command += ["--device", device, "--max-model-len", "4096", "--gpu-memory-utilization", "0.4"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    try:
        while not is_ready(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not become ready")
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait()


def is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


def model_id(address: str) -> str:
    """What the server calls its model."""
    with urllib.request.urlopen(f"{address}/v1/models", timeout=5) as answer:
        return str(json.load(answer)["data"][0]["id"])


def first_token_ms(address: str, prompt: list[int]) -> float:
    """From sending a request to the first event of its stream."""
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


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    rows = []
    for length in arguments.lengths:
        with run_server(arguments.model, arguments.device) as address:
            times = []
            for i in range(REQUESTS):
                time.sleep(PAUSE_S)
                prompt = [(31 * i + 7 * j) % 250 for j in range(length)]
                times.append(first_token_ms(address, prompt))
        row = {"prompt_tokens": length, "first_token_ms": times, "ratio": times[0] / times[-1]}
        rows.append(row)
        print(f"{length} tokens: first {times[0]:.2f} ms, tenth {times[-1]:.2f} ms", flush=True)
    device = torch.device(arguments.device)
    save(arguments.out, {"environment": environment(device), "results": rows})


if __name__ == "__main__":
    run()
