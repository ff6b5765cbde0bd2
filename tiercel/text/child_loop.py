"""Child side of a process for untrusted content: limits, frames, the loop.

The child limits its own memory and time, the parent kills it at its deadline, and it holds no
secret: no environment, no file but its own libraries. Frames are those of `child_client.py`; the
arguments of the script are the parent's process id and then the folders that it may import from,
which the script adds to its path before it imports anything else.
"""

from __future__ import annotations

import json
import os
import resource
import select
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

MEMORY_BYTES: Final = 512 << 20  # above what the process holds when it is ready
PARENT_CHECK_SECONDS: Final = 1.0


def answer_requests(answer: Callable[[dict[str, Any]], Mapping[str, object]]) -> None:
    """Answer requests until the parent leaves; each says in `cpu_seconds` how long it may take."""
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


def limit_memory() -> None:
    """Bound the address space; no core files, no files at all."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    size = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def allow_cpu(seconds: int) -> None:
    """Give this request its CPU time: the limit counts from the start of the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, resource.RLIM_INFINITY))


def _read_exactly(size: int, parent: int) -> bytes:
    """Read from standard input; leave when the parent has gone or closed the pipe."""
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
