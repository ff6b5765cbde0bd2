"""Origin of the figures: the command, the versions, the machine. Free of PyTorch."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tiercel import env
from tiercel.kernels.native.library import describe_library
from tiercel.machine import usable_cpus
from tiercel.version import __version__

_SECRET_OPTIONS: Final = ("--api-key",)
_NVIDIA_SMI_TIMEOUT_S: Final = 20.0


def command_line(arguments: Sequence[str]) -> str:
    """The command that runs this process, without the folders of paths and without secrets.

    Args:
        arguments: `sys.argv`, or a replacement.
    """
    spec = sys.modules["__main__"].__spec__
    if spec is None or spec.name == "__main__":
        name = Path(arguments[0]).name
        program = ["python", name] if name.endswith(".py") else [name]
    else:
        program = ["python", "-m", spec.name.removesuffix(".__main__")]
    shown = []
    is_secret = False
    for text in arguments[1:]:
        name, equals, _ = text.partition("=")
        if is_secret:
            text = "..."
        elif name in _SECRET_OPTIONS and equals:
            text = f"{name}=..."
        is_secret = text in _SECRET_OPTIONS
        shown.append(Path(text).name if Path(text).is_absolute() else text)
    return shlex.join([*program, *shown])


def cpu_name() -> str:
    """The processor's model name."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def utc_now() -> str:
    """The wall clock, only for printing."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def versions(*packages: str) -> dict[str, str]:
    """Versions of Tiercel, Python and packages; a missing package is left out."""
    found = {package: installed_version(package) for package in packages}
    present = {package: version for package, version in found.items() if version is not None}
    return {"python": platform.python_version(), "tiercel": __version__, **present}


def hardware() -> dict[str, str]:
    """Processor, cores and GPUs of this machine."""
    facts = {"cpu": cpu_name(), "cores": str(usable_cpus())}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query,
            capture_output=True,
            text=True,
            check=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            env=env.child_environment(),
        )
    except (OSError, subprocess.SubprocessError):  # no driver
        return facts | {"native_library": describe_library(usable_cpus())}
    return facts | {"gpu": "; ".join(answer.stdout.split("\n")).strip("; ")}


def machine_name(hardware: Mapping[str, str]) -> str:
    """The machine in a few words: the GPU, or the processor and its cores.

    hardware: from `hardware`.
    """
    cores = f"{hardware.get('cpu', '?')}, {hardware.get('cores', '?')} cores"
    return hardware.get("gpu") or cores
