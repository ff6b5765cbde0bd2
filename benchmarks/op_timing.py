"""Timing of one op against its physical floor and a peer; the op's own file lists the cases.

- Correctness first: a case whose result is wrong is not timed.
- Cold caches: enough distinct inputs, visited in turn, that their bytes exceed the last-level cache
  several times. Weights and caches of a real step are cold too.
- On a GPU one CUDA graph contains a call per input, so the host's launch cost is excluded and the
  gap between graph nodes is included, as in a decode step; an empty node is also measured. On a CPU
  calls are timed one by one.
- The op is timed twice, before and after its peer: a difference below that spread is noise. Inputs
  at other addresses also give other times: ``--repeats`` shows by how much.
- Floor: the larger of bytes / measured bandwidth and flops / measured matrix rate, of this device
  in this process.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Timing, copy_gbps, environment
from benchmarks.figures import save
from tiercel.profiling.device_timing import (
    cache_bytes,
    graph_us,
    matrix_tflops,
    read_gbps,
    times_us,
)

MAX_SETS = {"cuda": 512, "cpu": 64}
LEAST_CALLS = 20  # of a graph, so that its start has no effect
SECONDS = 1.0  # of one measurement, about


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        name: shape in words.
        make: function from a seed to fresh inputs on the device; random, never zeros.
        run: function from inputs to result; safe to capture on a GPU.
        check: function from inputs to the relative error of `run` against the oracle.
        tolerance: largest allowed result of `check`.
        num_bytes: least bytes that must move: each input read once, each result written once.
        flops: operations; multiply-adds count two; 0 leaves bytes as the only floor.
        dtype: dtype whose matrix rate bounds the flops.
        peer: function from inputs to result, another way to do the same.
        peer_name: name of the peer.
        peer_us: for a peer that cannot run here, its time on the hardware in `peer_name`.
        max_sets: most inputs, where they are much larger than the bytes that a call reads.
    """

    name: str
    make: Callable[[int], Any]
    run: Callable[[Any], object]
    check: Callable[[Any], float]
    tolerance: float
    num_bytes: int
    flops: int = 0
    dtype: torch.dtype = torch.bfloat16
    peer: Callable[[Any], object] | None = None
    peer_name: str = ""
    peer_us: float | None = None
    max_sets: int = 512


@dataclass(frozen=True)
class Ceilings:
    """Rates that this device reached in this process, in decimal GB/s and TFLOP/s."""

    read_gbps: float
    copy_gbps: float
    tflops: dict[str, float]
    empty_node_us: float

    def row(self) -> dict[str, Any]:
        """The ceilings as a row of a result file."""
        rates = {f"{name.removeprefix('torch.')}_tflops": x for name, x in self.tflops.items()}
        fields = {name: value for name, value in asdict(self).items() if name != "tflops"}
        return {"name": "ceilings of the device", **fields, **rates}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in float64; NaN stays NaN."""
    expected = expected.double()
    return ((actual.double().to(expected.device) - expected).norm() / expected.norm()).item()


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure reading, copying, matrix products and, on a GPU, an empty graph node."""
    tflops = {str(dtype): matrix_tflops(dtype, device) for dtype in (torch.bfloat16, torch.float32)}
    node_us = 0.0
    if device.type == "cuda":
        tiny = torch.zeros(1, device=device)
        node_us = statistics.median(graph_us([lambda: tiny.add_(1)] * 200, SECONDS))
    return Ceilings(read_gbps(device), copy_gbps(device), tflops, node_us)


