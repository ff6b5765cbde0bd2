"""Runs the source of the kernel between two attentions on a processor; see cuda_on_cpu/."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiercel.kernels import decode_chain as kernel
from tiercel.ops.decode_chain import ChainExchange, ChainWeights

HERE = Path(__file__).parent / "cuda_on_cpu"


def build(tokens: int, weights: ChainWeights, folder: Path) -> ctypes.CDLL:
    """Compile the source with what stands for a GPU; skip where that cannot be."""
    compiler = shutil.which("g++")
    if compiler is None or "f16c" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs g++ and an x86 processor with F16C")
    source = kernel.cuda_source(tokens, weights.slices, weights.types, is_last=not weights.qkv)
    cuda = files("tiercel.kernels") / "cuda"
    device = [HERE / f"{name}.hpp" for name in ("device", "q4k_device", "chain_device")]
    headers = [cuda / f"{name}.cuh" for name in source.headers if not name.endswith("_ptx")]
    run = [HERE / "run_ctas.hpp", HERE / "run_decode_chain.cpp"]
    parts = (*device, *headers, cuda / f"{source.name}.cu", *run)
    macros = "".join(f"#define {name} {value}\n" for name, value in source.macros)
    path, library = folder / "chain.cpp", folder / "chain.so"
    path.write_text(macros + "".join(part.read_text() for part in parts))
    flags = ["-O2", "-std=c++17", "-mf16c", "-mfma", "-fno-strict-aliasing"]
    flags += ["-fno-stack-protector", "-w", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", library, path], check=True)
    return ctypes.CDLL(str(library))


def run(
    library: ctypes.CDLL,
    attended: Tensor,
    x: Tensor,
    weights: ChainWeights,
    exchange: ChainExchange,
    *,
    seed: int = 0,
) -> Tensor | None:
    """As `ops.decode_chain`; `seed` draws the order of warps."""
    heads = None
    if weights.qkv:
        shape = (x.shape[0], kernel.HEADS_WIDTH)
        heads = torch.full(shape, float("nan"), dtype=torch.float16)
    args = weights.arguments(attended, x, heads, exchange)
    assert ctypes.sizeof(args) == library.struct_bytes()
    assert kernel.smem_bytes(x.shape[0], weights.types) == library.smem_bytes()
    assert library.run_chain(ctypes.byref(args), seed) == 0, "a hang"
    return heads
