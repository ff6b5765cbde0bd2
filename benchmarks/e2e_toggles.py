"""Both sides of each toggle in one run: tokens per second of prompts and decode steps.

    python -m benchmarks.synthetic_model qwen3-8b qwen3-8b.gguf
    python -m benchmarks.e2e_toggles qwen3-8b.gguf --out benchmarks/results/e2e_toggles_h200.json

Toggles are read when a model is loaded, so one process loads the model once for each value that is
not the default (except for one toggle that is read once per process, whose other value has its own
process). The cost of a value is the difference to the loads with all defaults, which come first
and last. Trials are those of `tiercel bench speed`: a prompt of 512 tokens, 32 greedy steps of one
sequence and 16 of 8 at depth 128, 16 of 64 at depth 32; medians. Inputs are the same for all.

A call may measure only some toggles (`--toggles`), with its own loads of the defaults.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment
from benchmarks.figures import save
from tiercel import env
from tiercel.bench.speed import Trial, context_of, measure_speed
from tiercel.config import LoadOptions
from tiercel.engine.load import load_model

TRIALS = (Trial(1, 512), Trial(1, 128, 32), Trial(8, 128, 16), Trial(64, 32, 16))
NAMES = tuple(f"{name}_tokens_per_second" for name in ("pp512", "tg32_b1", "tg16_b8", "tg16_b64"))
REPETITIONS = 3
# The default of each toggle.
TOGGLES = {
    "TIERCEL_MEGAKERNEL": env.has_megakernel,
    "TIERCEL_MEGAKERNEL_PAIRS": env.has_megakernel_pairs,
    "TIERCEL_ONE_COPY": env.has_one_copy,
    "TIERCEL_DECODE_CHAIN": env.has_fused_layer_tail,
    "TIERCEL_BATCH_STEP": env.has_batch_step,
    "TIERCEL_INT8_ACTIVATIONS": env.has_int8_activations,
    "TIERCEL_PDL": env.has_dependent_launch,
    "TIERCEL_CUDA_GRAPH": env.has_cuda_graphs,
    "TIERCEL_Q4K_SOA": env.has_q4k_soa,
    "TIERCEL_PREFILL_GEMM": env.has_prefill_gemm,
    "TIERCEL_PREFILL_MMQ": env.has_prefill_mmq,
    "TIERCEL_FUSED_GEMM": env.has_fused_gemm,
    "TIERCEL_BLOCK_KERNEL": env.has_block_kernel,
    "TIERCEL_LINEAR_GROUP": env.has_linear_group,
    "TIERCEL_FUSED_GEMM_NORM": env.has_fused_gemm_norm,
    "TIERCEL_FUSED_GEMM_HEADS": env.has_fused_gemm_heads,
    "TIERCEL_ATTENTION_IMAGE": env.has_attention_image,
    "TIERCEL_MOE_KERNEL": env.has_moe_kernel,
    "TIERCEL_MOE_TILES": env.has_moe_tiles,
    "TIERCEL_MOE_GEMM": env.has_moe_gemm,
    "TIERCEL_MHC_KERNEL": env.has_mhc_kernel,
    "TIERCEL_ROPE_KERNEL": env.has_rope_kernel,
    "TIERCEL_ROUTE_KERNEL": env.has_route_kernel,
    "TIERCEL_COMPRESS_KERNEL": env.has_compress_kernel,
    "TIERCEL_SPARSE_ATTENTION_KERNEL": env.has_sparse_attention_kernel,
    "TIERCEL_INDEXER_KERNEL": env.has_indexer_kernel,
}
ONCE_A_PROCESS = ("TIERCEL_PDL",)


def measure(model: Path, switches: dict[str, str]) -> dict[str, float]:
    """Tokens per second of all trials with some toggles set, and the seconds of the load."""
    os.environ.update(switches)
    began = time.perf_counter()
    options = LoadOptions(
        max_model_len=context_of(TRIALS),
        max_num_seqs=max(trial.batch for trial in TRIALS),
        max_num_batched_tokens=1024,
    )
    loaded = load_model(model, options, None)
    result = {"load_s": time.perf_counter() - began}
    speeds = measure_speed(loaded, TRIALS, REPETITIONS, 0, lambda _: None)
    for name, (_, rates) in zip(NAMES, speeds, strict=True):
        result[name] = statistics.median(rates)
    del loaded, speeds
    gc.collect()
    torch.cuda.empty_cache()
    for name in switches:
        del os.environ[name]
    print(switches or "defaults", {k: round(v, 2) for k, v in result.items()}, flush=True)
    return result


def measure_apart(model: Path, switches: dict[str, str]) -> dict[str, float]:
    """The same in a separate process."""
    command = [sys.executable, "-m", "benchmarks.e2e_toggles", str(model), "--alone"]
    environ = os.environ | switches
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environ)
    result: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    print(switches, "in its own process", {k: round(v, 2) for k, v in result.items()}, flush=True)
    return result


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--toggles", nargs="+", choices=TOGGLES, default=list(TOGGLES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure(options.model, {})))
        return
    if set_before := env.switches():
        raise SystemExit(f"toggles are set already: {set_before}")
    head, model = environment(torch.device("cuda")), {"model": options.model.name}
    rows: list[dict[str, Any]] = [model | {"toggle": "none"} | measure(options.model, {})]
    for name in options.toggles:
        default = str(int(TOGGLES[name]()))
        other = "10"[int(default)]
        run = measure_apart if name in ONCE_A_PROCESS else measure
        side = {"toggle": name, "default": default, "value": other}
        rows.append(model | side | run(options.model, {name: other}))
        save(options.out, head, rows)
    rows.append(model | {"toggle": "none, again"} | measure(options.model, {}))
    save(options.out, head, rows)


if __name__ == "__main__":
    main()
