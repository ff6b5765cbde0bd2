"""Candidates of split attention beside today's, checked and timed: where its constants come from.

    python -m benchmarks.split_attention_variants --out results/split_attention_variants.json

A candidate is macros and constants of kernels/split_attention.py. All but those of `OTHER_BITS`
must have today's bits, with sums in either kernel and in shares of any size. Each shape is timed by
all candidates in turn, twice, so that the card drifts for all alike. The floor is the bytes moved
once over the read rate measured in the same run. About 30 s, compilation included.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, save
from benchmarks.op_timing import Ceilings, relative_error
from benchmarks.paged_attention import Inputs, Shape, make_case, make_inputs
from tiercel.engine.device_timing import graph_us, read_gbps
from tiercel.errors import InternalError
from tiercel.kernels import rtc
from tiercel.kernels import split_attention as kernel
from tiercel.ops.paged_attention import paged_attention

SCALE = 0.1
CACHE_BYTES = 250 << 20  # of distinct inputs: several times the last-level cache
TOLERANCE = 7e-3


@dataclass(frozen=True)
class Candidate:
    """Attributes of the kernel's module; `head_dims` and `most_tiles` of rows: where it differs."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    head_dims: tuple[int, ...] = (64, 128, 256)
    most_tiles: int = 1 << 30

    def serves(self, shape: Shape) -> bool:
        tiles = shape.reqs * shape.kv_heads
        return shape.head_dim in self.head_dims and tiles <= self.most_tiles


def macros(**values: int) -> dict[str, Any]:
    return {"VARIANT": tuple(values.items())}


LEAN = {"LEAN_FETCH": 1, "LEAN_STEPS": 1, "LEAN_ADDRESSES": 1}
SHARED = {"EARLY_SUMS": 1, "SCATTERS": 1, "STORES_MATRICES": 1}
CANDIDATES = [
    Candidate("today"),
    Candidate("lean fetch", macros(LEAN_FETCH=1)),
    Candidate("lean fetch, steps, addresses", macros(**LEAN)),
    Candidate("early sums", macros(EARLY_SUMS=1)),
    Candidate("scattered reductions", macros(SCATTERS=1)),
    Candidate("weights by stmatrix", macros(STORES_MATRICES=1)),
    Candidate("all of these", macros(**LEAN, **SHARED)),
    Candidate("all, late fetch", macros(**LEAN, **SHARED, LATE_FETCH=1)),
    Candidate("all, two chains of values", macros(**LEAN, **SHARED, VALUE_CHAINS=2), (64,)),
    Candidate("units by heads", {"MOST_HEADS_INSIDE": 0}, most_tiles=kernel.MOST_HEADS_INSIDE),
]
OTHER_BITS = ("all, two chains of values",)

SHAPES = [
    Shape(64, 1, 512, heads=32, kv_heads=8, head_dim=64),
    Shape(64, 1, 2048, heads=14, kv_heads=2, head_dim=64),
    Shape(64, 5, 600),
    Shape(8, 5, 8192),
    Shape(16, 1, 600),
    Shape(64, 1, 600),
    Shape(1, 1, 16384),
    Shape(128, 1, 128),
    Shape(32, 1, 512),
    Shape(64, 1, 2048, heads=4, kv_heads=1, head_dim=256),
    # Few rows of other heads, whose order of units was never measured.
    Shape(1, 1, 4096, heads=14, kv_heads=2, head_dim=64),
    Shape(4, 1, 600, heads=32, kv_heads=8, head_dim=64),
    Shape(2, 1, 4096, heads=8, kv_heads=4, head_dim=256),
    Shape(1, 16, 8192),
]


@contextmanager
def chosen(candidate: Candidate) -> Iterator[None]:
    """The kernel's module with a candidate's constants."""
    before = {name: getattr(kernel, name) for name in candidate.values}
    try:
        for name, value in candidate.values.items():
            setattr(kernel, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(kernel, name, value)


def candidates(shape: Shape) -> list[Candidate]:
    """Those that make sense for a shape."""
    return [candidate for candidate in CANDIDATES if candidate.serves(shape)]


def run(inputs: Inputs) -> Tensor:
    return paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, SCALE)


def compile_all(device: torch.device) -> None:
    """All that will be launched, side by side; what fails here fails again where it is timed."""
    sources: list[rtc.KernelSource] = []
    load, launch = rtc.load_kernel, rtc.launch
    rtc.load_kernel = lambda source, *_: sources.append(source)  # type: ignore[assignment]
    rtc.launch = lambda *_, **__: None  # type: ignore[assignment]
    for shape in (*SHAPES, *CHECKED):
        inputs = make_inputs(shape, 0, device)
        for candidate in candidates(shape):
            with chosen(candidate):
                run(inputs)
                if shape in CHECKED:
                    run_in_shares(inputs, 264, folds=True)
                    run_in_shares(inputs, 264, folds=False)
    rtc.load_kernel, rtc.launch = load, launch
    try:
        rtc.fill_cache(sources, rtc.device_arch(device))
    except InternalError as failure:
        print(failure, flush=True)


