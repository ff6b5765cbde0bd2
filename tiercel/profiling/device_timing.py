"""How calls are timed on a device, and what the device reaches at best.

On a GPU a CUDA graph holds the calls, so the host's cost of launching stays out and the gap between
graph nodes stays in, as in a decode step. On a CPU calls are timed one by one.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tiercel.ops.linear import linear, prepare_linear
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType

LEAST_SAMPLES, MOST_SAMPLES = 7, 200
CEILING_SAMPLES = 20
READ_BYTES = 128 << 20
LEAST_READ_BYTES, MOST_READ_BYTES = 8 << 20, 512 << 20
# Of square products on a CPU: a larger one while a call is so short that threads wait much of it.
CPU_SIZES = (512, 1024, 2048, 4096)
ENOUGH_US = 20_000
CPU_SECONDS = 0.3  # of each; the fastest call counts, slower ones shared the machine
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device reached: reading in GB/s, products in TFLOP/s, both decimal."""

    read_gbps: float
    tflops: float


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, read_bytes: int = READ_BYTES
) -> Ceilings:
    """Measure reading from memory and the products of a model with activations of a dtype.

    Args:
        device: to measure.
        dtype: of the activations.
        read_bytes: that a step reads: on a CPU caches help a small model, and this as much.
    """
    read = read_gbps(device, read_bytes)
    if device.type == "cuda":
        return Ceilings(read, matrix_tflops(dtype, device))
    return Ceilings(read, max(_fastest_tflops(product) for product in _cpu_products(dtype)))


def read_gbps(device: torch.device, num_bytes: int = READ_BYTES) -> float:
    """The rate of summing 64-bit integers from memory.

    Args:
        device: to measure.
        num_bytes: to sum on a CPU, within bounds; a GPU reads as much as there is room for.
    """
    if device.type == "cuda":  # beside a model, which may have left little
        num_bytes = min(4 << 30, torch.cuda.mem_get_info(device)[0] // 16 * 8)
    else:
        num_bytes = min(MOST_READ_BYTES, max(LEAST_READ_BYTES, num_bytes)) // 8 * 8
    words = torch.randint(-(2**40), 2**40, (num_bytes // 8,), device=device)
    total = torch.empty((), dtype=torch.int64, device=device)
    run = lambda: torch.sum(words, dim=0, out=total)  # noqa: E731
    if device.type == "cpu":
        return num_bytes / _fastest_us(run) / 1e3
    return num_bytes / statistics.median(calls_us([run], device, CEILING_SAMPLES)) / 1e3


def _cpu_products(dtype: torch.dtype) -> Iterator[Callable[[int], Call]]:
    """What a model may multiply with: each makes a square product of a size.

    Its dense matrices, in 16 bits widened where that is faster, and 4-bit ones in the form in which
    they rest. Without instructions for bfloat16 its dense product is the slowest by far: 0.0003
    TFLOP/s, float32 0.013, 4 bits 0.026 (2 cores with AVX2, torch 2.13).
    """
    for kind in {dtype: None, torch.float32: None}:
        yield partial(_dense_product, kind)
    yield partial(_packed_product, dtype)


def _dense_product(dtype: torch.dtype, size: int) -> Call:
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def _packed_product(dtype: torch.dtype, size: int) -> Call:
    qtype = QuantType.Q4_0
    blocks = torch.randint(0, 256, (size, size // qtype.block_weights, qtype.block_bytes))
    blocks[..., 0], blocks[..., 1] = 0, 0x3C  # the scale: 1 as float16
    data = {"data": blocks.to(torch.uint8).flatten(1)}
    weight = QuantTensor(qtype, Layout.FILE, (size, size), data)
    x: Tensor = torch.randn(size, size).to(dtype)
    return partial(linear, x, prepare_linear([weight], dtype, torch.device("cpu")))


def _fastest_tflops(make: Callable[[int], Call]) -> float:
    best = 0.0
    for size in CPU_SIZES:
        us = _fastest_us(make(size))
        best = max(best, 2 * size**3 / us / 1e6)
        if us >= ENOUGH_US:
            break
    return best


def _fastest_us(call: Call) -> float:
    """Microseconds of the fastest of some calls on a CPU."""
    best, ends_s = math.inf, time.perf_counter() + CPU_SECONDS
    while True:
        best = min(best, _once_us(call, torch.device("cpu")))
        if time.perf_counter() >= ends_s:
            return best


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
