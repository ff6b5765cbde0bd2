"""Shortens the start of a process: no garbage collection, and less of PyTorch, part in a thread.

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
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tiercel import env

_LIBRARY: Final = "libtorch_cpu.so"  # nine tenths of what the linker does for `import torch`
_GPU_LIBRARY: Final = "libtorch_cuda.so"
_META_KERNELS: Final = "torch._meta_registrations"


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
    folder = _cpu_folder()
    if folder is None:
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


def postpone_meta_kernels() -> None:
    """Let `import torch` leave out the shapes of its operators, a quarter of its time on a CPU.

    Only tensors of the device "meta", `torch.compile` and exports need them. They are registered
    when a name of their module is read. For processes that run Tiercel alone.
    """
    if _cpu_folder() is not None:
        sys.meta_path.insert(0, _MetaKernelsFinder())


def _cpu_folder() -> Path | None:
    """The folder of PyTorch's libraries; None if it is imported already, absent or for GPUs."""
    if sys.platform != "linux" or "torch" in sys.modules:
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    if not (folder / _LIBRARY).is_file() or (folder / _GPU_LIBRARY).exists():
        return None
    return folder


class _MetaKernelsFinder(MetaPathFinder):
    """Finds one module, and has it run late."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for any other module: the next finder is asked."""
        if fullname != _META_KERNELS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LateLoader(spec.loader)
        return spec


class _LateLoader(Loader):
    """Makes a module that runs when a name of it is read.

    `importlib.util.LazyLoader` runs it at once, since the import statement reads `__spec__`.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module."""
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: see `_LateModule`."""


class _LateModule(ModuleType):
    """A module of `_LateLoader` that has not run."""

    def __getattr__(self, name: str) -> Any:
        """Run, unless the name is one of the import system's own that is not set."""
        if name.startswith("__"):
            raise AttributeError(name)
        spec = self.__spec__
        assert spec is not None
        assert isinstance(spec.loader, _LateLoader)
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader.loader.exec_module(self)
        return getattr(self, name)
