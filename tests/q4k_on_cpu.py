"""Runs the source of q4k_matvec on a processor; see cuda_on_cpu/device.hpp and q4k_device.hpp."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiercel.kernels import q4k_matvec as kernel
from tiercel.kernels.q4k_types import num_units, tail_groups
from tiercel.quant import TILE_ROWS, Layout, QuantTensor

HERE = Path(__file__).parent / "cuda_on_cpu"


class _Call(ctypes.Structure):
    _fields_ = (
        ("planes", kernel.KernelPlanes),
        *((name, ctypes.c_void_p) for name in ("x", "out", "partial", "tickets")),
        *((name, ctypes.c_int) for name in ("rows", "blocks", "m", "x_stride", "out_stride")),
    )


def build(tensor: QuantTensor, config: kernel.Q4kMatvecConfig, folder: Path) -> ctypes.CDLL:
    """Compile the source with what stands for a GPU, for float32 results; skip where that fails."""
    compiler = shutil.which("g++")
    if compiler is None or "f16c" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs g++ and an x86 processor with F16C")
    source = kernel.cuda_source(
        tensor.qtype.name,
        tail_groups(tensor.shape[1]),
        torch.float32,
        config,
        in_file=tensor.layout is Layout.FILE,
    )
    cuda = files("tiercel.kernels") / "cuda"
    headers = [cuda / f"{name}.cuh" for name in source.headers if name != "q4k_ptx"]
    parts = [HERE / "device.hpp", HERE / "q4k_device.hpp", *headers, cuda / f"{source.name}.cu"]
    macros = "".join(f"#define {name} {value}\n" for name, value in source.macros)
    run = (HERE / "run_each_cta.hpp", HERE / "run_q4k_matvec.cpp")
    text = macros + "".join(part.read_text() for part in (*parts, *run))
    name = f"matvec_{tensor.layout.name}"
    path, library = folder / f"{name}.cpp", folder / f"{name}.so"
    path.write_text(text)
    flags = ["-O1", "-std=c++17", "-mf16c", "-mfma", "-fno-strict-aliasing", "-w"]
    subprocess.run([compiler, *flags, "-shared", "-fPIC", "-o", library, path], check=True)
    return ctypes.CDLL(str(library))


def run(
    library: ctypes.CDLL, x: Tensor, tensor: QuantTensor, config: kernel.Q4kMatvecConfig
) -> Tensor:
    """As `ops.q4k_matvec`, float32 results; in the file's layout the planes are contiguous."""
    (tokens, in_features), rows = x.shape, tensor.shape[0]
    tiles = -(-rows // TILE_ROWS)
    slices = kernel.num_slices(in_features)
    out = torch.full((tokens, rows), float("nan"))
    partial = torch.full((slices, tokens, tiles * TILE_ROWS), float("nan"))
    tickets = torch.zeros(tiles, dtype=torch.int32)
    call = _Call(
        kernel.KernelPlanes.of(tensor.ordered_planes()),
        *(value.data_ptr() for value in (x, out, partial, tickets)),
        *(rows, num_units(in_features), tokens, x.stride(0), out.stride(0)),
    )
    grid_y = slices if config.is_split else 1
    failure = library.run(ctypes.byref(call), config.grid, grid_y, config.smem_bytes, 0)
    assert failure == 0, {1: "a hang", 2: "more shared memory than the launch asks for"}[failure]
    assert not tickets.any()
    return out
