"""Block formats of DeepSeek-V4 against their floor in bytes.

    python -m benchmarks.block_quantize --device cuda --out FILE.json

Floor: each input is read once, each result is written once. Shapes are an expert's matrix, wq_b,
and the cache entries and index keys of a step, of Flash and Pro.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops import block_quantize as op
from tiercel.ops.dequantize import dequantize
from tiercel.quant import QuantTensor
from tiercel.quant_types import QuantType
from tiercel.reference import block_quantize as oracle

# Format, rows, columns: w1 of an expert (Flash, Pro) and wq_b.
WEIGHTS = {
    "cuda": [
        (QuantType.MXFP4, 2048, 4096),
        (QuantType.MXFP4, 3072, 7168),
        (QuantType.NVFP4, 2048, 4096),
        (QuantType.NVFP4, 3072, 7168),
        (QuantType.FP8_BLOCK, 32768, 1024),
        (QuantType.FP8_BLOCK, 65536, 1536),
    ],
    "cpu": [
        (QuantType.MXFP4, 256, 4096),
        (QuantType.NVFP4, 256, 4096),
        (QuantType.FP8_BLOCK, 512, 1024),
    ],
}
ROWS = {"cuda": (1, 64, 4096), "cpu": (1, 64)}


def decoded(blocks: QuantTensor) -> Tensor:
    """The oracle's weights."""
    q, scale = blocks.planes["q"].cpu(), blocks.planes["scale"].cpu()
    if blocks.qtype is QuantType.FP8_BLOCK:
        scales = torch.exp2(scale.double() - 127)
        return oracle.dequantize_fp8(q.view(torch.uint8), scales, blocks.block)
    if blocks.qtype is QuantType.MXFP4:
        return oracle.dequantize_fp4(q, torch.exp2(scale.double() - 127))
    return oracle.dequantize_fp4(q, scale.float(), blocks.planes["global_scale"].item())


def label(qtype: QuantType) -> str:
    """The name of a format in results."""
    return qtype.name.lower().removesuffix("_block")


def weight_case(qtype: QuantType, rows: int, cols: int, device: torch.device) -> Case:
    def make(seed: int) -> QuantTensor:
        generator = torch.Generator(device).manual_seed(seed)
        weight = torch.randn(rows, cols, generator=generator, device=device)
        return op.block_quantize(weight, qtype)

    def run(blocks: QuantTensor) -> Tensor:
        return dequantize(blocks, torch.bfloat16)

    return Case(
        name=f"decode {label(qtype)} {rows} x {cols} to bf16",
        make=make,
        run=run,
        check=lambda blocks: relative_error(run(blocks).cpu(), decoded(blocks)),
        tolerance=5e-3,
        num_bytes=make(0).nbytes + 2 * rows * cols,
    )


def row_case(
    name: str,
    run: Callable[[Tensor], Tensor],
    expected: Callable[[Tensor], Tensor],
    shape: tuple[int, int],
    device: torch.device,
) -> Case:
    def make(seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    def check(x: Tensor) -> float:  # the oracle loops over groups: two rows of it
        return relative_error(decode(run(x[:2])).cpu(), expected(x[:2].cpu().float()))

    def decode(result: Tensor) -> Tensor:
        if result.dtype != torch.uint8:
            return result
        if result.shape[-1] == 68:
            return op.decode_index_keys(result)
        return op.decode_kv_entries(result, 64)

    result = run(make(0))
    return Case(
        name=f"{name} {shape[0]} x {shape[1]}",
        make=make,
        run=run,
        check=check,
        tolerance=5e-3,
        num_bytes=2 * shape[0] * shape[1] + result.numel() * result.element_size(),
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes moved define the floor."""
    for shape in WEIGHTS[device.type]:
        yield weight_case(*shape, device)
    for rows in ROWS[device.type]:
        yield row_case(
            "encode KV entries",
            lambda x: op.encode_kv_entries(x, 64),
            lambda x: oracle.kv_entries(x, 64),
            (rows, 512),
            device,
        )
        yield row_case(
            "rotate and encode index keys",
            lambda x: op.encode_index_keys(op.hadamard(x)),
            lambda x: oracle.round_groups(oracle.hadamard(x).float(), 32, "fp4")[0],
            (rows, 128),
            device,
        )
        for hidden in (4096, 7168):
            yield row_case(
                "round activations fp8_g128",
                op.round_fp8_g128,
                lambda x: oracle.round_groups(x, 128, "fp8")[0],
                (rows, hidden),
                device,
            )


if __name__ == "__main__":
    main(__doc__, cases)
