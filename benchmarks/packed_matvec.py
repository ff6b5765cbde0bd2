"""Up to 16 tokens times K-quantised matrices of an 8B model, in graphs, from cold memory.

    python -m benchmarks.packed_matvec --out benchmarks/results/q4k_matvec_h200.json

Floor: the matrix's bytes, x and the result moved once. Launches depend on the one before (PDL), as
between neighbours of a chain, unless the name says "plain"; "file" reads the layout of the file.
The peer is cuBLAS on dense float16 weights: what `linear` did with such a matrix before.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.loader.verify import SCALE_FIELDS
from tiercel.ops.dequantize import dequantize
from tiercel.ops.linear_torch import dense_matmul
from tiercel.ops.packed_matvec import PackedWeight, packed_matvec, prepare_packed
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import packed_matvec as oracle

CHECKED_ROWS = 32  # rows of W that the oracle decodes
# (type, rows, columns): qkv, o, gate and up, down, v, down, head.
MATRICES = (
    (QuantType.Q4_K, 6144, 4096),
    (QuantType.Q4_K, 4096, 4096),
    (QuantType.Q4_K, 24576, 4096),
    (QuantType.Q4_K, 4096, 12288),
    (QuantType.Q6_K, 1024, 4096),
    (QuantType.Q6_K, 4096, 12288),
    (QuantType.Q6_K, 151936, 4096),
)


@dataclass(frozen=True)
class Inputs:
    """Activations (tokens, in), the packed weight, its decoded form for the peer, and a result."""

    x: Tensor
    part: QuantTensor
    weight: PackedWeight
    dense: Tensor
    out: Tensor


def random_part(qtype: QuantType, shape: tuple[int, int], seed: int) -> QuantTensor:
    """Random codes and scales; d of about 1e-4, as in files."""
    generator = torch.Generator("cuda").manual_seed(seed)
    blocks = shape[1] // qtype.block_weights
    size = (shape[0], blocks, qtype.block_bytes)
    data = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda", generator=generator)
    for _, at in SCALE_FIELDS[qtype]:
        d = 1e-4 * (0.5 + torch.rand(*size[:2], 1, device="cuda", generator=generator))
        data[:, :, at : at + 2] = d.half().view(torch.uint8)
    return QuantTensor(qtype, Layout.FILE, shape, {"data": data.flatten(1)})


def make_case(
    qtype: QuantType, shape: tuple[int, int], tokens: int, layout: Layout, *, is_dependent: bool
) -> Case:
    """One matrix at one number of tokens."""
    out_dtype = torch.float32 if shape[0] > 100_000 else torch.float16
    has_peer = layout is Layout.SOA and is_dependent

    def make(seed: int) -> Inputs:
        part = random_part(qtype, shape, seed)
        weight = prepare_packed(part, layout, is_dependent=is_dependent)
        x = torch.randn(tokens, shape[1], device="cuda").half()
        dense = dequantize(part, torch.float16) if has_peer else x
        out = torch.empty(tokens, shape[0], dtype=out_dtype, device="cuda")
        return Inputs(x, part.rows(0, CHECKED_ROWS).to(torch.device("cpu")), weight, dense, out)

    def check(inputs: Inputs) -> float:
        out = packed_matvec(inputs.x, inputs.weight, out_dtype)[:, :CHECKED_ROWS]
        data = inputs.part.planes["data"]
        return relative_error(out.cpu(), oracle.packed_matvec(inputs.x, data, qtype.name))

    label = "" if layout is Layout.SOA else " file"
    weight_bytes = shape[0] * qtype.row_bytes(shape[1])
    return Case(
        name=f"{qtype.name} {shape[0]}x{shape[1]} tokens={tokens}{label}"
        + ("" if is_dependent else " plain"),
        make=make,
        run=lambda inputs: packed_matvec(inputs.x, inputs.weight, out=inputs.out),
        check=check,
        tolerance=5e-4,
        num_bytes=weight_bytes + tokens * (2 * shape[1] + out_dtype.itemsize * shape[0]),
        flops=2 * tokens * shape[0] * shape[1],
        peer=(lambda inputs: dense_matmul(inputs.x, inputs.dense, inputs.out))
        if has_peer
        else None,
        peer_name="cuBLAS, dense float16 weights" if has_peer else "",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per matrix, tokens and way to launch; a GPU's kernels alone."""
    if device.type == "cpu":
        raise SystemExit(
            "packed_matvec: these kernels run on a GPU; a CPU has benchmarks/linear.py."
        )
    for qtype, *shape in MATRICES:
        rows, columns = shape
        for tokens in (1, 2, 4, 8, 16):
            yield make_case(qtype, (rows, columns), tokens, Layout.SOA, is_dependent=True)
        yield make_case(qtype, (rows, columns), 1, Layout.SOA, is_dependent=False)
        yield make_case(qtype, (rows, columns), 1, Layout.FILE, is_dependent=True)


if __name__ == "__main__":
    main(__doc__, cases)