def time_inputs(
    run: Callable[[Any], object],
    inputs: list[Any],
    device: torch.device,
    seconds: float = SECONDS,
    least_calls: int = LEAST_CALLS,
) -> Timing:
    """Time calls of `run` on all inputs in turn, as described above, for about `seconds`."""
    calls = [lambda item=item: run(item) for item in inputs]
    if device.type == "cuda":
        calls = calls * max(1, least_calls // len(calls))
    samples = times_us(calls, device, seconds)
    p10, p90 = samples[len(samples) // 10], samples[-1 - len(samples) // 10]
    return Timing(statistics.median(samples), p10, p90, len(samples))


def num_sets(case: Case, device: torch.device) -> int:
    """The number of distinct inputs that keep the caches cold."""
    wanted = -(-4 * cache_bytes(device) // max(1, case.num_bytes))
    return min(case.max_sets, MAX_SETS[device.type], max(2, wanted))


def measure_case(
    case: Case, device: torch.device, ceilings: Ceilings, seconds: float = SECONDS
) -> dict[str, Any]:
    """Check, then time one case, for about `seconds` a measurement.

    Raises:
        SystemExit: the result is wrong.
    """
    error = case.check(case.make(12345))
    if not error <= case.tolerance:  # written so that NaN fails
        raise SystemExit(f"{case.name}: error {error:.2e} exceeds {case.tolerance:.0e}; not timed")
    inputs = [case.make(seed) for seed in range(num_sets(case, device))]
    timing = time_inputs(case.run, inputs, device, seconds)
    row: dict[str, Any] = {"name": case.name, "relative_error": error, **asdict(timing)}
    if case.peer is not None:
        peer = time_inputs(case.peer, inputs, device, seconds)
        row |= {"peer": case.peer_name, "peer_us": peer.median_us}
        row["peer_over_op"] = peer.median_us / timing.median_us
    elif case.peer_us is not None:
        row |= {"peer": case.peer_name, "peer_us": case.peer_us}
        row["peer_over_op"] = case.peer_us / timing.median_us
    row["second_median_us"] = time_inputs(case.run, inputs, device, seconds).median_us
    memory_us = case.num_bytes / max(ceilings.read_gbps, ceilings.copy_gbps) / 1e3
    compute_us = case.flops / ceilings.tflops[str(case.dtype)] / 1e6 if case.flops else 0.0
    floor = max(memory_us, compute_us)
    row |= {
        "input_sets": len(inputs),
        "bytes": case.num_bytes,
        "flops": case.flops,
        "bound": "memory" if memory_us >= compute_us else "compute",
        "floor_us": floor,
        "fraction_of_floor": floor / timing.median_us,
        "gbps": case.num_bytes / timing.median_us / 1e3,
        "tflops": case.flops / timing.median_us / 1e6,
    }
    return {key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}


def measure_repeatedly(
    case: Case, device: torch.device, ceilings: Ceilings, seconds: float, repeats: int
) -> dict[str, Any]:
    """The median of `repeats` measurements, each with new inputs, and all medians."""
    rows = []
    for _ in range(repeats):
        rows.append(measure_case(case, device, ceilings, seconds))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    medians = [row["median_us"] for row in rows]
    row = sorted(rows, key=lambda row: row["median_us"])[(repeats - 1) // 2]
    return row | ({"medians_us": medians} if repeats > 1 else {})


def bench(
    cases: Iterable[Case],
    device: torch.device,
    ceilings: Ceilings,
    seconds: float = SECONDS,
    out: Path | None = None,
    repeats: int = 1,
) -> list[dict[str, Any]]:
    """Time all cases, print a line each, and return all rows; `out` gets the rows so far."""
    head, rows = environment(device), [ceilings.row()]
    for case in cases:
        row = measure_repeatedly(case, device, ceilings, seconds, repeats)
        rows.append(row)
        print(
            f"{row['name']:<44}{row['median_us']:>10.2f} us{row['floor_us']:>10.2f} floor"
            f"{row['fraction_of_floor']:>8.1%}{row.get('peer_over_op', 0.0):>8.2f}x peer",
            flush=True,
        )
        save(out, head, rows)
    return rows


def parse(doc: str) -> argparse.ArgumentParser:
    """The options of all op benchmarks."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--threads", type=int, help="threads of a CPU; PyTorch's choice without it")
    return parser


def parse_cases(doc: str, seconds: float = SECONDS) -> argparse.ArgumentParser:
    """The options of all op benchmarks, and those of `bench_chosen`."""
    parser = parse(doc)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--seconds", type=float, default=seconds, help="of a measurement, about")
    parser.add_argument("--only", default="", help="cases whose names contain this text")
    parser.add_argument("--repeats", type=int, default=1, help="runs of a case, with new inputs")
    return parser


def bench_chosen(
    arguments: argparse.Namespace,
    cases: Iterable[Case],
    device: torch.device,
    ceilings: Ceilings | None = None,
) -> list[dict[str, Any]]:
    """Time the cases that the options of `parse_cases` select."""
    if arguments.repeats < 1:
        raise SystemExit(f"error: --repeats is {arguments.repeats}; it must be at least 1.")
    chosen = [case for case in cases if arguments.only in case.name]
    if not chosen:
        raise SystemExit(f"error: --only {arguments.only!r} is in no case's name.")
    ceilings = ceilings or measure_ceilings(device)
    return bench(chosen, device, ceilings, arguments.seconds, arguments.out, arguments.repeats)


def main(doc: str, cases: Callable[[torch.device], Iterable[Case]]) -> None:
    """Run one op's benchmark from the command line."""
    arguments = parse_cases(doc).parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    bench_chosen(arguments, cases(device), device)
