"""CUDA C++ compiled for the device at hand by NVRTC, kept on disk as cubins, and launched.

A kernel is a file of kernels/cuda/ and macros. It includes files of that folder alone, by their
paths in it, which the compiler is given in memory. So the text of all of them, macros, architecture
and compiler version name a cubin completely, and their hash is its key. The compiler is NVIDIA's
wheel (a CUDA build of PyTorch brings it), reached through cuda.bindings; it is imported at the
first compilation, so this module loads on a machine without either.

A cache entry is `<kernel>-<key>.cubin`: the SHA-256 of the cubin (32 bytes), then the cubin. It is
written beside its place and renamed, so that readers see all of it or nothing; one that does not
fit its hash is compiled again. A folder that cannot be written costs a compilation per process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from tiercel import env
from tiercel.errors import InternalError

# Without fast math: it changes division, roots and denormals of a whole file. A kernel asks for
# approximate forms by name.
_OPTIONS = ("--std=c++17",)
_INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)
_HASH_BYTES = 32
_STATIC_SMEM_LIMIT = 48 << 10  # more dynamic shared memory than this must be requested

# Constants of the driver interface, cuda.h of CUDA 13.
_MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_SMEM_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_MAP_DTYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128B = 3  # CU_TENSOR_MAP_SWIZZLE_128B


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One translation unit.

    Attributes:
        name: file of a family in kernels/cuda/, without its ending; its entry point has this name.
        macros: names and values, in a fixed order.
    """

    name: str
    macros: tuple[tuple[str, int], ...] = ()


@functools.cache
def source_files() -> dict[str, Traversable]:
    """Every CUDA file by its path in kernels/cuda/, for instance "packed/packed_matvec.cu"."""
    root = files("tiercel.kernels") / "cuda"
    families = [entry for entry in root.iterdir() if entry.is_dir()]
    return {f"{family.name}/{file.name}": file for family in families for file in family.iterdir()}


@functools.cache
def source_path(name: str) -> str:
    """The path of a kernel's file in kernels/cuda/; names are unique among the families.

    Raises:
        InternalError: there is no such file.
    """
    for path in source_files():
        if path.endswith(f"/{name}.cu"):
            return path
    raise InternalError(f"kernels/cuda/ has no {name}.cu.")


@functools.cache  # a model asks for hundreds of kernels, which share some dozen files
def read_source(path: str) -> str:
    """The text of a file of kernels/cuda/."""
    return source_files()[path].read_text("utf-8")


@functools.cache
def included_files(path: str) -> tuple[str, ...]:
    """What a file includes, directly or through other files; also what only some macros include.

    Args:
        path: in kernels/cuda/.

    Raises:
        InternalError: an included file does not exist.
    """
    found: list[str] = []
    pending = [path]
    while pending:
        includer = pending.pop()
        for name in _INCLUDE.findall(read_source(includer)):
            if name not in source_files():
                raise InternalError(
                    f"{includer} includes {name!r}, which kernels/cuda/ does not have."
                )
            if name not in found:
                found.append(name)
                pending.append(name)
    return tuple(sorted(found))


@functools.cache
def _source_hash(path: str) -> str:
    """Of the text of a file and of all that it includes."""
    paths = [path, *included_files(path)]
    texts = (part for each in paths for part in (each, read_source(each)))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


class Kernel(Struct, frozen=True):
    """An entry point loaded on one device; `function` is the driver's handle."""

    name: str
    function: ctypes.c_void_p
    device: torch.device
    smem_bytes: int


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with a value of one word."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_ubyte * 60),
    )

    def __init__(self, attribute: int, value: int) -> None:
        super().__init__(attribute, 0, value)


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class TensorMap(ctypes.Structure):
    """CUtensorMap, passed to a kernel by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * 128),)


# ---- compiling and caching


def device_arch(device: torch.device) -> str:
    """The compiler's name of a device; 'a' targets (wgmma, TMA) run on that chip alone."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def _nvrtc() -> Any:
    """The compiler's bindings, with the library behind them loaded.

    Raises:
        InternalError: a package is missing.
    """
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the bindings, or libnvrtc behind them
        raise InternalError(
            f"CUDA kernels cannot be compiled: {str(error).splitlines()[0]}.",
            hint="Install cuda-bindings and nvidia-cuda-nvrtc of the CUDA release of PyTorch.",
        ) from error
    return nvrtc


