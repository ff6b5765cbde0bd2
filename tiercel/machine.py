"""Memory and processors that this process may use, within the limits of its control groups.

A container is a control group (cgroup) with limits. The kernel kills processes that exceed the
memory limit; at the limit of processor time it stops all threads until the next period. Both are
invisible in what the host reports. Each group from the process's own up to the root may have a
limit; the tightest one counts. Pages of the page cache, such as those of a mapped model file, are
charged to a group but are released under pressure, so they count as free.

Source: "Control Group v2" and "Memory Resource Controller" in the Linux kernel's documentation.
Free of PyTorch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Final

import psutil
from msgspec import Struct

from tiercel.errors import InstallationError

ROOT: Final = Path("/")
_GROUPS: Final = Path("sys/fs/cgroup")
# Where each controller is mounted, below `_GROUPS`: version 2, version 2 with 1, version 1.
_UNIFIED: Final = ("", "unified")
_CPU: Final = ("cpu", "cpu,cpuacct")
_RECLAIMABLE: Final = (
    "inactive_file", "active_file",  # version 2
    "total_inactive_file", "total_active_file",  # version 1, child groups included
)  # fmt: skip


class Memory(Struct, frozen=True):
    """Main memory, in bytes.

    Attributes:
        available: memory that can be allocated without swapping and within every limit.
        total: memory of the machine.
        limit: the tightest limit of a control group if it is below the machine's memory, else None.
    """

    available: int
    total: int
    limit: int | None


def check_platform(platform: str = sys.platform) -> str | None:
    """A warning for the user of a platform other than Linux; None on Linux.

    Args:
        platform: platform name as in `sys.platform`.

    Raises:
        InstallationError: Tiercel does not run on this platform.
    """
    if platform == "linux":
        return None
    if platform == "win32":
        raise InstallationError(
            "Tiercel does not run on Windows itself.", hint="Use WSL 2, where it is Linux."
        )
    name = "macOS" if platform == "darwin" else platform
    return f"Tiercel was not tested on a real {name} machine; it runs on the CPU alone there."


def read_memory(root: Path = ROOT) -> Memory | None:
    """Memory that this process may use; None where the system does not report it.

    Args:
        root: the folder that contains ``proc`` and ``sys``.
    """
    found = _system_memory()
    if found is None:
        return None
    available, total = found
    limit = total
    for folder in _memory_groups(root):
        group_limit, used, reclaimable = _read_group(folder)
        if group_limit is not None:
            limit = min(limit, group_limit)
            available = min(available, group_limit - used + reclaimable)
    return Memory(max(0, available), total, limit if limit < total else None)


def usable_cpus(root: Path = ROOT) -> int:
    """Processors that this process may use: its affinity, and the quotas of its control groups.

    A fraction of a processor counts as a whole one: with one thread less it would be unused.

    Args:
        root: the folder that contains ``proc`` and ``sys``.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # only on Linux
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for folder in _folders(root, "", _UNIFIED):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        count = min(count, _whole_cpus(quota, period, count))
    for folder in _folders(root, "cpu", _CPU):
        quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        count = min(count, _whole_cpus(quota, period, count))
    return count


def _whole_cpus(quota: str, period: str, unlimited: int) -> int:
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return unlimited  # "max", -1, or no such file
    return max(1, ceil(int(quota) / int(period)))


def _system_memory() -> tuple[int, int] | None:
    """Available and total bytes of the machine."""
    try:
        memory = psutil.virtual_memory()
    except (OSError, psutil.Error):  # Linux without /proc
        names = ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
        if not hasattr(os, "sysconf") or not set(names) <= os.sysconf_names.keys():
            return None
        free, total = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in names)
        return free, total
    return memory.available, memory.total


def _memory_groups(root: Path) -> Iterator[Path]:
    yield from _folders(root, "", _UNIFIED)
    yield from _folders(root, "memory", ("memory",))


def _folders(root: Path, controller: str, mounts: tuple[str, ...]) -> Iterator[Path]:
    """Folders of the process's group and its ancestors, for each mount of the controller.

    Inside a container the path of ``/proc/self/cgroup`` may be that of the host, which is not
    mounted; then the mount itself is the container's group.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for mount in mounts:
            top = root / _GROUPS / mount
            for depth in range(len(parts), -1, -1):
                folder = top.joinpath(*parts[:depth])
                if folder.is_dir():
                    yield folder


def _read_group(folder: Path) -> tuple[int | None, int, int]:
    """Limit (None without one), use and reclaimable bytes of a group."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [int(text) for text in (_read(folder / name) for name in names) if text.isdecimal()]
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    if not limits or not used.isdecimal():
        return None, 0, 0
    reclaimable = 0
    counts = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())
    fields = _RECLAIMABLE[2:] if _RECLAIMABLE[2] in counts else _RECLAIMABLE[:2]
    for name in fields:
        reclaimable += int(counts.get(name, 0))
    return min(limits), int(used), min(reclaimable, int(used))


def _read(path: Path) -> str:
    """The text of a small file of the kernel; "" where it does not exist or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
