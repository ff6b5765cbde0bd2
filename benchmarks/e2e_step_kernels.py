"""Time of prompts and decode steps by kernel, compared with the wall clock.

    python -m benchmarks.synthetic_model qwen3-8b qwen3-8b.gguf
    python -m benchmarks.e2e_step_kernels qwen3-8b.gguf --out step_kernels.json

Prompts are steps of the scratch row, which reads the null block; decode steps are real requests
after prompts, replayed from graphs. Kernel times come from a trace, medians of the wall clock from
runs without one. In a graph of dependent launches a kernel's time includes its wait for the
previous kernel, so kernels overlap and their sum exceeds the wall clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import e2e_host_gap
from benchmarks.common import environment
from benchmarks.figures import save
from tiercel import LLM

PROMPTS = (300, 512, 1008, 4096)
BATCHES = (  # and prompt tokens
    *((1, 128), (8, 128), (8, 512), (16, 128)),
    *((32, 512), (64, 128), (64, 512)),
)
REPEATS, TRACED, MOST_KERNELS = 8, 4, 16


def wait() -> None:
    torch.cuda.current_stream().synchronize()


def traced(shape: dict[str, Any], run: Callable[[], object], steps: int) -> list[dict[str, Any]]:
    """A row with the sums of a step of this shape, and one for each of its largest kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            run()
        wait()
    times: dict[str, list[float]] = defaultdict(list)
    for event in trace.events():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        if is_kernel and not event.name.startswith(("Memcpy", "Memset")):
            times[event.name[:80]].append(event.time_range.elapsed_us())
    largest = sorted(times.items(), key=lambda item: -sum(item[1]))[:MOST_KERNELS]
    sums = {
        "kernels": round(sum(map(len, times.values())) / steps),
        "sum_us": sum(map(sum, times.values())) / steps,
    }
    kernels = [
        {"kernel": name, "us": sum(t) / steps, "launches_per_step": len(t) / steps}
        for name, t in largest
    ]
    keys = {name: shape[name] for name in ("what", "batch", "prompt_tokens") if name in shape}
    return [shape | sums, *(keys | row for row in kernels)]


def measure_prompt(llm: LLM, tokens: int) -> list[dict[str, Any]]:
    """One prompt, launched eagerly: wall clock, and the host's part of it."""
    runner = llm._engine.runner
    runner.model.forward_sample = runner.model.forward  # scratch steps through every layer
    walls, hosts = [], []
    for _ in range(REPEATS):
        wait()
        start = time.perf_counter()
        runner.run_scratch([tokens])
        hosts.append(time.perf_counter() - start)
        wait()
        walls.append(time.perf_counter() - start)
    wall = statistics.median(walls)
    row = {
        "what": "prompt",
        "prompt_tokens": tokens,
        "wall_ms": 1e3 * wall,
        "host_ms": 1e3 * statistics.median(hosts),
        "tokens_per_second": tokens / wall,
    }
    return traced(row, lambda: runner.run_scratch([tokens]), TRACED)


def measure_decode(llm: LLM, batch: int, prompt: int) -> list[dict[str, Any]]:
    """Steady decode steps of a batch."""
    e2e_host_gap.PROMPT_TOKENS = prompt
    steps = e2e_host_gap.stream_steps(llm, batch, 128)
    for _ in range(8):
        next(steps)
    wait()
    start = time.perf_counter()
    for _ in range(64):
        next(steps)
    wait()
    step = (time.perf_counter() - start) / 64
    row = {
        "what": "decode",
        "batch": batch,
        "prompt_tokens": prompt,
        "step_ms": 1e3 * step,
        "tokens_per_second": batch / step,
    }
    rows = traced(row, lambda: next(steps), TRACED)
    steps.close()
    while llm._engine.has_work:
        llm._engine.step()
    return rows


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    llm = LLM(options.model, max_model_len=options.max_model_len)
    rows = [row for tokens in PROMPTS for row in measure_prompt(llm, tokens)]
    rows += [row for shape in BATCHES for row in measure_decode(llm, *shape)]
    rows = [{"model": options.model.name, **row} for row in rows]
    print(*(row for row in rows if "kernel" not in row), sep="\n", flush=True)
    save(options.out, environment(llm.config.device), rows)


if __name__ == "__main__":
    main()
