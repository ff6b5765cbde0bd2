"""Decode steps and a prompt of a model that several GPUs share, at true shapes.

    NCCL_NVLS_ENABLE=0 python -m benchmarks.v4_ranks --gpus 2 --layers 8 --out FILE.json
    python -m benchmarks.v4_ranks --gpus 8 --alone --out FILE.json
    python -m benchmarks.v4_ranks --gpus 2 --model qwen3-8b --out FILE.json
    NCCL_NVLS_ENABLE=0 python -m benchmarks.v4_ranks --gpus 2 --split ep --requests 64 256
    NCCL_NVLS_ENABLE=0 python -m benchmarks.v4_ranks --gpus 2 --split dp --requests 64 256

DeepSeek-V4-Flash with MXFP4 experts, or a dense model of `model_shapes.py` in the types of Q4_K_M;
weights are random and drawn on each GPU. A process per GPU; a decode step of 1, 8 and 64 requests
with the logits of all token ids, as an engine samples from them, is one CUDA graph, replayed by all
ranks together, and the slowest rank counts. Ranks must have equal bits, or nothing is timed.
`--layers` is for GPUs that do not hold all 43.

`--split dp` is data-parallel attention: the requests are shared out, each GPU attends to its own,
and experts are whole. Then ranks have other rows, and instead of comparing them each step is run
twice for the same bits; floors have a gather and a sum of rows a layer.

Beside it the head alone: those logits, and greedy tokens by the best of each rank.

`--kernels` adds what rank 0 runs in a step: each kernel's calls and time, from a trace.

`--alone` runs rank 0 by itself on one GPU, with its own parts as the sums: what a rank computes and
reads, without what it waits for. On a CPU ranks are processes joined by gloo, at a sixteenth of
each size, to test this file.

Floor: the bytes of weights and cache that a rank reads at the measured rate, and the measured time
of the sums over ranks: two a layer, of the dtypes that the model has.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import environment
from benchmarks.deepseek_v4_layers import (
    FLASH,
    FLASH_RATIOS,
    RandomWeights,
    Slice,
    Step,
    floor_bytes,
    make_pools,
)
from benchmarks.figures import save
from benchmarks.random_decoder import RandomDecoder, decoder_config
from tiercel.batch import Batch
from tiercel.cache.spec import group_specs
from tiercel.config import ModelOptions
from tiercel.ipc.ranks import join_group
from tiercel.models.decoder import Decoder
from tiercel.models.deepseek_v4_model import DeepseekV4
from tiercel.models.model import Model
from tiercel.models.sharding import sharding_kind
from tiercel.models.weights import WeightReader
from tiercel.parallel import Group
from tiercel.profiling.device_timing import read_gbps
from tiercel.quant_types import QuantType
from tiercel.runner.step_inputs import make_timing_batch

DECODE = (1, 8, 64)  # requests
CONTEXT = {"cuda": 8192, "cpu": 256}
PROMPT = {"cuda": 4096, "cpu": 64}
SAMPLES = {"cuda": 7, "cpu": 2}
REPLAYS = {"cuda": 20, "cpu": 1}  # of a sample; equal on all ranks, or they would wait for ever
SUMS = {"cuda": 50, "cpu": 2}  # in a graph
TRACED, MOST_KERNELS = 4, 30  # steps of a profile, kernels listed
SHRINK = 8  # of a dense model's sizes on a CPU: parts are whole blocks of 256 columns


@dataclass(frozen=True, slots=True)
class Lone(Group):
    """A rank without the others: what it has counts as the sum, and gathers repeat it."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The rank's own part."""
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The rank's own part in place of each."""
        return torch.cat([x] * self.size, dim=dim)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The rank's own rows in place of each one's."""
        return torch.cat([x] * len(counts))

    def scatter_sums(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The rank's own part of its rows."""
        return x[: counts[0]]

    def meet(self, what: str, timeout_s: float) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """Nothing was joined."""


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        model: ``flash``, or a name of `model_shapes.py`.
        num_gpus: ranks.
        num_layers: of the model.
        expert_parallel: whether each rank has whole experts.
        is_alone: whether rank 0 runs without the others.
        device_type: ``cuda`` or ``cpu``.
        requests: of the decode steps.
        has_prompt: whether a prompt is timed too.
        has_kernels: whether rank 0's kernels are listed.
        out: for the figures.
        has_own_requests: whether each rank has a share of the requests, and whole experts.
        contexts: tokens that decode steps attend to; the usual number if there is none.
    """

    model: str
    num_gpus: int
    num_layers: int
    expert_parallel: bool
    is_alone: bool
    device_type: str
    requests: tuple[int, ...]
    has_prompt: bool
    has_kernels: bool
    out: Path | None
    has_own_requests: bool = False
    contexts: tuple[int, ...] = ()

    @property
    def shares(self) -> int:
        """Ranks that requests are shared out to."""
        return self.num_gpus if self.has_own_requests else 1


def load(job: Job, group: Group, device: torch.device) -> tuple[Model, Any]:
    """This rank's part of the model, and the weights that it drew."""
    kind = sharding_kind(
        expert_parallel=job.expert_parallel, data_parallel_attention=job.has_own_requests
    )
    sharding = kind.of(group.rank, group.size)
    if job.model != "flash":
        shrink = SHRINK if device.type == "cpu" else 1
        config = decoder_config(job.model, job.num_layers, shrink)
        dense = RandomDecoder(config, device, sharding)
        dtype = torch.float32 if device.type == "cpu" else torch.float16
        reader = cast("WeightReader", dense)
        return Decoder(config, reader, dtype, CONTEXT["cuda"], ModelOptions(), group), dense
    part = Slice("flash", FLASH, FLASH_RATIOS[: job.num_layers], min(3, job.num_layers))
    v4_config = part.config(device)
    weights = RandomWeights(v4_config, device, QuantType.MXFP4, sharding)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    options = ModelOptions(kv_dtype="fp8")
    reader = cast("WeightReader", weights)
    return DeepseekV4(v4_config, reader, dtype, 1 << 14, options, group), weights