def run_in_shares(inputs: Inputs, shares: int, *, folds: bool) -> Tensor:
    """With poisoned workspaces."""
    q, batch = inputs.q, inputs.batch
    (tokens, heads, head_dim), kv_heads = q.shape, inputs.k_cache.shape[2]
    slots = kernel.num_splits(batch.max_seq_len, batch.max_query_len, 0)
    rows = batch.max_query_len * heads // kv_heads
    config = kernel.select_split_attention(head_dim, rows, rtc.max_smem_bytes(q.device))
    partials = q.new_full((tokens * heads, slots, head_dim), float("nan"), dtype=torch.float32)
    stats = partials.new_full((tokens * heads, slots, 2), float("nan"))
    out = q.new_full((tokens, heads * head_dim), float("nan"))
    kernel.launch_split_attention(
        q,
        inputs.k_cache,
        inputs.v_cache,
        batch.block_tables[0],
        batch.rows,
        batch.cu_seqlens_q,
        batch.seq_lens,
        partials,
        stats,
        out,
        SCALE,
        0,
        batch.max_query_len,
        config,
        shares=shares,
        folds=folds,
    )
    return out


SHARES = (1, 2, 5, 12, 31, 100, 132, 263, 264, 500)
CHECKED = [
    Shape(5, 1, 4500),
    Shape(7, 3, 700),
    Shape(7, 5, 700),
    Shape(3, 8, 900),
    Shape(9, 1, 300, heads=14, kv_heads=2, head_dim=64),
    Shape(5, 3, 2700, heads=14, kv_heads=2, head_dim=64),
    Shape(3, 1, 1500, heads=4, kv_heads=1, head_dim=256),
]


def check(device: torch.device) -> dict[str, Any]:
    """Ragged lengths in shares of all sizes: errors and differences by candidate and shape."""
    report: dict[str, Any] = {}
    for shape in CHECKED:
        inputs = make_inputs(shape, 1, device)
        cuts = torch.randint(0, shape.context - 8, (shape.reqs,), generator=torch.manual_seed(3))
        inputs.batch.seq_lens.sub_(cuts.to(inputs.batch.seq_lens))
        today = run_in_shares(inputs, 264, folds=True)
        for candidate in candidates(shape):
            found = report.setdefault(candidate.name, {})
            try:
                with chosen(candidate):
                    first = run_in_shares(inputs, 264, folds=True)
                    differing = sum(
                        not torch.equal(first, run_in_shares(inputs, shares, folds=folds))
                        for shares, folds in itertools.product(SHARES, (False, True))
                    )
                found[shape.name] = {
                    "error_to_today": relative_error(first, today),
                    "has_the_bits_of_today": torch.equal(first, today),
                    "shares_that_differ": differing,
                }
            except (InternalError, RuntimeError) as failure:
                found[shape.name] = {"failed": repr(failure)[:300]}
    return report


def time_shape(
    shape: Shape, device: torch.device, ceilings: Ceilings, seconds: float
) -> list[dict[str, Any]]:
    """A row for each candidate; one that fails is a row too."""
    num_bytes = make_case(shape, device).num_bytes
    count = min(64, max(2, -(-CACHE_BYTES // num_bytes)))
    inputs = [make_inputs(shape, seed, device) for seed in range(count)]
    floor_us = num_bytes / ceilings.read_gbps / 1e3
    serving = candidates(shape)
    expected = run(inputs[0])
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for _, candidate in itertools.product(range(2), serving):
        if candidate.name in failed:
            continue
        try:
            with chosen(candidate):
                out = run(inputs[0])
                calls = [lambda item=item: run(item) for item in inputs]
                calls = calls * max(1, 20 // len(calls))
                median = statistics.median(graph_us(calls, seconds))
            times.setdefault(candidate.name, []).append(median)
            error = relative_error(out, expected)
            if not error <= TOLERANCE:
                failed[candidate.name] = f"error {error:.2e}"
            elif candidate.name not in OTHER_BITS and not torch.equal(out, expected):
                failed[candidate.name] = f"other bits, error {error:.2e}"
        except (InternalError, RuntimeError) as failure:  # the other candidates count
            failed[candidate.name] = repr(failure)[:300]
    rows: list[dict[str, Any]] = []
    for candidate in serving:
        name = candidate.name
        row: dict[str, Any] = {"shape": shape.name, "candidate": name, "us": times.get(name, [])}
        if name in failed:
            row["failed"] = failed[name]
        elif name in times:
            row["fraction_of_floor"] = floor_us / min(times[name])
            row["to_today"] = min(times[name]) / min(times.get("today", times[name]))
        rows.append(row)
        print(
            f"{shape.name:<34}{name:<34}{'  '.join(f'{us:7.2f}' for us in row['us']):<20}"
            f"{row.get('fraction_of_floor', 0.0):>7.1%}{row.get('to_today', 0.0):>8.3f}"
            f"  {row.get('failed', '')}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file, kept up to date")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a measurement, about")
    parser.add_argument("--most-seconds", type=float, default=36.0, help="of the whole run, about")
    arguments = parser.parse_args()
    start = time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device())
    compile_all(device)
    print(f"compiled after {time.perf_counter() - start:.1f} s", flush=True)
    ceilings = Ceilings(read_gbps(device), 0.0, {"torch.bfloat16": 700.0}, 0.0)
    report: dict[str, Any] = {"environment": environment(device), "ceilings": asdict(ceilings)}
    report["checks"] = check(device)
    for name, shapes in report["checks"].items():
        print(f"{name:<34}{shapes}", flush=True)
    report["results"] = []
    for shape in SHAPES:
        if time.perf_counter() - start > arguments.most_seconds:
            print("out of time", flush=True)
            break
        report["results"] += time_shape(shape, device, ceilings, arguments.seconds)
        torch.cuda.empty_cache()
        save(arguments.out, report)


if __name__ == "__main__":
    main()
