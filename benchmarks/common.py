"""Shared parts of all benchmarks: environment, medians of timings, bandwidth."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.figures import about
from tiercel.bench.environment import command_line, cpu_name, utc_now
from tiercel.profiling.device_timing import calls_us


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median, and the 10th and 90th percentile, of `samples` runs."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int


def environment(device: torch.device) -> dict[str, Any]:
    """Origin of the figures: the head of a result file."""
    hardware: dict[str, str | int | None] = {"device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware["gpu"] = properties.name
        hardware["multiprocessors"] = properties.multi_processor_count
        hardware["l2_bytes"] = properties.L2_cache_size
    else:
        hardware["cpu"] = cpu_name()
        hardware["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        hardware["cores"] = os.cpu_count()
        hardware["threads"] = torch.get_num_threads()
    head = about(command_line(sys.argv), utc_now(), hardware)
    head["versions"]["torch"] = str(torch.__version__)
    if torch.version.cuda is not None:
        head["versions"]["cuda"] = torch.version.cuda
    return head


def time_us(run: Callable[[], object], device: torch.device, samples: int = 20) -> Timing:
    """Time `run` after two warm-up calls: CUDA events on a GPU, the wall clock on a CPU."""
    times = calls_us([run], device, samples)
    p10, p90 = times[samples // 10], times[-1 - samples // 10]
    return Timing(statistics.median(times), p10, p90, samples)


def copy_gbps(device: torch.device) -> float:
    """Measured copy bandwidth in GB/s (decimal), bytes read plus bytes written."""
    num_bytes = (1 << 30) if device.type == "cuda" else (128 << 20)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / time_us(lambda: target.copy_(source), device).median_us / 1e3
