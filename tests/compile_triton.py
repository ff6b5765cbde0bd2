"""Compiles the dependent Triton kernels for Hopper without a GPU and prints facts about their PTX.

A separate process: in the tests' own process Triton is the interpreter wherever there is no GPU.
"""

import contextlib
import json
import re
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tiercel.kernels.attention import kv_compress, latent_step_write, rotary_kv_write, step_index
from tiercel.kernels.fused import act_mul, latent_rope, mhc_mix, rms_norm
from tiercel.kernels.moe import moe_route
from tiercel.kernels.runtime import rtc

HALF, FLOAT, INT, LONG = torch.float16, torch.float32, torch.int32, torch.int64
BFLOAT, BYTE = torch.bfloat16, torch.uint8


class HopperDriver:
    """The part of a driver that compiling needs."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def cases():
    """Name, launch, types of the tensors, which tensors are aligned, numbers."""
    yield "rms_norm", rms_norm._launch(4096, 4096), [FLOAT, HALF, None, FLOAT, HALF], None, [1e-6]
    yield "sandwich", rms_norm._launch(640, 640), [FLOAT, HALF, FLOAT, FLOAT, HALF], None, [1e-6]
    heads = [HALF, INT, FLOAT, LONG, HALF, HALF, FLOAT, FLOAT]
    launch, _ = rotary_kv_write._launch(48, 8, 128, 64)
    yield "rotary_kv_write", launch, heads, None, [1e-6]
    yield "odd slots", launch, heads, [place != 3 for place in range(8)], [1e-6]
    launch, _ = rotary_kv_write._launch(15, 3, 100, 13)
    yield "partial", launch, [*heads[:6], None, None], None, [0.0]
    launch = act_mul._launch(12288, (24576, 24576), "silu", 10.0)
    yield "act_mul", launch, [HALF, HALF, HALF], None, []
    yield from deepseek_v4_cases()


def deepseek_v4_cases():
    """Kernels of DeepSeek-V4 at the shapes of Flash, likewise."""
    strides, sizes = (4 * 4096, 4096), (4, 4096, 24)
    launch = mhc_mix._product(1, strides, sizes, 32, None)
    yield "mhc_mix product", launch, [BFLOAT, FLOAT, FLOAT], None, [1]
    launch = mhc_mix._finish(strides, sizes, 32, 128, 20, 1)
    finish = [BFLOAT, FLOAT, FLOAT, FLOAT, FLOAT, BFLOAT, FLOAT, FLOAT]
    yield "mhc_mix finish", launch, finish, None, [1, 1e-6, 1e-6, 1e-6]
    launch = mhc_mix._step((*strides, 4096), sizes, 32, 32)
    step = [BFLOAT, BFLOAT, FLOAT, FLOAT, FLOAT, BFLOAT, FLOAT]
    yield "mhc_mix step", launch, step, None, []
    launch = mhc_mix._many_step((*strides, 4096), (4096, 24), 32, mhc_mix.tl.bfloat16)
    yield "mhc_mix step of many tokens", launch, step, None, [64]
    launch = mhc_mix._post(4, 4096, (*strides, 4096))
    yield "mhc_mix post", launch, [BFLOAT, BFLOAT, FLOAT, FLOAT, BFLOAT], None, []
    launch, _ = latent_rope._rope((64 * 512, 512), 64, 512, 32, True, False, False)
    yield "latent_rope", launch, [BFLOAT, LONG, FLOAT, None, BFLOAT], None, [1e-6]
    launch = latent_rope._write(512, (128, 1 << 20, 576, 1 << 20, 8), (1, 8), 512, 32, True, False)
    write = [BFLOAT, LONG, FLOAT, FLOAT, LONG, BYTE, BYTE]
    yield "latent_write", launch, write, None, [1e-6]
    launch = moe_route._launch((256, 1), 256, 6, range(0), False)
    yield "moe_route", launch, [FLOAT, FLOAT, LONG, FLOAT], None, [1.5]
    launch = moe_route._launch((256, 1), 256, 6, range(128, 256), True)
    yield "moe_route hash", launch, [FLOAT, LONG, INT, LONG, FLOAT], None, [1.5]
    stored = (32, 1 << 20, 1024)
    launch = kv_compress._compress((2560, 2560), (stored, stored), 8, (4, 8, 512, 32))
    compress = [*[FLOAT] * 5, *[LONG] * 3, *[FLOAT] * 3]
    yield "kv_compress", launch, compress, None, [1e-6]
    launch = kv_compress._write((2560, 2560), (stored, stored), 4, 1024)
    yield "kv_compress inputs", launch, [*[FLOAT] * 3, LONG, LONG, FLOAT, FLOAT], None, []
    launch = step_index._launch(128, ((4, 8, 32, 0, 3), (128, 128, 128, 1, 4)))
    yield "step_index", launch, [INT, INT, INT, LONG, INT, LONG, INT], None, [1] * 6
    yield "latent_step_write", *step_write_case()


def step_write_case():
    """A CSA layer of Flash: entries and index keys, encoded."""
    stored, fresh = (32, 1 << 20, 1024), (2688, 2688)
    cache = (1 << 20, 576, 1 << 20, 8)
    entries = (
        *((512, 512, 32, 32, 1, 8, 0.0, 9), fresh, stored, stored),
        *((1024, 1024), cache),
    )
    keys = (
        *((128, 128, 32, 32, 2, 4, 128**-0.5, 7), fresh, stored, stored),
        *((256, 256), (1 << 20, 64, 1 << 20, 4)),
    )
    window = (512, (512, 512, 32, 128, 1, 8), cache)
    queries = ((64, 8, 512, 512, 32, True, 0.0, 9), (64 * 512, 512))
    index_queries = ((64, 32, 128, 128, 32, False, 128**-0.5, 7), (64 * 128, 128))
    launch = latent_step_write._launch(window, (4, 8), (entries, keys), (queries, index_queries))
    compressor = [*[FLOAT] * 7, BYTE, BYTE]
    vectors = [BFLOAT, LONG, FLOAT, FLOAT, LONG, BYTE, BYTE]
    turned = [BFLOAT, FLOAT, BFLOAT, BFLOAT, FLOAT, FLOAT]
    tensors = [*vectors, *[LONG] * 6, *compressor * 2, *turned]
    return launch, tensors, None, [1e-6] * 4 + [1] * 4


def read_parameters(ptx):
    """The parameters that lead to the addresses that some PTX loads from; a store is "written"."""
    origins, found = {}, set()
    for line in ptx.splitlines():
        registers = re.findall(r"%\w+", line)
        if re.search(r"\b(?:st|atom|red)\.global", line):
            found.add("written")
        elif "ld.global" in line or "shared.global" in line:  # of a copy the source comes last
            found |= origins.get(re.findall(r"\[\s*(%\w+)", line)[-1], set())
        elif registers:
            place = re.search(r"ld\.param.*_param_(\d+)", line)
            of_sources = [origins.get(register, set()) for register in registers[1:]]
            origins[registers[0]] = {int(place[1])} if place else set().union(*of_sources)
    return sorted(found, key=str)


def facts(launch, dtypes, are_aligned, numbers):
    """Where the PTX waits and lets the next kernel start, its early reads and wide loads."""
    aligned = are_aligned or [True] * len(dtypes)
    kernel, is_dependent = launch._compile(dtypes, aligned, numbers, torch.device("cuda", 0))
    ptx = kernel.asm["ptx"]
    return {
        "is_dependent": is_dependent and kernel.metadata.launch_pdl,
        "starts": ptx.index("griddepcontrol.launch_dependents"),
        "waits": ptx.index("griddepcontrol.wait"),
        "reads_ahead": read_parameters(ptx[: ptx.index("griddepcontrol.wait")]),
        "reads": read_parameters(ptx),
        "wide_loads": len(re.findall(r"ld\.global\.v[24]\.b(?:32|64)", ptx)),
    }


def main():
    driver.set_active(HopperDriver())
    torch.cuda.device = lambda device: contextlib.nullcontext()
    rtc.is_dependent = lambda device: True
    sys.stdout.write(json.dumps({name: facts(*case) for name, *case in cases()}))


if __name__ == "__main__":
    main()
