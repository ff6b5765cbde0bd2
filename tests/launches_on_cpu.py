"""Runs kernel launches on a CPU, kernel by kernel; see cuda_on_cpu/attention_device.hpp."""

from __future__ import annotations

import atexit
import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiercel.kernels.runtime import rtc

HERE = Path(__file__).parent / "cuda_on_cpu"
# Files that replace headers of kernels, in addition to those that replace attention's.
STAND_INS = {
    "speculation/ngram_ptx.cuh": "ngram_device",
    "include/hopper.cuh": "hopper_device",
    "block/linear_group_ptx.cuh": "linear_group_device",
    "include/cluster_ptx.cuh": "cluster_device",
    "attention/indexer_select_ptx.cuh": "select_device",
    "attention/sparse_attention_tiles_ptx.cuh": "tiles_device",
    "attention/indexer_scores_ptx.cuh": "scores_device",
}
INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)


def expand_includes(text: str) -> str:
    """A source with its headers in place, but those that files of cuda_on_cpu/ replace.

    So a source can be put into a namespace with all of its headers, and several into one library.
    """

    def expand(match: re.Match[str]) -> str:
        path = match[1]
        header = rtc.read_source(path).replace("#pragma once\n", "")
        if path.endswith("_ptx.cuh") or path in ("include/hopper.cuh", "include/types.cuh"):
            header = "".join(found[0] for found in INCLUDE.finditer(header))
        guard = f"HAS_{re.sub(r'[^a-z0-9]', '_', path)}"
        return f"#ifndef {guard}\n#define {guard}\n{expand_includes(header)}#endif\n"

    return INCLUDE.sub(expand, text)


def read_kernel(name: str) -> str:
    """A kernel's source, whole as `expand_includes` makes it."""
    return expand_includes(rtc.read_source(rtc.source_path(name)))


def aligned(argument: Any) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """A copy at a multiple of 64 bytes, and its address."""
    size = ctypes.sizeof(argument)
    buffer = ctypes.create_string_buffer(size + 64)
    place = (ctypes.addressof(buffer) + 63) & ~63
    ctypes.memmove(place, ctypes.addressof(argument), size)
    return buffer, place


def encode_tensor_map(
    address: int, kind: int, dims: Sequence[int], steps: Sequence[int], box: Sequence[int]
) -> rtc.TensorMap:
    """Replacement of the driver's function, for cuda_on_cpu/hopper_device.hpp."""
    words = (ctypes.c_uint64 * 16)(address, *dims, *steps, *box)
    return rtc.TensorMap.from_buffer_copy(words)


OPTIONS = (
    *("-std=c++17", "-mf16c", "-mfma", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-fno-stack-protector", "-fno-exceptions", "-w", "-fPIC", "-fvisibility-inlines-hidden"),
)
# Of the compiler: 0 compiles in half of the time, and what multiplies much then runs twice as long.
QUICK_TO_COMPILE, QUICK_TO_RUN = 0, 1
SYSTEM_INCLUDE = re.compile(r"^#include <.+>\n", re.MULTILINE)


@cache
def precompile_headers(compiler: str, level: int) -> Path:
    """The system's headers of all files of cuda_on_cpu/, and containers.hpp, compiled."""
    folder = Path(tempfile.mkdtemp(prefix="cuda_on_cpu"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    lines = {line for part in HERE.iterdir() for line in SYSTEM_INCLUDE.findall(part.read_text())}
    header = folder / "system.hpp"
    header.write_text("".join(sorted(lines)) + (HERE / "containers.hpp").read_text())
    command = [compiler, f"-O{level}", *OPTIONS, "-x", "c++-header", "-o", f"{header}.gch", header]
    subprocess.run(command, check=True)
    return header


def compile_library(text: str, folder: Path, name: str, level: int = QUICK_TO_RUN) -> ctypes.CDLL:
    """Compile a kernel's source with the replacements of a GPU; skip where that is impossible."""
    compiler = shutil.which("g++")
    if compiler is None or "f16c" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs g++ and an x86 processor with F16C")
    path, library = folder / f"{name}.cpp", folder / f"{name}.so"
    path.write_text(text)
    headers = precompile_headers(compiler, level)
    command = [
        compiler,
        f"-O{level}",
        *OPTIONS,
        "-include",
        headers,
        "-shared",
        "-o",
        library,
        path,
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def describe_failure(library: ctypes.CDLL, failure: int) -> str:
    """The failure of a run of a library, in words."""
    library.failure_of_run.restype = ctypes.c_char_p
    words = {1: "a hang", 2: "more shared memory than the launch requests"}
    return words.get(failure) or library.failure_of_run().decode()


@dataclass
class Processor:
    """Replacement of `load_kernel` and `launch` of `rtc` that runs on a CPU.

    Attributes:
        folder: folder for compiled libraries.
        seed: seed of the order of CTAs and warps.
        late: tensors that the kernel before the first one writes.
        level: optimisation by the compiler.
    """

    folder: Path
    seed: int = 0
    late: list[Tensor] = field(default_factory=list)
    level: int = QUICK_TO_COMPILE
    libraries: dict[rtc.KernelSource, ctypes.CDLL] = field(default_factory=dict)

    def load_kernel(
        self, source: rtc.KernelSource, device: torch.device, smem_bytes: int = 0
    ) -> tuple[ctypes.CDLL, int]:
        """Like that of rtc; skips the test where a CPU cannot replace a GPU."""
        if source not in self.libraries:
            self.libraries[source] = self._build(source)
        return self.libraries[source], smem_bytes

    def _build(self, source: rtc.KernelSource) -> ctypes.CDLL:
        own_source = HERE / f"{source.name}.cu"  # a kernel of the tests
        is_own = own_source.exists()
        kernel = own_source.read_text() if is_own else rtc.read_source(rtc.source_path(source.name))
        included = INCLUDE.findall(kernel)
        headers = {*included, *(path for name in included for path in rtc.included_files(name))}
        own = [STAND_INS[path] for path in STAND_INS if path in headers]
        names = ("device", "q4k_device", "attention_device", *own)
        device = [HERE / f"{name}.hpp" for name in names]
        runner = "run_clusters" if "cluster_device" in own else "run_each_cta"
        run = [HERE / f"{runner}.hpp", HERE / "run_launch.cpp"]
        macros = "".join(
            f"#undef {name}\n#define {name} {value}\n"
            for name, value in (*source.macros, ("KERNEL", source.name))
        )
        # Once more after the files that replace the device, which use some of these names.
        text = macros + "".join(part.read_text() for part in device) + macros
        text += expand_includes(kernel) + "".join(part.read_text() for part in run)
        name = f"{source.name}_{len(self.libraries)}"
        return compile_library(text, self.folder, name, self.level)

    def launch(
        self,
        kernel: tuple[ctypes.CDLL, int],
        grid: int,
        threads: int,
        arguments: Sequence[Any],
        *,
        grid_y: int = 1,
        is_dependent: bool = False,
    ) -> None:
        """Like that of rtc, but finished when it returns."""
        assert grid > 0 < grid_y, "a launch of nothing, which the driver refuses"
        library, smem_bytes = kernel
        for tensor in self.late:
            assert tensor.is_contiguous()
            size = ctypes.c_size_t(tensor.numel() * tensor.element_size())
            library.add_late(ctypes.c_void_p(tensor.data_ptr()), size)
        self.late.clear()
        held = [aligned(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(arguments))(*(place for _, place in held))
        failure = library.run(places, grid, grid_y, smem_bytes, self.seed)
        assert failure == 0, describe_failure(library, failure)