def step_bytes(model: Model, weights: Any, step: Step, shares: int = 1) -> int:
    """Bytes that a rank reads in a step, its rows of the head included.

    shares: ranks that bring as many tokens to the experts.
    """
    if isinstance(model, DeepseekV4):
        num_bytes = floor_bytes(model, weights, step, shares * step.num_tokens)
        return num_bytes + weights.num_bytes["head.weight"]
    matrices = sum(size for name, size in weights.num_bytes.items() if name != "embed.weight")
    token = sum(
        spec.bytes_per_block(model.block_size) // model.block_size for spec in model.cache_specs()
    )
    return matrices + step.num_reqs * step.context_len * token


def make_batch(job: Job, model: Model, rank: int, step: Step, device: torch.device) -> Batch:
    """Random tokens over a random cache, which is bound to the model."""
    pools, tables = make_pools(group_specs(model.cache_specs()), step, device, model.block_size)
    model.bind_cache(pools)
    batch = make_timing_batch(step.num_reqs, step.query_len, step.context_len, tables)
    generator = torch.Generator().manual_seed(3 + rank * job.has_own_requests)
    ids = torch.randint(0, model.config.vocab_size, batch.input_ids.shape, generator=generator)
    counts = (batch.num_tokens,) * job.num_gpus if job.has_own_requests else ()
    return replace(batch, input_ids=ids.int().to(device), rank_tokens=counts)


