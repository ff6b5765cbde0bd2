"""`tiercel doctor`: what this machine offers and what is installed, for users and bug reports."""

from __future__ import annotations

import importlib.metadata
import json as json_module
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from tiercel import env
from tiercel.cli.options import CommonOptions
from tiercel.cli.terminal import one_line, write
from tiercel.config import MAX_RANKS
from tiercel.errors import ArgumentError
from tiercel.kernels.native.library import describe_library, variants
from tiercel.machine import read_memory, usable_cpus
from tiercel.version import __version__

_GROUP = Group("Report", sort_key=1)
_NVIDIA_SMI_TIMEOUT_S = 20.0
_PACKAGES = ("torch", "triton", "numpy", "tokenizers", "jinja2", "msgspec")
_CPU_FLAGS = ("avx2", "f16c", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd")


def doctor(
    *,
    json: Annotated[bool, Parameter(group=_GROUP, help="Write one JSON object.")] = False,
    common: CommonOptions = CommonOptions(),  # noqa: B008, ARG001 - every command takes them
) -> int:
    """Report GPU, driver, PyTorch, memory, cache, compiled kernels and versions."""
    report = {
        "tiercel": __version__,
        "system": _system(),
        "packages": {name: _version_of(name) for name in _PACKAGES},
        "torch": _torch(),
        "driver": _driver(),
        "native_library": _native_library(),
        "fused_kernels": _fused_kernels(),
        "several_gpus": _several_gpus(),
        "cache": _cache(),
    }
    if json:
        write(json_module.dumps(report, indent=2) + "\n")
    else:
        write(f"tiercel {report['tiercel']}\n")
        for title in tuple(report)[1:]:
            write(f"\n{title.replace('_', ' ')}\n")
            for key, value in report[title].items():  # type: ignore[attr-defined]
                write(f"  {key:<20} {_text(value)}\n")
    return 1 if "error" in report["torch"] else 0


def _system() -> dict[str, Any]:
    memory = read_memory()
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpus": usable_cpus(),
        "cpu_features": _cpu_features(),
        "memory_bytes": None if memory is None else memory.total,
        "memory_free_bytes": None if memory is None else memory.available,
        "memory_limit_bytes": None if memory is None else memory.limit,
    }


def _cpu_features() -> list[str]:
    """The instruction sets that PyTorch's kernels use, by their Linux names."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = (line for line in text.splitlines() if line.lower().startswith(("flags", "features")))
    flags = set(next(lines, "").split())
    return [flag for flag in _CPU_FLAGS if flag in flags]


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    """PyTorch as it actually loads, and the GPUs that it sees."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that torch needs is missing
        return {"error": one_line(f"PyTorch does not load: {error}")}
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": [],
    }
    for index in range(torch.cuda.device_count()):
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            facts["gpus"].append({"index": index, "error": one_line(str(error))})
            continue
        major, minor = torch.cuda.get_device_capability(index)
        facts["gpus"].append(
            {
                "index": index,
                "name": torch.cuda.get_device_name(index),
                "capability": f"{major}.{minor}",
                "memory_free_bytes": free,
                "memory_bytes": total,
            }
        )
    return facts


def _driver() -> dict[str, Any]:
    """Output of nvidia-smi, which works where PyTorch has no CUDA."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return {"nvidia_smi": None}
    try:
        result = subprocess.run(
            [path, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=True,
            env=env.child_environment(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia_smi": path, "error": one_line(str(error))}
    return {"nvidia_smi": path, "gpus": [one_line(line) for line in result.stdout.splitlines()]}


def _native_library() -> dict[str, Any]:
    """The library for CPUs: the variant that is used, or why there is none."""
    try:
        outcome = describe_library(usable_cpus())
    except ArgumentError as error:
        outcome = f"not used: {error} {error.hint}"
    return {"library": outcome, "variants": list(variants())}


def _fused_kernels() -> dict[str, str]:
    """Of each fused kernel, whether the first GPU here can run it, or why not."""
    try:
        import torch

        from tiercel.models.fused_paths import FUSED_PATHS, switched_off
        from tiercel.ops.fused_layer_tail import refuse_device
    except (ImportError, OSError):
        return {"error": "PyTorch does not load"}
    refusals = switched_off()
    if not torch.cuda.is_available():
        return dict.fromkeys(FUSED_PATHS, "no GPU")
    try:
        device = refuse_device(torch.device("cuda", 0))
    except RuntimeError as error:
        return {"error": one_line(str(error))}
    reasons = {name: device or refusals.get(name) for name in FUSED_PATHS}
    return {name: "can run" if no is None else no.reason for name, no in reasons.items()}


def _several_gpus() -> dict[str, Any]:
    """How many GPUs can compute one model, and by what they speak."""
    try:
        import torch
        from torch import distributed as dist
    except (ImportError, OSError):
        return {"error": "PyTorch does not load"}
    count = torch.cuda.device_count()
    largest = min(MAX_RANKS, 1 << (count.bit_length() - 1)) if count else 1
    has_nccl = dist.is_available() and dist.is_nccl_available()
    facts: dict[str, Any] = {"largest_tensor_parallel_size": largest if has_nccl else 1}
    if has_nccl and count:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if count > 1:
        facts["peer_access"] = all(
            torch.cuda.can_device_access_peer(0, other) for other in range(1, count)
        )
    return facts


def _cache() -> dict[str, Any]:
    from tiercel.loader import hub, store

    folder = env.cache_dir().absolute()
    existing = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    models = {
        entry.name: store.is_present(folder / "models" / entry.file_name, entry.content)
        for entry in hub.CATALOGUE
    }
    return {
        "folder": str(folder),
        "exists": folder.is_dir(),
        "writable": os.access(existing, os.W_OK),
        "free_bytes": shutil.disk_usage(existing).free if existing.exists() else None,
        "models": [name for name, is_here in models.items() if is_here],
        "compiled_kernels": len(list((folder / "cubins").glob("*.cubin"))),
        "is_offline": env.is_offline(),
    }


def _text(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_text(entry) for entry in value)
    if isinstance(value, dict):
        return " ".join(f"{key}={_text(entry)}" for key, entry in value.items())
    if isinstance(value, int) and value > 1_000_000:
        return f"{value / 1e9:.1f} GB"
    return one_line(str(value))
