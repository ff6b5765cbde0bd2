"""Effect of a long prompt on a running stream.

    python -m benchmarks.e2e_two_streams --out benchmarks/results/e2e_two_streams_cpu.json

For each bound of a step's tokens a server is started. One stream runs; after a while a prompt of
6,000 tokens is sent. The figures are the times between the stream's events before the prompt was
sent and until its first token arrived, the prompt's time to its first token, and the number of
engine restarts. Required: the largest gap during the prompt is at most 4 times the median
gap, and no restart. To compare with steps that time does not bound, check out a revision without
`scheduler/step_budget.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.common import environment
from benchmarks.e2e_first_request import model_id, wait_ready
from benchmarks.figures import flat, save

PROMPT_TOKENS = 6000
STREAM_TOKENS = 2000  # the stream must outlast the prompt
ALONE_S = 4.0  # of the stream before the prompt is sent
BOUNDS = (2048, 256)  # --max-num-batched-tokens
TEXT = "Once upon a time there was a lighthouse keeper who"


@contextmanager
def run_server(model: str | None, bound: int, threads: int) -> Iterator[str]:
    """The address of a ready server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from tiercel.cli.main import main; main()", "serve"]
    command += ["--port", str(port), "--device", "cpu", "--max-num-batched-tokens", str(bound)]
    command += ["--no-ui", *(["--model", model] if model else [])]
    variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=variables)
        try:
            wait_ready(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


class Stream(threading.Thread):
    """One streamed completion.

    Attributes:
        sent_s: time when it was sent.
        events_s: times when its events arrived.
        is_complete: whether it came to its end.
    """

    def __init__(self, address: str, prompt: str | list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        body = {"model": model_id(address), "prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, "stream": True, "ignore_eos": True}
        self._request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        self.sent_s = 0.0
        self.events_s: list[float] = []
        self.is_complete = False

    def run(self) -> None:
        self.sent_s = time.perf_counter()
        with urllib.request.urlopen(self._request, timeout=3600) as answer:
            for line in answer:
                if line.startswith(b"data: {") and b'"error"' not in line:
                    self.events_s.append(time.perf_counter())
                self.is_complete |= line.startswith(b"data: [DONE]")

    def gaps_s(self, start_s: float, stop_s: float) -> list[float]:
        """Times between the events of a period."""
        inside = [at for at in self.events_s if start_s <= at <= stop_s]
        return [b - a for a, b in itertools.pairwise(inside)]


def num_restarts(address: str) -> int:
    """The number of engine restarts."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        found = re.search(rb"engine_restarts_total\{[^}]*\} ([\d.]+)", answer.read())
    return int(float(found[1])) if found else 0


def measure(address: str, prompt_tokens: int) -> dict[str, object]:
    """Figures of one server."""
    stream = Stream(address, TEXT, STREAM_TOKENS)
    stream.start()
    while len(stream.events_s) < 2:
        time.sleep(0.01)
    time.sleep(ALONE_S)
    prompt = Stream(address, [100 + 31 * i % 9000 for i in range(prompt_tokens)], 8)
    prompt.start()
    prompt.join()
    first_s = prompt.events_s[0]
    alone = stream.gaps_s(0.0, prompt.sent_s)
    beside = stream.gaps_s(prompt.sent_s, first_s)
    stream.join()
    return {
        "prompt_tokens": prompt_tokens,
        "first_token_s": first_s - prompt.sent_s,
        "alone_median_gap_ms": 1e3 * statistics.median(alone),
        "beside_median_gap_ms": 1e3 * statistics.median(beside),
        "beside_largest_gap_ms": 1e3 * max(beside),
        "largest_over_median": max(beside) / statistics.median(beside),
        "num_events_beside": len(beside) + 1,
        "num_restarts": num_restarts(address),
        "both_complete": stream.is_complete and prompt.is_complete,
    }


def run() -> None:
    """Measure each bound and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    head = environment(torch.device("cpu"))
    rows = []
    for bound in arguments.bounds:
        with run_server(arguments.model, bound, arguments.threads) as address:
            figures = measure(address, arguments.prompt_tokens)
        row = {"name": f"max_num_batched_tokens={bound}", "threads": arguments.threads} | figures
        rows.append(flat(row))
        print(json.dumps(rows[-1]))
    save(arguments.out, head, rows)


if __name__ == "__main__":
    run()
