"""Idle time of the GPU between decode steps, from a profiler's trace.

    python -m benchmarks.synthetic_model qwen3-8b qwen3-8b.gguf
    python -m benchmarks.e2e_host_gap qwen3-8b.gguf --out host_gap.json

For each batch size: decode steps in steady state; a step begins with its `prepare_step` kernel. The
gap is the time from the end of a step's last kernel to the start of the next step's first kernel,
as a share of the time from start to start. The profiler itself slows the host, so the true gap is
smaller. Tokens per second without the profiler are also measured. The effect of CUDA graphs is in
`benchmarks/e2e_toggles.py`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import environment
from benchmarks.figures import save
from tiercel import LLM, SamplingParams

BATCHES = (1, 8, 64)
PROMPT_TOKENS = 128
WARM_STEPS, STEPS = 8, 64
FIRST_KERNEL = "prepare_step_kernel"


def stream_steps(llm: LLM, batch: int, count: int) -> Iterator[None]:
    """Decode steps of a batch whose prompts are done."""
    engine = llm._engine
    params = SamplingParams(temperature=0, max_tokens=count + 4, ignore_eos=True)
    ids = [[(7 * i + j) % 250 for j in range(PROMPT_TOKENS)] for i in range(batch)]
    requests = [llm._inputs.request(prompt, params, 0) for prompt in ids]
    for request in requests:
        engine.submit(request)
    while any(len(request.output_token_ids) < 2 for request in requests):
        engine.step()
    try:
        for _ in range(count - 2):
            engine.step()
            yield
    finally:
        for request in requests:
            engine.abort(request)


def tokens_per_second(llm: LLM, batch: int) -> float:
    """Tokens per second of steady decode steps, by the wall clock."""
    steps = stream_steps(llm, batch, 2 * STEPS)
    for _ in range(WARM_STEPS):
        next(steps)
    start, count = time.perf_counter(), 0
    for _ in range(STEPS):
        next(steps)
        count += 1
    seconds = time.perf_counter() - start
    steps.close()
    return batch * count / seconds


def gaps(llm: LLM, batch: int) -> dict[str, float]:
    """Medians of step time and gap in microseconds, from a trace."""
    steps = stream_steps(llm, batch, STEPS + 2 * WARM_STEPS)
    for _ in range(WARM_STEPS):
        next(steps)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(STEPS // 2):
            next(steps)
        torch.cuda.current_stream().synchronize()
    steps.close()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" not in event.name
    )
    starts = [i for i, (_, _, name) in enumerate(kernels) if FIRST_KERNEL in name]
    times, waits = [], []
    for first, following in pairwise(starts[1:]):
        end = max(kernel[1] for kernel in kernels[first:following])
        times.append(kernels[following][0] - kernels[first][0])
        waits.append(max(0.0, kernels[following][0] - end))
    return {
        "steps": len(times),
        "step_us": statistics.median(times),
        "gap_us": statistics.median(waits),
        "gap_share": statistics.median(waits) / statistics.median(times),
    }


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    start = time.perf_counter()
    llm = LLM(options.model, max_model_len=options.max_model_len)
    load_s = round(time.perf_counter() - start, 2)
    rows: list[dict[str, Any]] = [{"model": options.model.name, "load_s": load_s}]
    for batch in BATCHES:
        result = gaps(llm, batch) | {"tokens_per_second": tokens_per_second(llm, batch)}
        rows.append({"batch": batch, **result})
        print(f"batch {batch}: {result}")
    save(options.out, environment(llm.config.device), rows)


if __name__ == "__main__":
    main()
