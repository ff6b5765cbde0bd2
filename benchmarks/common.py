"""What every benchmark shares: environment, medians of timings, bandwidth, JSON results."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiercel.bench.environment import command_line, cpu_name, installed_version, utc_now
from tiercel.engine.device_timing import calls_us


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median, and the 10th and 90th percentile, of `samples` runs."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int


def environment(device: torch.device) -> dict[str, Any]:
    """Where figures come from: command, revision, versions, hardware."""
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    info: dict[str, Any] = {
        "command": command_line(sys.argv),
        "utc": utc_now(),
        "revision": revision.stdout.strip() or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "tiercel": installed_version("tiercel"),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        info["gpu"] = properties.name
        info["multiprocessors"] = properties.multi_processor_count
        info["l2_bytes"] = properties.L2_cache_size
        info["cuda"] = torch.version.cuda
    else:
        info["cpu"] = cpu_name()
        info["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        info["cores"] = os.cpu_count()
        info["threads"] = torch.get_num_threads()
    return info


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


def save(path: Path | None, report: dict[str, Any]) -> None:
    """Write a report as JSON; nothing happens without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")