def compiler_version() -> str:
    """For instance "nvrtc 13.0".

    Raises:
        InternalError: there is no compiler.
    """
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def compile_cubin(source: KernelSource, arch: str, options: Sequence[str] = ()) -> bytes:
    """Compile, without a look at the cache; needs no GPU.

    Raises:
        InternalError: there is no compiler, or it refuses the source; the message holds its log.
    """
    nvrtc = _nvrtc()
    flags = [f"--gpu-architecture={arch}", *_OPTIONS, *options]
    flags += [f"-D{name}={value}" for name, value in source.macros]
    path = source_path(source.name)
    headers = included_files(path)
    error, program = nvrtc.nvrtcCreateProgram(
        read_source(path).encode(),
        path.encode(),
        len(headers),
        [read_source(header).encode() for header in headers],
        [header.encode() for header in headers],
    )
    if error:
        raise InternalError(f"{source.name}: NVRTC cannot start a program: {error.name}.")
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    if error:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcDestroyProgram(program)
        raise InternalError(
            f"{source.name}: {compiler_version()} refuses it for {arch} with {source.macros}:\n"
            + log.rstrip(b"\0").decode(errors="replace").strip()
        )
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = bytearray(size)
    (error,) = nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    if error:
        raise InternalError(f"{source.name}: NVRTC made no cubin for {arch}: {error.name}.")
    return bytes(cubin)


def cubin_path(source: KernelSource, arch: str, compiler: str, folder: Path) -> Path:
    """Where a cubin is kept: everything that decides its bytes is in the name's hash."""
    text_hash = _source_hash(source_path(source.name))
    parts = [text_hash, repr(source.macros), arch, compiler, repr(_OPTIONS)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return folder / f"{source.name}-{key[:32]}.cubin"


def load_cubin(source: KernelSource, arch: str, folder: Path | None = None) -> bytes:
    """A cubin from the cache, or compiled and put there.

    Args:
        source: what to compile.
        arch: for which chip, see `device_arch`.
        folder: of the cache; by default `cubins` in Tiercel's cache folder.

    Raises:
        InternalError: as `compile_cubin`.
    """
    folder = env.cache_dir() / "cubins" if folder is None else folder
    path = cubin_path(source, arch, compiler_version(), folder)
    cubin = _read_entry(path)
    if cubin is None:
        cubin = compile_cubin(source, arch)
        _write_entry(path, cubin)
    return cubin


def fill_cache(sources: Iterable[KernelSource], arch: str, folder: Path | None = None) -> None:
    """Compile side by side what the cache lacks of several sources; `load_kernel` finds it there.

    Args:
        sources: any, also equal ones.
        arch: for which chip, see `device_arch`.
        folder: as in `load_cubin`.

    Raises:
        InternalError: as `compile_cubin`.
    """
    place = env.cache_dir() / "cubins" if folder is None else folder
    compiler = compiler_version()
    missing = [
        source
        for source in dict.fromkeys(sources)
        if not cubin_path(source, arch, compiler, place).exists()
    ]
    if len(missing) > 1:  # the compiler leaves Python alone: 140 in 4 s on 16 cores
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(lambda source: load_cubin(source, arch, folder), missing))


def load_kernels(sources: Mapping[KernelSource, int], device: torch.device) -> None:
    """Load several kernels, compiled side by side where the cache lacks them.

    Args:
        sources: each with its bytes of shared memory.
        device: a CUDA device.

    Raises:
        InternalError: as `load_kernel`.
    """
    fill_cache(list(sources), device_arch(device))
    for source, smem in sources.items():
        load_kernel(source, device, smem)


def _read_entry(path: Path) -> bytes | None:
    """The cubin of a sound entry, else None."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, cubin = data[:_HASH_BYTES], data[_HASH_BYTES:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None


def _write_entry(path: Path, cubin: bytes) -> None:
    """Write whole or not at all; without room or rights the cubin serves this process alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)


# ---- loading and launching


@functools.cache
def _driver() -> ctypes.CDLL:
    """The driver's library; a machine with a CUDA device has it."""
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        message = text.value.decode() if text.value else "unknown error"
        raise InternalError(f"{what}: CUDA driver error {code}, {message}.")


@functools.cache
def max_smem_bytes(device: torch.device) -> int:
    """The most dynamic shared memory that a CTA may ask for."""
    value = ctypes.c_int()
    with torch.cuda.device(device):
        code = _driver().cuDeviceGetAttribute(
            ctypes.byref(value), _MAX_SMEM_OPTIN, torch.cuda.current_device()
        )
    _check(code, "asking for the size of shared memory")
    return value.value


@functools.cache
def load_kernel(source: KernelSource, device: torch.device, smem_bytes: int = 0) -> Kernel:
    """Load the entry point named like its source; once per process and device.

    Compiles and waits for the device at the first size: call it before a graph is captured.

    Args:
        source: the kernel.
        device: a CUDA device with its index.
        smem_bytes: dynamic shared memory of a launch.

    Raises:
        InternalError: the kernel cannot be compiled or loaded.
    """
    loaded = _load_function(source, device)
    if smem_bytes > loaded.most_smem_bytes:
        code = _driver().cuFuncSetAttribute(loaded.function, _MAX_DYNAMIC_SMEM, smem_bytes)
        _check(code, f"{source.name}: asking for {smem_bytes} bytes of shared memory")
        loaded.most_smem_bytes = smem_bytes
    return Kernel(source.name, loaded.function, device, smem_bytes)