def repeatable(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """The same as one CUDA graph, whose result is always in the same memory."""
    if device.type == "cpu":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL query events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def time_ms(run: Callable[[], object], group: Group, device: torch.device) -> float:
    """Milliseconds of a call on the slowest rank, the median of some samples."""
    samples = []
    for _ in range(SAMPLES[device.type]):
        group.meet("a sample", 120.0)
        samples.append(_sample_ms(run, device))
    mine = torch.tensor([statistics.median(samples)])
    return float(group.all_gather(mine).max())


def _sample_ms(run: Callable[[], object], device: torch.device) -> float:
    count = REPLAYS[device.type]
    if device.type == "cpu":
        return 1e3 * statistics.mean(_wall_s(run) for _ in range(count))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()  # ranks start together after it
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def _wall_s(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def collective_us(
    call: Callable[[Tensor], Tensor], x: Tensor, group: Group, device: torch.device
) -> float:
    """Microseconds of a call of the group with x, in a graph of many."""
    count = SUMS[device.type]

    def run() -> Tensor:
        out = x
        for _ in range(count):
            out = call(x)
        return out

    return 1e3 * time_ms(repeatable(run, device), group, device) / count


def collectives_us(
    job: Job, model: Model, group: Group, num_tokens: int, device: torch.device
) -> dict[str, float]:
    """Microseconds of what a layer sends, by name."""
    hidden, is_v4 = model.config.hidden_size, isinstance(model, DeepseekV4)
    rows = torch.zeros((num_tokens, hidden), dtype=model.dtype, device=device)
    out = rows.to(torch.float32 if is_v4 else model.dtype)
    if not job.has_own_requests:
        return {
            "attention_sum_us": collective_us(group.all_reduce, rows, group, device),
            "mlp_sum_us": collective_us(group.all_reduce, out, group, device),
        }
    counts = (num_tokens,) * job.num_gpus
    parts = out.repeat(job.num_gpus, 1)
    return {
        "gather_us": collective_us(lambda x: group.gather_rows(x, counts), rows, group, device),
        "scatter_us": collective_us(lambda x: group.scatter_sums(x, counts), parts, group, device),
    }


def kernel_rows(
    name: str, run: Callable[[], object], group: Group, device: torch.device
) -> list[dict[str, Any]]:
    """Calls of each kernel in a step of this rank and their microseconds, the longest first."""
    kinds = [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]
    group.meet("the profile", 120.0)
    with profile(activities=kinds) as trace:
        for _ in range(TRACED):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    is_gpu = device.type == "cuda"
    found = []
    for event in trace.key_averages():
        total_us = event.device_time_total if is_gpu else event.self_cpu_time_total
        found.append(
            {
                "name": f"{name}: {event.key:.70}",
                "calls": event.count // TRACED,
                "call_us": round(total_us / event.count, 3),
                "step_us": round(total_us / TRACED, 2),
            }
        )
    return sorted(found, key=lambda row: -float(row["step_us"]))[:MOST_KERNELS]


def check_bits(group: Group, out: Tensor) -> None:
    """Stop unless all ranks have the same finite numbers."""
    if not bool(out.isfinite().all()):
        raise SystemExit(f"rank {group.rank}: not finite; not timed")
    rows = out[:4].contiguous()
    for part in group.all_gather(rows.cpu().unsqueeze(0), dim=0):
        if not torch.equal(part, rows.cpu()):
            raise SystemExit(f"rank {group.rank}: other bits than another rank; not timed")


def check_again(group: Group, first: Tensor, second: Tensor) -> None:
    """Stop unless a rank got the same finite numbers twice."""
    if not bool(first.isfinite().all()):
        raise SystemExit(f"rank {group.rank}: not finite; not timed")
    if not torch.equal(first, second):
        raise SystemExit(f"rank {group.rank}: other bits when it ran again; not timed")


@torch.inference_mode()
def measure_step(
    job: Job, model: Model, weights: Any, group: Group, step: Step, gbps: float
) -> list[dict[str, Any]]:
    """Time one step; its row, then those of kernels."""
    device = torch.device(job.device_type)
    batch = make_batch(job, model, group.rank, step, device)
    found: dict[str, Tensor] = {}

    def run() -> Tensor:
        hidden = model.forward(batch)
        found["hidden"] = hidden
        return model.logits(hidden, batch.logits_rows)

    is_decode = step.query_len == 1
    repeat = repeatable(run, device) if is_decode else run
    repeat()
    if job.has_own_requests:
        first = found["hidden"].clone()
        repeat()
        check_again(group, first, found["hidden"])
    else:
        check_bits(group, found["hidden"])
    ms = time_ms(repeat, group, device)
    sums = collectives_us(job, model, group, step.num_tokens, device)
    last = found["hidden"][batch.logits_rows.long()].clone()
    heads = {"best": lambda: model.best_tokens(last, 1)[1], "logits": lambda: model.logits(last)}
    head_us = {
        f"head_{name}_us": round(1e3 * time_ms(repeatable(run_head, device), group, device), 2)
        for name, run_head in heads.items()
    }
    num_bytes = step_bytes(model, weights, step, job.shares)
    floor_ms = num_bytes / gbps / 1e6 + job.num_layers * sum(sums.values()) / 1e3
    name = f"{job.model}, {job.num_layers} layers, {step.num_reqs * job.shares} requests, "
    name += f"{step.query_len} new tokens, context {step.context_len}"
    kernels = kernel_rows(name, repeat, group, device) if job.has_kernels else []
    timed = {
        "name": name,
        "gpus": job.num_gpus,
        "is_alone": job.is_alone,
        "experts": "whole" if job.expert_parallel or job.has_own_requests else "split",
        "requests_per_gpu": step.num_reqs,
        "is_graph": is_decode and device.type == "cuda",
        "step_ms": round(ms, 4),
        "layer_us": round(1e3 * ms / job.num_layers, 2),
        **{key: round(value, 2) for key, value in sums.items()},
        **head_us,
        "bytes_per_rank": num_bytes,
        "weight_bytes_per_rank": sum(weights.num_bytes.values()),
        "floor_ms": round(floor_ms, 4),
        "fraction_of_floor": round(floor_ms / ms, 4),
    }
    return [timed, *kernels]


def run_rank(rank: int, job: Job, address: str) -> None:
    """One process."""
    device = (
        torch.device(job.device_type, rank) if job.device_type == "cuda" else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    group = (
        Lone(0, job.num_gpus) if job.is_alone else join_group(rank, job.num_gpus, device, address)
    )
    measure(job, group, device)
    group.close()


def measure(job: Job, group: Group, device: torch.device) -> list[dict[str, Any]]:
    """Load a rank's part and time all steps; rank 0 prints and saves."""
    gbps = read_gbps(device)
    model, weights = load(job, group, device)
    kind = device.type
    contexts = job.contexts or (CONTEXT[kind],)
    steps = [Step(-(-count // job.shares), 1, c) for c in contexts for count in job.requests]
    steps += [Step(1, PROMPT[kind], PROMPT[kind])] if job.has_prompt else []
    rows: list[dict[str, Any]] = [{"name": "rate of reading", "read_gbps": gbps}]
    for step in steps:
        found = measure_step(job, model, weights, group, step, gbps)
        rows += found
        if group.rank == 0:
            print(*found, sep="\n", flush=True)
            save(job.out, environment(device), rows)
    return rows


def run(job: Job) -> None:
    """All ranks, each in a process of its own."""
    if job.is_alone or job.num_gpus == 1:
        run_rank(0, job, "")
        return
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/ranks"
        ranks = [
            context.Process(target=run_rank, args=(rank, job, address), daemon=True)
            for rank in range(job.num_gpus)
        ]
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks):
            for process in ranks:
                process.join(0.2)
                if process.exitcode not in (None, 0):
                    for other in ranks:
                        other.kill()
                    raise SystemExit(f"a rank ended with {process.exitcode}")


def main() -> None:
    """Measure one model on a number of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", default="flash")
    parser.add_argument("--layers", type=int, default=0, help="0: all")
    parser.add_argument("--split", default="tp", choices=("tp", "ep", "dp"))
    parser.add_argument("--alone", action="store_true", help="rank 0 without the others")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--requests", type=int, nargs="*", default=DECODE)
    parser.add_argument("--contexts", type=int, nargs="*", default=[], help="8192 on a GPU")
    parser.add_argument("--no-prompt", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="list those of rank 0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.split == "dp" and options.model != "flash":
        parser.error("--split dp shares experts, which a dense model does not have")
    needed, there = 1 if options.alone else options.gpus, torch.cuda.device_count()
    if options.device == "cuda" and needed > there:
        parser.error(f"--gpus {options.gpus} needs {needed} GPUs, and here are {there}")
    whole = 43 if options.model == "flash" else 36
    run(
        Job(
            options.model,
            options.gpus,
            options.layers or whole,
            options.split == "ep",
            options.alone,
            options.device,
            tuple(options.requests),
            not options.no_prompt,
            options.kernels,
            options.out,
            options.split == "dp",
            tuple(options.contexts),
        )
    )


if __name__ == "__main__":
    main()
