"""Every way to multiply many tokens with a K-quantised matrix: for the table in `ops/linear.py`.

    python -m benchmarks.prefill_paths --out benchmarks/results/prefill_paths_h200.json

Matrices of Qwen3-8B in Q4_K_M. Ways, microseconds of a graph node each, weights cold:
reader (16 tokens at a time), fused (decoded on their way to the tensor cores), mmq (x of 8 bits),
copy (cuBLAS on a resident float16 copy), decoded (into memory for the call, then cuBLAS), sliced
(the same by slices of rows that stay in the cache).
Floor: the larger of bytes (W as it rests, x, result, once) and products at the measured rate of
bfloat16; the copy's own floor has W in float16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment
from benchmarks.figures import save
from benchmarks.op_timing import measure_ceilings, time_inputs
from benchmarks.packed_matvec import MATRICES, random_part
from tiercel.ops.dequantize import dequantize
from tiercel.ops.linear_torch import dense_matmul
from tiercel.ops.packed_gemm import load_packed_gemm, packed_gemm
from tiercel.ops.packed_matvec import MAX_TOKENS, PackedWeight, packed_matvec, prepare_packed
from tiercel.ops.packed_mmq import load_packed_mmq, packed_mmq
from tiercel.quant import QuantTensor
from tiercel.quant_types import TILE_ROWS, Layout, QuantType

TOKENS = (16, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)
MOST_HEAD_TOKENS = 256  # of an output matrix: the last of each prompt
COLD_BYTES = 150e6
SECONDS, LEAST_CALLS = 0.01, 4
MOST_READER_TOKENS = 128
SLICE_BYTES = 24 << 20  # of decoded weights


@dataclass(frozen=True)
class Inputs:
    """A weight at rest, its dense copy, tokens and a result."""

    weight: PackedWeight
    dense: Tensor
    x: Tensor
    out: Tensor


def reader(inputs: Inputs) -> None:
    for first in range(0, len(inputs.x), MAX_TOKENS):
        rows = slice(first, first + MAX_TOKENS)
        packed_matvec(inputs.x[rows], inputs.weight, out=inputs.out[rows])


def decoded(inputs: Inputs) -> None:
    dense_matmul(inputs.x, dequantize(inputs.weight.tensor, torch.float16), inputs.out)


def sliced(inputs: Inputs) -> None:
    """As many rows at a time as stay in the cache."""
    tensor = inputs.weight.tensor
    step = SLICE_BYTES // (2 * tensor.shape[1]) // 128 * 128
    for first in range(0, tensor.shape[0], step):
        last = min(first + step, tensor.shape[0])
        tiles = slice(first // TILE_ROWS, -(-last // TILE_ROWS))
        planes = {name: plane[tiles] for name, plane in tensor.planes.items()}
        shape = (last - first, tensor.shape[1])
        piece = QuantTensor(tensor.qtype, tensor.layout, shape, planes)
        dense_matmul(inputs.x, dequantize(piece, torch.float16), inputs.out[:, first:last])


WAYS: dict[str, Callable[[Inputs], object]] = {
    "reader": reader,
    "fused": lambda inputs: packed_gemm(inputs.x, inputs.weight, out=inputs.out),
    "mmq": lambda inputs: packed_mmq(inputs.x, inputs.weight, out=inputs.out),
    "copy": lambda inputs: dense_matmul(inputs.x, inputs.dense, inputs.out),
    "decoded": decoded,
    "sliced": sliced,
}


def make_weights(qtype: QuantType, shape: tuple[int, int]) -> list[tuple[PackedWeight, Tensor]]:
    """As many as pass the cache, with dense copies."""
    count = max(2, min(16, int(COLD_BYTES / (shape[0] * qtype.row_bytes(shape[1])))))
    made = []
    for seed in range(count):
        weight = prepare_packed(random_part(qtype, shape, seed), Layout.SOA, is_dependent=True)
        made.append((weight, dequantize(weight.tensor, torch.float16)))
    load_packed_gemm(made[0][0], torch.float16)
    load_packed_mmq(made[0][0], torch.float16)
    return made


def measure_matrix(
    qtype: QuantType, shape: tuple[int, int], read_gbps: float, tflops: float
) -> list[dict[str, Any]]:
    """All numbers of tokens of one matrix."""
    device = torch.device("cuda")
    weights = make_weights(qtype, shape)
    rows = []
    for tokens in TOKENS:
        if shape[0] > 100_000 and tokens > MOST_HEAD_TOKENS:
            break
        x = torch.randn(tokens, shape[1], device=device).half()
        out = torch.empty(tokens, shape[0], dtype=torch.float16, device=device)
        inputs = [Inputs(weight, dense, x, out) for weight, dense in weights]
        us = {
            name: time_inputs(run, inputs, device, SECONDS, LEAST_CALLS).median_us
            for name, run in WAYS.items()
            if name != "reader" or tokens <= MOST_READER_TOKENS
        }
        moved = 2 * tokens * sum(shape)
        flops_us = 2 * tokens * shape[0] * shape[1] / tflops / 1e6
        packed_us = (shape[0] * qtype.row_bytes(shape[1]) + moved) / read_gbps / 1e3
        copy_us = (2 * shape[0] * shape[1] + moved) / read_gbps / 1e3
        row = {
            "matrix": f"{qtype.name} {shape[0]}x{shape[1]}",
            "tokens": tokens,
            **{f"{name}_us": round(value, 2) for name, value in us.items()},
            "floor_us": round(max(packed_us, flops_us), 2),
            "floor_of_copy_us": round(max(copy_us, flops_us), 2),
        }
        rows.append(row)
        print(row, flush=True)
    del weights
    torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Measure all matrices."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda")
    ceilings = measure_ceilings(device)
    tflops = ceilings.tflops[str(torch.bfloat16)]
    head, rows = environment(device), [ceilings.row()]
    for qtype, *shape in MATRICES:
        size = (shape[0], shape[1])
        rows += measure_matrix(qtype, size, ceilings.read_gbps, tflops)
        save(options.out, head, rows)


if __name__ == "__main__":
    main()
