"""How calls are timed on a device, and what the device reaches at best.

On a GPU a CUDA graph holds the calls, so the host's cost of launching stays out and the gap between
graph nodes stays in, as in a decode step. On a CPU calls are timed one by one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

LEAST_SAMPLES, MOST_SAMPLES = 7, 200
CEILING_SAMPLES = 20
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device reached: reading in GB/s, products in TFLOP/s, both decimal."""

    read_gbps: float
    tflops: float


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure reading from memory and matrix products of a dtype."""
    return Ceilings(read_gbps(device), matrix_tflops(dtype, device))


def read_gbps(device: torch.device) -> float:
    """The rate of summing 64-bit integers from memory."""
    num_bytes = 128 << 20
    if device.type == "cuda":  # beside a model, which may have left little
        num_bytes = min(4 << 30, torch.cuda.mem_get_info(device)[0] // 16 * 8)
    words = torch.randint(-(2**40), 2**40, (num_bytes // 8,), device=device)
    total = torch.empty((), dtype=torch.int64, device=device)
    run = lambda: torch.sum(words, dim=0, out=total)  # noqa: E731
    return num_bytes / statistics.median(calls_us([run], device, CEILING_SAMPLES)) / 1e3


def matrix_tflops(dtype: torch.dtype, device: torch.device) -> float:
    """The rate of a square product of random matrices."""
    size = 1024
    if device.type == "cuda":
        size = 4096 if dtype == torch.float32 else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    run = lambda: torch.mm(a, b, out=out)  # noqa: E731
    return 2 * size**3 / statistics.median(calls_us([run], device, CEILING_SAMPLES)) / 1e6


def cache_bytes(device: torch.device) -> int:
    """The last-level cache; 32 MiB where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(path.read_text().strip()[:-1]) << 10 for path in sizes), default=32 << 20)


def calls_us(calls: Sequence[Call], device: torch.device, samples: int) -> list[float]:
    """Sorted microseconds of single calls, each launched by the host, in turn.

    Args:
        calls: to time; up to two of them warm up.
        device: where they run: events on a GPU, the wall clock on a CPU.
        samples: how many.
    """
    for call in itertools.islice(itertools.cycle(calls), 2):
        call()
    turn = itertools.islice(itertools.cycle(calls), samples)
    return sorted(_once_us(call, device) for call in turn)


def _once_us(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        elapsed: float = start.elapsed_time(end)
        return 1000.0 * elapsed
    began = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - began)


def graph_us(calls: Sequence[Call], seconds: float) -> list[float]:
    """Sorted microseconds per call of a CUDA graph that makes `calls`, over many replays.

    Args:
        calls: to time; two of them warm up before the capture.
        seconds: of measuring, about.
    """
    for call in calls[:2]:
        call()  # compile and load before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    device = torch.device("cuda")
    first = calls_us([graph.replay], device, LEAST_SAMPLES)
    count = _samples(first, seconds, MOST_SAMPLES)
    return [us / len(calls) for us in calls_us([graph.replay], device, count)]


def _samples(first: Sequence[float], seconds: float, most: int) -> int:
    """How many more fit into `seconds`."""
    return min(most, max(LEAST_SAMPLES, int(1e6 * seconds / statistics.median(first))))


def times_us(calls: Sequence[Call], device: torch.device, seconds: float) -> list[float]:
    """Sorted microseconds per call, in turn, in about `seconds`: in a graph on a GPU."""
    if device.type == "cuda":
        return graph_us(calls, seconds)
    first = calls_us(calls, device, LEAST_SAMPLES)
    return calls_us(calls, device, _samples(first, seconds, 10 * MOST_SAMPLES))
