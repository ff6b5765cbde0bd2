"""Runs launches of quantised products on a CPU; see cuda_on_cpu/products_device.hpp."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launches_on_cpu import (
    QUICK_TO_COMPILE,
    compile_library,
    describe_failure,
    read_kernel,
)
from tiercel.kernels.runtime import rtc

HERE = Path(__file__).parent / "cuda_on_cpu"
# Of a GPU, replaced by a CPU.
DEVICE = ("device", "q4k_device", "products_device", "counters_device", "moe_device")


@dataclass(frozen=True)
class Built:
    """A kernel with its `number` in a library."""

    library: ctypes.CDLL
    number: int
    cluster: int
    smem_bytes: int


@dataclass
class Products:
    """Replacement of `load_kernel` and `launch` of `rtc` that runs on a CPU.

    Attributes:
        folder: folder for compiled libraries.
        seed: seed of the order of clusters and warps.
        late: tensors that the kernel before the first launch writes.
        level: optimisation by the compiler.
    """

    folder: Path
    seed: int = 0
    late: list[Tensor] = field(default_factory=list)
    level: int = QUICK_TO_COMPILE
    built: dict[rtc.KernelSource, Built] = field(default_factory=dict)

    def build(self, sources: Sequence[rtc.KernelSource]) -> None:
        """Compile sources together, which is cheaper; skip where a CPU cannot replace a GPU.

        Each source is in its own namespace.
        """
        sources = [source for source in dict.fromkeys(sources) if source not in self.built]
        if not sources:
            return
        text = "".join((HERE / f"{name}.hpp").read_text() for name in DEVICE)
        text += "".join(_in_namespace(i, source) for i, source in enumerate(sources))
        names = [f"call_one<kernel_{i}::{source.name}>" for i, source in enumerate(sources)]
        text += f"#define KERNELS {', '.join(names)}\n" + (HERE / "run_products.cpp").read_text()
        loaded = compile_library(text, self.folder, f"products_{len(self.built)}", self.level)
        for number, source in enumerate(sources):
            cluster = dict(source.macros).get("SPLITS", 1)
            self.built[source] = Built(loaded, number, cluster, 0)

    def build_all_of(self, launch: Callable[[], object]) -> None:
        """Compile all kernels that `launch` will load together: 5 s instead of 28 for experts."""
        sources: list[rtc.KernelSource] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rtc, "load_kernel", lambda source, *_, **__: sources.append(source))
            patch.setattr(rtc, "launch", lambda *_, **__: None)
            launch()
        self.build(sources)

    def load_kernel(
        self, source: rtc.KernelSource, device: torch.device, smem_bytes: int = 0
    ) -> Built:
        """Like that of rtc."""
        self.build([source])
        found = self.built[source]
        return Built(found.library, found.number, found.cluster, smem_bytes)

    def launch(
        self,
        kernel: Built,
        grid: int,
        threads: int,
        arguments: Sequence[Any],
        *,
        grid_y: int = 1,
        grid_z: int = 1,
        is_dependent: bool = False,
        is_cooperative: bool = False,
    ) -> None:
        """Like that of rtc, but finished when it returns. A cooperative launch is one cluster."""
        library = kernel.library
        for tensor in self.late:
            assert tensor.is_contiguous()
            size = ctypes.c_size_t(tensor.numel() * tensor.element_size())
            library.add_late(ctypes.c_void_p(tensor.data_ptr()), size)
        self.late.clear()
        places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        sizes = (ctypes.c_int * 3)(grid, grid_y, grid_z)
        numbers = (grid_y if is_cooperative else kernel.cluster, kernel.smem_bytes, self.seed)
        failure = library.run(kernel.number, places, sizes, threads, *numbers)
        assert failure == 0, describe_failure(library, failure)


def _in_namespace(number: int, source: rtc.KernelSource) -> str:
    """A source with its headers and macros, which end with the namespace."""
    text = read_kernel(source.name)
    own = {*re.findall(r"^#define (\w+)", text, re.MULTILINE), *dict(source.macros)}
    macros = "".join(f"#define {name} {value}\n" for name, value in source.macros)
    ends = "".join(f"#undef {name}\n" for name in sorted(own))
    ends += "#undef THREADS\n#define THREADS num_threads\n"
    text = text.replace('extern "C" ', "")
    return f"{macros}namespace kernel_{number} {{\n{text}}}\n{ends}"
