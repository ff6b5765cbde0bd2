"""Shortens the start of a process: no garbage collection, PyTorch's library loaded in a thread.

Importing PyTorch creates half a million objects that all stay. Each collection meanwhile visits
them, and so does the interpreter at its end; docs/notes/cpu_start.md has the times. Free of
PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tiercel import env

_LIBRARY: Final = "libtorch_cpu.so"  # nine tenths of what the linker does for `import torch`
_GPU_LIBRARY: Final = "libtorch_cuda.so"


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Collect no garbage within the block; what exists at its end is never visited again.

    A caller who collects nothing himself keeps that.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def preload_pytorch() -> threading.Thread | None:
    """Load PyTorch's largest library in a thread, before `import torch` needs it.

    The linker takes 0.2 s for it, in which Python can run other code: a foreign function is called
    without the interpreter's lock, an import is not. Without success `import torch` loads the
    library as ever, and words what is wrong. PyTorch for GPUs is left alone: it chooses itself
    where the libraries of CUDA are.

    Returns:
        The thread, or None where there is nothing to load.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    if not (folder / _LIBRARY).is_file() or (folder / _GPU_LIBRARY).exists():
        return None
    env.shorten_openmp_spins()  # read when this library loads OpenMP
    path = str(folder / _LIBRARY).encode()
    thread = threading.Thread(target=_load, args=(path,), name="preload")
    thread.start()
    return thread


def _load(path: bytes) -> None:
    """Call dlopen as a foreign function; a failure is left to `import torch`."""
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    load(path, os.RTLD_LAZY | os.RTLD_LOCAL)
