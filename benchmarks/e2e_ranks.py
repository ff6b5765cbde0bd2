"""Loading and decode steps of a model on one GPU and on several, by an engine.

    python -m benchmarks.synthetic_model qwen3-8b qwen3-8b.gguf
    python -m benchmarks.e2e_ranks qwen3-8b.gguf --gpus 1 2 --out FILE.json
    python -m benchmarks.synthetic_model qwen3-0.6b two_layers.gguf --layers 2
    python -m benchmarks.e2e_ranks two_layers.gguf --gpus 1 2 --batches 1 --out FILE.json

Each number of GPUs runs in a process of its own; the file is read once before, so that it is in the
page cache. A step is the median of the times from step to step of a batch in steady state, by the
wall clock. Of a model so small that the GPU waits for the host, as in the last two lines, it is the
host's time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment
from benchmarks.e2e_host_gap import WARM_STEPS, stream_steps
from benchmarks.figures import save
from tiercel import LLM

BATCHES = (1, 8, 64)
STEPS = 200


def step_us(llm: LLM, batch: int) -> dict[str, float]:
    """Microseconds of a step: median, and those of the slowest tenth."""
    steps = stream_steps(llm, batch, STEPS + WARM_STEPS + 4)
    for _ in range(WARM_STEPS):
        next(steps)
    times, last = [], time.perf_counter()
    for _ in range(STEPS):
        next(steps)
        now = time.perf_counter()
        times.append(1e6 * (now - last))
        last = now
    steps.close()
    slow = statistics.quantiles(times, n=10)[-1]
    return {"step_us": round(statistics.median(times), 1), "p90_us": round(slow, 1)}


def measure(model: Path, gpus: int, batches: list[int]) -> list[dict[str, Any]]:
    """Rows of one number of GPUs; the model is loaded twice, compiled by the first time."""
    load_s = []
    for _ in range(2):
        began = time.perf_counter()
        llm = LLM(model, max_model_len=4096, tensor_parallel_size=gpus)
        load_s.append(round(time.perf_counter() - began, 2))
        if len(load_s) < 2:
            llm.close()
    name = f"{model.stem}, {gpus} GPUs"
    rows: list[dict[str, Any]] = [
        {"name": name, "gpus": gpus, "first_load_s": load_s[0], "load_s": load_s[1]}
    ]
    for batch in batches:
        found = step_us(llm, batch)
        rows.append({"name": f"{name}, {batch} requests", "gpus": gpus, "batch": batch, **found})
    llm.close()
    return rows


def main() -> None:
    """Measure each number of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help="in this process, as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.model, options.gpus[0], options.batches)))
        return
    options.model.read_bytes()
    rows: list[dict[str, Any]] = []
    for gpus in options.gpus:
        command = [sys.executable, "-m", "benchmarks.e2e_ranks", str(options.model), "--one"]
        command += ["--gpus", str(gpus), "--batches", *map(str, options.batches)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(*found, sep="\n", flush=True)
        rows += found
        save(options.out, environment(torch.device("cuda")), rows)


if __name__ == "__main__":
    main()
