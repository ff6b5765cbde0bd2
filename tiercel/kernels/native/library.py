"""The native library in this process: the fastest variant that the machine runs.

The plain variant is loaded first: it asks the processor and the operating system which instructions
there are. ``TIERCEL_CPU`` forces a variant and ``TIERCEL_NATIVE=0`` switches the library off.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from msgspec import Struct

from tiercel import env
from tiercel.errors import ArgumentError, InstallationError
from tiercel.kernels.native import abi
from tiercel.kernels.native.variants import (
    ERROR_FILE,
    HOW_TO_BUILD,
    LIBRARY_DIR,
    VARIANTS,
    native_target,
    refuse_library,
    source_stamp,
)


class NativeLibrary(Struct, frozen=True):
    """A loaded variant.

    Attributes:
        lib: the functions of `abi.py`, declared.
        variant: the variant's name.
        path: file of the library.
    """

    lib: ctypes.CDLL
    variant: str
    path: Path


class NativePool(Struct, frozen=True):
    """A thread pool of the library. It lives as long as the process.

    Attributes:
        handle: the pointer that functions take.
        num_threads: number of threads, the caller's included.
    """

    handle: int
    num_threads: int


def library() -> NativeLibrary:
    """The library to use.

    Raises:
        ArgumentError: ``TIERCEL_CPU`` or ``TIERCEL_NATIVE`` has a value that cannot be.
        InstallationError: there is no library; `native_refusal` says why.
    """
    found = _find(env.forced_cpu(), env.has_native())
    if isinstance(found, str):
        raise InstallationError(found)
    return found


def native_refusal() -> str:
    """Why there is no library, in one line; "" if there is one.

    Raises:
        ArgumentError: ``TIERCEL_CPU`` or ``TIERCEL_NATIVE`` has a value that cannot be.
    """
    found = _find(env.forced_cpu(), env.has_native())
    return found if isinstance(found, str) else ""


def describe_library(num_threads: int) -> str:
    """The library in a few words for logs and reports: what is used, or why nothing is.

    Args:
        num_threads: number of threads that it will use.

    Raises:
        ArgumentError: ``TIERCEL_CPU`` or ``TIERCEL_NATIVE`` has a value that cannot be.
    """
    refusal = native_refusal()
    if refusal:
        return f"not used: {refusal}"
    return f"{library().variant}, {num_threads} thread{'s' if num_threads > 1 else ''}"


def variants() -> tuple[str, ...]:
    """Names of the variants that this machine runs, the fastest first; () if none is built."""
    found = _load("plain")
    if isinstance(found, str):
        return ()
    features = found.lib.tc_cpu_features()
    return tuple(v.name for v in native_target().variants if v.features & ~features == 0)


def load_variant(name: str) -> NativeLibrary:
    """Load one of `variants`, whatever the environment says.

    Raises:
        InstallationError: it is not built, or not from these sources.
    """
    found = _load(name)
    if isinstance(found, str):
        raise InstallationError(found)
    return found


@functools.cache
def make_pool(num_threads: int, native: NativeLibrary | None = None) -> NativePool:
    """The pool of a number of threads: the same one in each call.

    Args:
        num_threads: at least 1, the caller's included.
        native: the library; None: `library()`.

    Raises:
        ArgumentError: no threads.
        InstallationError: there is no library.
    """
    if num_threads < 1:
        raise ArgumentError(f"num_threads={num_threads} is out of range.", hint="Use 1 or more.")
    handle = (native or library()).lib.tc_pool_create(num_threads)
    if not handle:
        raise MemoryError
    return NativePool(handle, num_threads)


@functools.cache
def _find(forced: str, has_native: bool) -> NativeLibrary | str:
    """The library to use, or why there is none."""
    if not has_native:
        return "TIERCEL_NATIVE=0"
    known = [variant.name for variant in VARIANTS]
    if forced and forced not in known:
        raise ArgumentError(f"TIERCEL_CPU={forced!r} is unknown.", hint=f"Use {_listed(known)}.")
    plain = _load("plain")
    if isinstance(plain, str):
        return plain
    if forced and forced not in variants():
        raise ArgumentError(
            f"TIERCEL_CPU={forced} needs instructions that this processor lacks.",
            hint=f"Use {_listed(variants())}.",
        )
    found = _load(forced) if forced else _fastest()
    if isinstance(found, str):
        return found
    missing = [name for name in abi.FUNCTIONS if not hasattr(found.lib, name)]
    if missing:
        return f"{found.path.name} lacks the function {missing[0]}. {HOW_TO_BUILD}"
    return found


def _fastest() -> NativeLibrary | str:
    """The first of `variants` that loads; not the plain one where a faster one is expected."""
    found = [_load(name) for name in variants()]
    candidates = found[:-1] or found
    return next((lib for lib in candidates if isinstance(lib, NativeLibrary)), candidates[0])


@functools.cache
def _load(name: str) -> NativeLibrary | str:
    """Load a variant that the machine runs, or say why not."""
    target = native_target()
    variant = next((v for v in target.variants if v.name == name), None)
    if variant is None:
        return f"the variant {name!r} is of another architecture."
    path = LIBRARY_DIR / target.library_name(variant)
    refusal = refuse_library(path, source_stamp(variant))
    if refusal:
        return f"{path.name} {refusal}{_build_error(path)}. {HOW_TO_BUILD}"
    try:
        lib = ctypes.CDLL(str(path))
        abi.declare(lib)
        version = lib.tc_abi_version()
    except (OSError, AttributeError) as error:
        return f"{path.name} cannot be loaded ({error}). {HOW_TO_BUILD}"
    if version != abi.ABI_VERSION:
        return f"{path.name} has interface {version}, not {abi.ABI_VERSION}. {HOW_TO_BUILD}"
    return NativeLibrary(lib, name, path)


def _build_error(path: Path) -> str:
    """What pip's build reported, if there is no library because it failed."""
    try:
        text = (LIBRARY_DIR / ERROR_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "" if path.exists() else f" ({' '.join(text.split()).rstrip('.')})"


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
