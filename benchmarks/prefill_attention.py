"""Prefill attention against its floor, beside cuDNN and FlashAttention 2 on contiguous tensors.

    python -m benchmarks.prefill_attention --device cuda --out results/prefill_attention.json

Floor: 4 * head_dim operations per visible pair of a head and a key, at the rate of a bf16 product
of 8192^3 measured in the same run. The op gets a plan, as all layers of a step but one do; planning
is timed apart. Peers read contiguous keys; for a chunk after cached keys they get every head's
keys expanded, since their lower-right mask takes no shared heads.

How: calls over inputs of more than 240 MB in turn, in a CUDA graph, after 0.12 s of the same work.
The warm-up matters: a card at rest boosts for tens of milliseconds and reads up to 10% better than
it does at its power limit. Kernels of a row run one after the other; compare within a run only.

--suite scoring: the shapes that peers of multi-item scoring were timed on
(prefill_attention_peers.py), the same with the prefix computed in the launch, and few items on a
long prefix, with tiles cut into parts and whole. --suite sweep times the Triton kernel in other
tiles, for the table in kernels/attention/prefill_attention.py.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import environment
from benchmarks.figures import save
from benchmarks.op_timing import parse, relative_error
from benchmarks.prefill_attention_shapes import SCORING_SHAPES, SHAPES, SWEEP, SWEEP_SHAPES, Shape
from tiercel.kernels.attention.prefill_attention_tiles import make_tiles
from tiercel.ops.prefill_attention import plan_prefill_attention, prefill_attention
from tiercel.ops.prefill_attention_plan import PlannedTiles
from tiercel.reference import prefill_attention as oracle

BLOCK_SIZE = 64
WARM_SECONDS, LEAST_CALLS, MOST_SAMPLES = 0.12, 10, 30
COLD_BYTES = 240_000_000  # more than four times the L2 of an H200
MOST_SETS = 24
TOLERANCE = 7e-3  # weights and result are rounded to bfloat16
CHECKED_ROWS = 97  # of the end of the step; the oracle is slow


@dataclass(frozen=True)
class Inputs:
    """Inputs of one call; q, k_new and v_new are cut out of fused rows, as in a model."""

    shape: Shape
    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    item_start: Tensor | None

    def lengths(self) -> tuple[list[int], list[int]]:
        batch = self.shape.batch
        return [self.shape.tokens] * batch, [self.shape.length] * batch

    def items(self) -> dict[str, Any]:
        if self.item_start is None:
            return {}
        prefixes = [self.shape.prefix] * self.shape.batch
        return {"prefix_len": prefixes, "item_start": self.item_start}

    def entries(self, cache: Tensor, new: Tensor) -> Tensor:
        """(length, kv_heads, head_dim): keys or values of the last request end to end."""
        prefix = cache[self.tables[-1].long()].flatten(0, 1)[: self.shape.prefix]
        own = new[-self.shape.tokens :]
        return torch.cat((prefix, own[self.shape.prefix - self.shape.cached :]))


def make_inputs(shape: Shape, seed: int, device: torch.device) -> Inputs:
    """Random entries in blocks of random order."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).bfloat16()

    blocks = -(-shape.prefix // BLOCK_SIZE) * shape.batch
    order = 1 + torch.randperm(blocks, generator=generator, device=device)
    cache = (blocks + 1, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k_new, v_new = normal(shape.tokens * shape.batch, sum(heads), shape.head_dim).split(
        heads, dim=1
    )
    starts = None
    if shape.items:
        own = shape.prefix + torch.arange(shape.items) * shape.item_len
        before = torch.zeros(shape.prefix - shape.cached)
        starts = torch.cat((before, own.repeat_interleave(shape.item_len))).int()
        starts = starts.repeat(shape.batch)
    caches = normal(*cache), normal(*cache)
    tables = order.int().view(shape.batch, -1)
    return Inputs(shape, q, k_new, v_new, *caches, tables, starts)


def make_plan(inputs: Inputs) -> Any:
    shape = inputs.shape
    return plan_prefill_attention(
        *inputs.lengths(),
        num_heads=shape.heads,
        k_cache=inputs.k_cache,
        window=shape.window,
        **inputs.items(),
    )


def run_op(inputs: Inputs, plan: Any) -> Tensor:
    shape = inputs.shape
    new = {"k_new": inputs.k_new, "v_new": inputs.v_new} if shape.items else {}
    return prefill_attention(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.tables,
        *inputs.lengths(),
        shape.head_dim**-0.5,
        window=shape.window,
        plan=plan,
        **inputs.items(),
        **new,
    )


def make_variant(inputs: Inputs, **changes: Any) -> Callable[[Inputs], Tensor]:
    """The kernel in another configuration than the selected one, on whole tiles."""
    kernel = import_module(
        "tiercel.kernels.attention.prefill_attention"
    )  # needs Triton, so not at the top
    shape = inputs.shape
    select = kernel.select_prefill_attention
    group = shape.heads // shape.kv_heads
    is_triton = changes.get("variant") == "triton"
    capability = (8, 0) if is_triton else torch.cuda.get_device_capability()
    longest, window = shape.prefix, shape.window
    kind = (inputs.q.dtype, shape.head_dim, group, BLOCK_SIZE, window, 0.0, longest, capability)
    config = replace(select(*kind), **changes)
    starts = None if inputs.item_start is None else inputs.item_start.numpy()
    lengths = (*inputs.lengths(), [shape.prefix] * shape.batch)
    step = config.block_m // group
    tiles = make_tiles(*lengths, starts, step)
    own = np.zeros(0, np.int32) if starts is None else starts
    model = (inputs.q.dtype, shape.head_dim, group, BLOCK_SIZE)
    planned = PlannedTiles(config, model, tiles, own, None, step)
    plan = planned.upload(inputs.q.device)

    def run(item: Inputs) -> Tensor:
        out = torch.empty(item.q.shape, dtype=item.q.dtype, device=item.q.device)
        tensors = (item.q, item.k_cache, item.v_cache, item.tables, item.k_new, item.v_new, out)
        kernel.launch_prefill_attention(*tensors, plan, shape.head_dim**-0.5, window)
        return out.flatten(1)

    return run


def check(inputs: Inputs, out: Tensor) -> float:
    """Relative error of the last tokens of the step, all of one item or of the prompt's end."""
    shape = inputs.shape
    rows = min(CHECKED_ROWS, shape.item_len or shape.tokens)
    keys, values = (
        inputs.entries(cache, new)
        for cache, new in ((inputs.k_cache, inputs.k_new), (inputs.v_cache, inputs.v_new))
    )
    starts = None if inputs.item_start is None else inputs.item_start[-rows:]
    expected, _ = oracle.prefill_attention(
        inputs.q[-rows:],
        [keys],
        [values],
        [rows],
        shape.head_dim**-0.5,
        shape.window,
        [shape.prefix],
        starts if starts is not None else torch.zeros(rows),
    )
    return relative_error(out[-rows:], expected)


def time_us(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Median microseconds of a call, `calls` in turn, warm."""
    calls[0]()
    count = len(calls) * max(1, -(-LEAST_CALLS // len(calls)))

    def body() -> None:
        for _, call in zip(range(count), itertools.cycle(calls), strict=False):
            call()

    samples = []
    if device.type == "cpu":
        for call in calls * 3:
            start = time.perf_counter()
            call()
            samples.append(1e6 * (time.perf_counter() - start))
        return statistics.median(samples)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_SECONDS:
        graph.replay()
        torch.cuda.synchronize()
    while len(samples) < 5 or (
        len(samples) < MOST_SAMPLES and time.perf_counter() - start < 3 * WARM_SECONDS
    ):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1000 * begin.elapsed_time(end) / count)
    return statistics.median(samples)


def host_us(call: Callable[[], object]) -> float:
    """Time that a call takes on the host, which does not wait for the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(LEAST_CALLS):
        call()
    return 1e6 * (time.perf_counter() - start) / LEAST_CALLS


def gemm_tflops(device: torch.device) -> float:
    """The rate of a bf16 product in the steady state, as everything else here is timed."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / time_us([lambda: torch.mm(a, b, out=out)], device) / 1e6


def peers(shape: Shape) -> Iterator[tuple[str, AbstractContextManager[Any]]]:
    """Backends of PyTorch that can do the shape on this device."""
    if shape.items or shape.window:
        return
    if not torch.cuda.is_available():
        if not shape.cached:
            yield "sdpa", nullcontext()
        return
    if not shape.cached:  # its causal mask is that of a whole prompt
        yield "cudnn", sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    yield "fa2", sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def make_peer_call(inputs: Inputs) -> Callable[[], Tensor]:
    """A peer's call on contiguous (1, heads, tokens, head_dim) tensors."""
    shape = inputs.shape
    q = inputs.q.transpose(0, 1)[None].contiguous()
    k, v = (
        inputs.entries(cache, new).transpose(0, 1)[None].contiguous()
        for cache, new in ((inputs.k_cache, inputs.k_new), (inputs.v_cache, inputs.v_new))
    )
    if not shape.cached:
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for x in (k, v))
    mask = causal_lower_right(shape.tokens, shape.length)
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask)


def make_sets(shape: Shape, device: torch.device) -> list[Inputs]:
    count = 2
    if device.type == "cuda":
        count = min(MOST_SETS, max(2, -(-COLD_BYTES // shape.num_bytes)))
    return [make_inputs(shape, seed, device) for seed in range(count)]


def checked(name: str, inputs: Inputs, out: Tensor) -> float:
    """The error of a result; a wrong one is not timed."""
    error = check(inputs, out)
    if not error <= TOLERANCE:  # written so that NaN fails
        raise SystemExit(f"{inputs.shape.name}, {name}: error {error:.2e}; not timed")
    return error


def measure(shape: Shape, device: torch.device, rate: float) -> dict[str, Any]:
    """Check, then time the op, its other variants and its peers."""
    sets = make_sets(shape, device)
    plan = make_plan(sets[0])
    chosen = plan.config.variant if plan is not None else "cpu"
    row: dict[str, Any] = {"name": shape.name, "variant": chosen, "flops": shape.flops}
    row["relative_error"] = checked("op", sets[0], run_op(sets[0], plan))
    row["us"] = time_us([lambda item=item: run_op(item, plan) for item in sets], device)
    if device.type == "cuda":
        others = [name for name in ("plain", "fast", "triton") if name != chosen]
        for name in others if chosen != "triton" else []:
            run = make_variant(sets[0], variant=name)
            checked(name, sets[0], run(sets[0]))
            calls = [lambda item=item, run=run: run(item) for item in sets]
            row[f"{name}_us"] = time_us(calls, device)
        row["plan_us"] = host_us(lambda: make_plan(sets[0]))
        row["host_us"] = host_us(lambda: run_op(sets[0], plan))
    for name, backend in peers(shape):
        try:
            with backend:
                row[f"{name}_us"] = time_us([make_peer_call(item) for item in sets], device)
        except RuntimeError as error:  # a backend that does not take the shape; the op still counts
            row[f"{name}_error"] = str(error).splitlines()[0]
    row["second_us"] = time_us([lambda item=item: run_op(item, plan) for item in sets], device)
    row["tflops"] = shape.flops / row["us"] / 1e6
    row["fraction_of_gemm"] = row["tflops"] / rate
    best = min((row[key] for key in ("cudnn_us", "fa2_us", "sdpa_us") if key in row), default=None)
    if best is not None:
        row["best_peer_over_op"] = best / row["us"]
    row["input_sets"] = len(sets)
    return row


def measure_scoring(shape: Shape, device: torch.device, rate: float) -> dict[str, Any]:
    """Check, then time the op; where it cuts tiles into parts, also on whole tiles."""
    sets = make_sets(shape, device)
    plan = make_plan(sets[0])
    row: dict[str, Any] = {"name": shape.name, "variant": plan.config.variant, "flops": shape.flops}
    row["relative_error"] = checked("op", sets[0], run_op(sets[0], plan))
    row["us"] = time_us([lambda item=item: run_op(item, plan) for item in sets], device)
    if plan.num_part_rows:
        run = make_variant(sets[0])
        row["parts"] = len(plan.tiles)
        row["whole_us"] = time_us([lambda item=item: run(item) for item in sets], device)
    row["tflops"] = shape.flops / row["us"] / 1e6
    row["fraction_of_gemm"] = row["tflops"] / rate
    row["fraction_of_790"] = row["tflops"] / 790
    if shape.peer_us is not None:
        row |= {"peer_us": shape.peer_us, "best_peer_over_op": shape.peer_us / row["us"]}
    row["input_sets"] = len(sets)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Over all shapes with a peer."""
    ratios = [row["best_peer_over_op"] for row in rows if "peer_us" in row]
    if not ratios:
        return {}
    mean = round(statistics.geometric_mean(ratios), 4)
    least = min(ratios)
    return {"shapes_with_peer": len(ratios), "geometric_mean_ratio": mean, "least_ratio": least}


def report(row: dict[str, Any]) -> None:
    times = [f"{key[:-3]} {row[key]:.1f}" for key in row if key.endswith("_us")]
    errors = [f"{key[:-6]}: {row[key]}" for key in row if key.endswith("_error") and key[0] != "r"]
    print(
        f"{row['name']:<36}{row['variant']:>7}{row['us']:>10.1f} us{row['tflops']:>7.0f} TFLOP/s"
        f"{row['fraction_of_gemm']:>7.1%}{row.get('best_peer_over_op', 0.0):>6.2f}x  "
        + ", ".join(times + errors),
        flush=True,
    )


def sweep(shape: Shape, device: torch.device, rate: float) -> Iterator[dict[str, Any]]:
    """The Triton kernel in all tiles that this device takes."""
    too_large = import_module("triton.runtime.errors").OutOfResources
    sets = make_sets(shape, device)
    for tile in SWEEP:
        names = ("block_m", "block_n", "num_warps", "num_stages")
        row: dict[str, Any] = {"name": shape.name, "variant": str(tile).replace(" ", "")}
        try:
            run = make_variant(sets[0], variant="triton", **dict(zip(names, tile, strict=True)))
            checked(str(tile), sets[0], run(sets[0]))
            row["us"] = time_us([lambda item=item, run=run: run(item) for item in sets], device)
        except too_large as error:
            print(f"{shape.name} {tile}: {str(error).splitlines()[0]}", flush=True)
            continue
        row["tflops"] = shape.flops / row["us"] / 1e6
        row["fraction_of_gemm"] = row["tflops"] / rate
        yield row


def measure_suite(suite: str, device: torch.device, rate: float) -> Iterator[dict[str, Any]]:
    if suite == "sweep":
        for shape in SWEEP_SHAPES:
            yield from sweep(shape, device, rate)
        return
    once = measure_scoring if suite == "scoring" else measure
    for shape in SCORING_SHAPES if suite == "scoring" else SHAPES[device.type]:
        yield once(shape, device, rate)


def main() -> None:
    """Measure from the command line."""
    parser: argparse.ArgumentParser = parse(__doc__ or "")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--suite", choices=("prompts", "scoring", "sweep"), default="prompts")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    rate, rows = gemm_tflops(device), []
    print(f"bf16 GEMM {rate:.0f} TFLOP/s", flush=True)
    for row in measure_suite(arguments.suite, device, rate):
        report(row)
        rows.append({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()})
        # After each row: a wrong result ends the run, and earlier rows are kept.
        over_all = {"name": "all shapes", "gemm_tflops": round(rate, 1), **summary(rows)}
        save(arguments.out, environment(device), [over_all, *rows])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(summary(rows), flush=True)


if __name__ == "__main__":
    main()
