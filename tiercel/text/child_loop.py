"""Child side of an isolated process for untrusted content: limits, frames, the loop.

The child limits its own memory and time, the parent kills it at its deadline, and it has no
secret: no environment, no files but its own libraries. Frames are those of `child_client.py`; the
arguments of the script are the parent's process id and then the folders that it may import from,
which the script adds to its path before it imports anything else.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final


def _find_limits() -> ModuleType | None:
    """The module that sets limits of a process, which some platforms lack."""
    try:
        return importlib.import_module("resource")
    except ImportError:
        return None


_LIMITS: Final = _find_limits()
MEMORY_BYTES: Final = 512 << 20  # above what the process holds when it is ready
PARENT_CHECK_SECONDS: Final = 1.0


def answer_requests(answer: Callable[[dict[str, Any]], Mapping[str, object]]) -> None:
    """Answer requests until the parent ends; `cpu_seconds` of each request limits its time."""
    parent = parent_id()
    while True:
        request = read_message(parent)
        allow_cpu(request["cpu_seconds"])
        write_message(answer(request))


def parent_id() -> int:
    """The process id of the parent."""
    return int(sys.argv[1])


def read_message(parent: int) -> dict[str, Any]:
    """Read one frame."""
    size = int.from_bytes(_read_exactly(4, parent), "big")
    message: dict[str, Any] = json.loads(_read_exactly(size, parent))
    return message


def limit_memory() -> bool:
    """Bound the address space; no core files, no files at all.

    Returns:
        Whether the kernel enforces the bound. Only Linux does: elsewhere the parent watches.
    """
    if _LIMITS is None:
        return False
    _LIMITS.setrlimit(_LIMITS.RLIMIT_CORE, (0, 0))
    _LIMITS.setrlimit(_LIMITS.RLIMIT_FSIZE, (0, 0))
    if sys.platform != "linux":
        return False
    size = _address_space() + MEMORY_BYTES
    _LIMITS.setrlimit(_LIMITS.RLIMIT_AS, (size, size))
    return True


def _address_space() -> int:
    """Bytes of addresses in use; where this is unknown, a bound above what the process uses."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return MEMORY_BYTES


def allow_cpu(seconds: int) -> None:
    """Set this request's CPU time: the limit counts from the start of the process."""
    if _LIMITS is None:
        return
    usage = _LIMITS.getrusage(_LIMITS.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    _LIMITS.setrlimit(_LIMITS.RLIMIT_CPU, (used + seconds, _LIMITS.RLIM_INFINITY))


def _read_exactly(size: int, parent: int) -> bytes:
    """Read from standard input; exit when the parent has ended or closed the pipe."""
    blob = bytearray()
    while len(blob) < size:
        if select.select([0], [], [], PARENT_CHECK_SECONDS)[0]:
            chunk = os.read(0, min(size - len(blob), 1 << 20))
            if not chunk:
                sys.exit(0)
            blob += chunk
        elif os.getppid() != parent:
            sys.exit(0)
    return bytes(blob)


def write_message(message: Mapping[str, object]) -> None:
    """Write one frame to standard output."""
    blob = json.dumps(message).encode()
    frame = memoryview(len(blob).to_bytes(4, "big") + blob)
    while frame:
        frame = frame[os.write(1, frame) :]