class _Loaded(Struct):
    """A function on one device, and the most dynamic shared memory that its launches may have."""

    function: ctypes.c_void_p
    most_smem_bytes: int = _STATIC_SMEM_LIMIT


@functools.cache
def _load_function(source: KernelSource, device: torch.device) -> _Loaded:
    cubin = load_cubin(source, device_arch(device))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    name = source.name
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the primary context current
        _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), f"{name}: loading")
        code = _driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        _check(code, f"{name}: finding the entry point")
    return _Loaded(function)


def has_dependent_launch(device: torch.device) -> bool:
    """Whether launches on a CUDA device may overlap the kernel ahead: Hopper or later, as asked."""
    return env.has_dependent_launch() and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def is_dependent(device: torch.device) -> bool:
    """Whether kernels on a device may start before the one ahead ends; read once a process."""
    return device.type == "cuda" and has_dependent_launch(device)


@functools.cache
def _attributes(kinds: tuple[int, ...]) -> Any:
    """Attributes of a launch, each set to 1; the driver only reads them."""
    return (_LaunchAttribute * len(kinds))(*(_LaunchAttribute(kind, 1) for kind in kinds))


def launch(
    kernel: Kernel,
    grid: int,
    threads: int,
    arguments: Sequence[Any],
    *,
    grid_y: int = 1,
    grid_z: int = 1,
    is_dependent: bool = False,
    is_cooperative: bool = False,
) -> None:
    """Enqueue on PyTorch's current stream of the kernel's device; may be captured into a graph.

    Args:
        kernel: from `load_kernel`.
        grid: CTAs, > 0.
        threads: of a CTA.
        arguments: in the kernel's order, each of its parameter's width; the driver copies them.
        grid_y: CTAs in the second direction.
        grid_z: CTAs in the third.
        is_dependent: the kernel may start before the one before it ends (Hopper and later): all its
            threads wait (griddepcontrol.wait) before they touch what that one reads or writes.
        is_cooperative: all CTAs must run at once, else the driver refuses the launch.

    Raises:
        InternalError: the driver refuses the launch.
    """
    places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    index = kernel.device.index
    kinds = (_PROGRAMMATIC_SERIALIZATION,) * is_dependent + (_COOPERATIVE,) * is_cooperative
    config = _LaunchConfig(
        (grid, grid_y, grid_z),
        (threads, 1, 1),
        kernel.smem_bytes,
        torch._C._cuda_getCurrentRawStream(index),
        _attributes(kinds),
        len(kinds),
    )
    if torch.cuda.current_device() == index:
        code = _driver().cuLaunchKernelEx(ctypes.byref(config), kernel.function, places, None)
    else:
        with torch.cuda.device(index):
            code = _driver().cuLaunchKernelEx(ctypes.byref(config), kernel.function, places, None)
    _check(code, f"{kernel.name}: launching {grid} x {threads} threads")


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """A tensor as a kernel's argument."""
    return ctypes.c_void_p(tensor.data_ptr())


def make_tensor_map(
    tensor: Tensor, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> TensorMap:
    """Describe a 3-d view for TMA: 128-byte swizzle, zeros outside.

    Args:
        tensor: float16 or bfloat16, 16-byte aligned; its first element is the view's.
        dims: sizes, innermost first.
        strides: elements between neighbours of dimensions 1 and 2, multiples of 8.
        box: sizes of one copy, innermost first; the innermost 64.

    Raises:
        InternalError: the driver refuses the view.
    """
    steps = [stride * tensor.element_size() for stride in strides]
    return _encode_tensor_map(
        tensor.data_ptr(), _MAP_DTYPES[tensor.dtype], tuple(dims), tuple(steps), tuple(box)
    )


# Encoding takes 8 us, and a step asks for the same few of each layer (results of steps before it
# come back to the same addresses).
@functools.lru_cache(maxsize=4096)
def _encode_tensor_map(
    address: int, kind: int, dims: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...]
) -> TensorMap:
    """The map; steps in bytes. Callers must not write to it."""
    raw = ctypes.create_string_buffer(128 + 64)
    place = (ctypes.addressof(raw) + 63) & ~63  # the driver wants 64-byte alignment
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        kind,
        3,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 3)(*dims),
        (ctypes.c_uint64 * 2)(*steps),
        (ctypes.c_uint32 * 3)(*box),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        0,  # not interleaved
        _SWIZZLE_128B,
        0,  # the last-level cache fetches no more than a box: less of heads that lie among others
        0,  # zeros outside
    )
    _check(code, f"describing {dims} in steps of {steps} by boxes {box}")
    return TensorMap.from_buffer_copy(ctypes.string_at(place, 128))
