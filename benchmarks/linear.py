"""x @ W^T in the forms that weights rest in, against the floor, beside dense bfloat16.

    python -m benchmarks.linear --device cpu --out benchmarks/results/linear_cpu.json

Floor: the larger of the resident weight, x and the result moved once, and the products at the
measured matrix rate. On a CPU the peer multiplies the decoded weights in dense bfloat16: what
`select_form` decides between. On a GPU the op is cuBLAS, and its peer too, but for FP8 weights of
DeepSeek-V4: those are read as stored by few rows, and decoded before cuBLAS for many.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tests.gguf_files import quantised
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.decoder_layers import NativeMatrix
from tiercel.ops.dequantize import dequantize
from tiercel.ops.linear import LinearWeight, Segment, linear, prepare_linear
from tiercel.ops.linear_torch import Int4Planes
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import linear as oracle

# Matrices (out, in) of SmolLM2-135M on a CPU, of an 8B model on a GPU.
CPU_MATRICES = {"qkv": (960, 576), "gate_up": (3072, 576), "down": (576, 1536)}
GPU_MATRICES = {"qkv": (6144, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
# Parts of DeepSeek-V4 Flash that share an input, in FP8 blocks: rows of each, columns.
FP8_PARTS = {
    "wq_a, wkv": ((1024, 512), 4096),
    "wq_b": ((32768,), 1024),
    "wo_b": ((4096,), 8192),
    "shared w1, w3": ((2048, 2048), 4096),
    "shared w2": ((4096,), 2048),
}
LM_HEAD = {"cpu": (49152, 576), "cuda": (128256, 4096)}
CHECKED_ROWS = 64  # rows of x, and of W, that the oracle computes


@dataclass(frozen=True)
class Inputs:
    """Activations (rows, in), the weight as it rests, and its decoded form for the peer."""

    x: Tensor
    weight: LinearWeight
    dense: Tensor


def make_part(type_name: str, shape: tuple[int, int]) -> QuantTensor:
    """A normal random matrix in a storage type."""
    rng = np.random.default_rng(0)
    data = bytearray(quantised(rng.normal(size=shape) / np.sqrt(shape[1]), type_name).data)
    plane = torch.frombuffer(data, dtype=torch.uint8).view(shape[0], -1)
    return QuantTensor(QuantType[type_name], Layout.FILE, shape, {"data": plane})


def copy_segment(segment: Segment) -> Segment:
    if isinstance(segment, Tensor):
        return segment.clone()
    if isinstance(segment, QuantTensor):
        planes = {name: plane.clone() for name, plane in segment.planes.items()}
        return replace(segment, planes=planes)
    if isinstance(segment, NativeMatrix):
        return segment.copy()
    assert isinstance(segment, Int4Planes)
    return Int4Planes(
        segment.packed.clone(), segment.scale_zero.clone(), segment.count, segment.shape
    )


def segment_bytes(segment: Segment) -> int:
    if isinstance(segment, Tensor | QuantTensor | NativeMatrix):
        return segment.nbytes
    assert isinstance(segment, Int4Planes)
    return segment.packed.nbytes + segment.scale_zero.nbytes


def make_case(
    name: str, rows: int, weight: LinearWeight, decoded: Tensor, *, wide: bool = False
) -> Case:
    """One weight at one number of rows; `decoded` (out, in) has its decoded values."""
    out_features, in_features = weight.shape
    out_dtype = torch.float32 if wide else torch.bfloat16
    device = decoded.device

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(rows, in_features, generator=generator, device=device).bfloat16()
        copied = replace(weight, segments=tuple(map(copy_segment, weight.segments)))
        return Inputs(x, copied, decoded.to(torch.bfloat16, copy=True))

    def check(inputs: Inputs) -> float:
        out = linear(inputs.x, inputs.weight, out_dtype=out_dtype)[:CHECKED_ROWS, :CHECKED_ROWS]
        return relative_error(out, oracle.linear(inputs.x[:CHECKED_ROWS], decoded[:CHECKED_ROWS]))

    moved = sum(map(segment_bytes, weight.segments)) + 2 * rows * in_features
    return Case(
        name=f"{name} {out_features}x{in_features} rows={rows}",
        make=make,
        run=lambda inputs: linear(inputs.x, inputs.weight, out_dtype=out_dtype),
        check=check,
        tolerance=1e-2,  # x of 8 bits, or bfloat16 scales and zeros of 4-bit planes
        num_bytes=moved + out_dtype.itemsize * rows * out_features,
        flops=2 * rows * in_features * out_features,
        peer=lambda inputs: torch.nn.functional.linear(inputs.x, inputs.dense),
        peer_name="torch.nn.functional.linear, dense bfloat16 weights, bfloat16 result",
    )


def cpu_cases() -> Iterator[Case]:
    device = torch.device("cpu")
    wanted = [("Q4_1", "gate_up", (1, 2, 8, 32, 512))]
    wanted += [(qtype, "gate_up", (1, 8, 32, 512)) for qtype in ("Q8_0", "BF16")]
    wanted += [(qtype, "down", (1, 32)) for qtype in ("Q4_1", "Q4_K", "Q5_1", "Q8_0")]
    wanted += [("Q4_1", "qkv", (1, 32))]
    for qtype, matrix, counts in wanted:
        part = make_part(qtype, CPU_MATRICES[matrix])
        weight = prepare_linear([part], torch.bfloat16, device)
        decoded = dequantize(part, torch.float32)
        for rows in counts:
            yield make_case(f"{qtype} {matrix}", rows, weight, decoded)
    part = make_part("Q8_0", LM_HEAD["cpu"])
    weight = prepare_linear([part], torch.bfloat16, device, wide=True)
    for rows in (1, 3, 4, 16):
        yield make_case("wide lm_head", rows, weight, dequantize(part, torch.float32), wide=True)


def gpu_cases() -> Iterator[Case]:
    device = torch.device("cuda")
    for name, shape in GPU_MATRICES.items():
        matrix = torch.randn(shape, device=device).bfloat16()
        for rows in (1, 16, 256, 4096):
            weight = LinearWeight((matrix,), shape)
            yield make_case(f"dense {name}", rows, weight, matrix)
    for name, (heights, cols) in FP8_PARTS.items():
        parts = [
            block_quantize(torch.randn(rows, cols, device=device), QuantType.FP8_BLOCK)
            for rows in heights
        ]
        weight = prepare_linear(parts, torch.bfloat16, device)
        decoded = torch.cat([dequantize(part, torch.float32) for part in parts])
        for rows in (1, 8, 16, 64, 256, 4096):
            yield make_case(f"fp8 {name}", rows, weight, decoded)
    matrix = torch.randn(LM_HEAD["cuda"], device=device).bfloat16()
    weight = LinearWeight((matrix,), LM_HEAD["cuda"])
    for rows in (1, 64):
        yield make_case("wide lm_head", rows, weight, matrix, wide=True)


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per weight and number of rows."""
    yield from cpu_cases() if device.type == "cpu" else gpu_cases()


if __name__ == "__main__":
    main(__doc__, cases)
