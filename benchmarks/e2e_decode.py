"""Tokens per second of one request by depth, as llama-bench's tg128 defines them.

    python -m benchmarks.synthetic_model qwen3-8b qwen3-8b.gguf
    python -m benchmarks.e2e_decode qwen3-8b.gguf --out benchmarks/results/e2e_decode_h200.json

At depth D, D tokens are in the cache first, not timed; then 128 steps, each with the token of the
step before, with logits and greedy sampling (llama-bench leaves sampling out). One warm-up, five
repetitions, mean and deviation. Once with the fused decode step, once without it, in one
process. Floor: weights, output matrix and the keys and values of the context at 4.53 TB/s.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment
from benchmarks.figures import save
from tiercel import LLM, SamplingParams
from tiercel.runner.graph_capture import GraphRecorder

DEPTHS = (0, 1024, 8192, 32768)
STEPS, REPETITIONS = 128, 5
READ_BYTES_PER_SECOND = 4.53e12  # of an H200, measured; docs/notes/packed_products.md


def tokens_per_second(llm: LLM, depth: int) -> float:
    """One repetition: `STEPS` tokens after `depth` (at least one) tokens."""
    engine = llm._engine
    params = SamplingParams(temperature=0, max_tokens=STEPS + 8, ignore_eos=True)
    vocab_size = engine.runner.model.config.vocab_size
    draw = random.Random(depth)
    prompt = [draw.randrange(vocab_size) for _ in range(max(1, depth))]
    request = llm._inputs.request(prompt, params, 0)
    engine.submit(request)
    while len(request.output_token_ids) < 2:
        engine.step()
    torch.cuda.synchronize()
    began, first = time.perf_counter(), len(request.output_token_ids)
    while len(request.output_token_ids) < first + STEPS:
        engine.step()
    seconds = time.perf_counter() - began
    engine.abort(request)
    while engine.has_work:
        engine.step()
    return STEPS / seconds


def floor_bytes(llm: LLM, depth: int) -> int:
    """Bytes that a step in the middle of a repetition must read."""
    config, source = llm._engine.runner.model.config, llm.source
    head = "head.weight" if "head.weight" in source.names else "embed.weight"
    used = {name for name in source.names if name.startswith("layers.")} | {head}
    weights = sum(source.tensors[source.names[name]].nbytes for name in used)
    per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    return weights + per_token * (depth + STEPS // 2)


def measure(llm: LLM, depths: list[int], label: str) -> list[dict[str, Any]]:
    """Measure all depths with the engine as it is set."""
    rows = []
    for depth in depths:
        tokens_per_second(llm, depth)
        rates = [tokens_per_second(llm, depth) for _ in range(REPETITIONS)]
        floor = READ_BYTES_PER_SECOND / floor_bytes(llm, depth)
        mean = statistics.mean(rates)
        rows.append(
            {
                "kernel": label,
                "name": f"tg{STEPS} @ d{depth}",
                "depth": depth,
                "tokens_per_second": round(mean, 1),
                "deviation_tokens_per_second": round(statistics.stdev(rates), 2),
                "floor_tokens_per_second": round(floor, 1),
                "share_of_floor": round(mean / floor, 3),
            }
        )
        print(f"depth {depth}: {mean:.1f} tokens/s, {mean / floor:.1%} of the floor", flush=True)
    return rows


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    start = time.perf_counter()
    os.environ["TIERCEL_MEGAKERNEL"] = "1"
    longest = max(options.depths) + STEPS + 16
    llm = LLM(options.model, max_model_len=longest, max_num_seqs=1)
    load_s = round(time.perf_counter() - start, 2)
    rows: list[dict[str, Any]] = [{"model": options.model.name, "load_s": load_s}]
    model, steps = llm._engine.runner.model, llm._engine.runner.decode_steps
    for is_on in (True, False):
        if not is_on:
            with torch.inference_mode():
                model.fused_decode_step = None
                steps.capture(GraphRecorder(llm.config.device))
        elif model.fused_decode_step is None:
            raise SystemExit(f"{options.model.name}: the fused decode step does not fit it.")
        label = "megakernel" if is_on else "kernel by kernel"
        print(label)
        rows += measure(llm, options.depths, label)
    save(options.out, environment(llm.config.device), rows)


if __name__ == "__main__":
    main()
