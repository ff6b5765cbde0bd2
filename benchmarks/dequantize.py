"""Decoding whole matrices with PyTorch operators, in GB/s against the measured copy bandwidth.

    python -m benchmarks.dequantize --device cuda --out benchmarks/results/dequantize.json

Floor: the file's bytes are read once and the result is written once. The decoder is a chain of
about 20 operators that each read and write temporaries, so it stays far above the floor; it serves
loading and checking, and this benchmark says what a fused reader gains. Correctness is checked
before timing.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import copy_gbps, environment, time_us
from benchmarks.figures import save
from tiercel.ops.dequantize import dequantize
from tiercel.ops.dequantize_torch import DECODERS
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import dequantize as oracle

SHAPES = {"cpu": (1024, 4096), "cuda": (12288, 4096)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_weight(type_name: str, shape: tuple[int, int], device: torch.device) -> QuantTensor:
    """Random bytes with small finite scales in every byte that may hold an exponent."""
    rows, cols = shape
    qtype = QuantType[type_name]
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 128, (rows, qtype.row_bytes(cols)), generator=generator)
    data = (data & 0x3B).to(torch.uint8).to(device)  # the exponent of no fp16 is all ones
    return QuantTensor(qtype, Layout.FILE, shape, {"data": data})


def check(weight: QuantTensor) -> None:
    """Compare the first rows with the oracle, bit by bit."""
    part = weight.rows(0, 2)
    result = dequantize(part, torch.float32).cpu().numpy()
    expected = oracle.dequantize(part.planes["data"].cpu().numpy(), weight.qtype.name)
    if not np.array_equal(result.view(np.uint32), expected.view(np.uint32)):
        raise SystemExit(f"{weight.qtype.name}: wrong result; not timed")


def measure(
    type_name: str, dtype_name: str, device: torch.device, samples: int, peak: float
) -> dict[str, Any]:
    shape = SHAPES[device.type]
    weight = make_weight(type_name, shape, device)
    check(weight)
    dtype = DTYPES[dtype_name]
    timing = time_us(lambda: dequantize(weight, dtype), device, samples)
    moved = weight.nbytes + shape[0] * shape[1] * dtype.itemsize
    return {
        "type": type_name,
        "dtype": dtype_name,
        "shape": f"{shape[0]}x{shape[1]}",
        "file_bytes": weight.nbytes,
        "bytes_moved": moved,
        "file_gbps": weight.nbytes / timing.median_us / 1e3,
        "moved_gbps": moved / timing.median_us / 1e3,
        "fraction_of_copy": moved / timing.median_us / 1e3 / peak,
        **asdict(timing),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int, default=10)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    peak = copy_gbps(device)
    print(f"copy bandwidth {peak:.1f} GB/s")
    rows: list[dict[str, object]] = [{"name": "copy of the device", "copy_gbps": peak}]
    for type_name in DECODERS:
        for dtype_name in DTYPES:
            row = measure(type_name, dtype_name, device, arguments.samples, peak)
            rows.append(row)
            print(
                f"{type_name:<8}{dtype_name:<10}{row['median_us']:>10.0f} us"
                f"{row['file_gbps']:>8.2f} GB/s of file{row['fraction_of_copy']:>8.1%} of copy"
            )
    save(arguments.out, environment(device), rows)


if __name__ == "__main__":
    main()
