"""Many tokens of 8 bits times K-quantised matrices of an 8B model, in graphs, from cold memory.

    python -m benchmarks.q4k_mmq --out benchmarks/results/q4k_mmq_h200.json

Floor: the larger of the matrix's bytes, x and the result moved once, and the products at the
measured rate of bfloat16 (that of 8 bits would be twice as high). Launches depend on the one
before (PDL), rounding x is included. The peer is cuBLAS on dense float16 weights. Against the other
paths of `linear`: benchmarks/prefill_paths.py.
"""

from collections.abc import Iterator

import torch

from benchmarks.op_timing import Case, main, relative_error
from benchmarks.q4k_matvec import CHECKED_ROWS, MATRICES, Inputs, random_part
from tiercel.ops.dequantize import dequantize
from tiercel.ops.q4k_matvec import prepare_q4k
from tiercel.ops.q4k_mmq import q4k_mmq
from tiercel.quant import Layout, QuantType
from tiercel.reference import q4k_mmq as oracle

TOKENS = (32, 64, 128, 256, 512, 2048)
CHECKED_TOKENS = 8


def make_case(qtype: QuantType, shape: tuple[int, int], tokens: int) -> Case:
    """One matrix at one number of tokens."""

    def make(seed: int) -> Inputs:
        part = random_part(qtype, shape, seed)
        weight = prepare_q4k(part, Layout.SOA, is_dependent=True)
        x = torch.randn(tokens, shape[1], device="cuda").half()
        dense = dequantize(part, torch.float16)
        out = torch.empty(tokens, shape[0], dtype=torch.float16, device="cuda")
        return Inputs(x, part.rows(0, CHECKED_ROWS).to(torch.device("cpu")), weight, dense, out)

    def check(inputs: Inputs) -> float:
        out = q4k_mmq(inputs.x, inputs.weight)[-CHECKED_TOKENS:, :CHECKED_ROWS]
        data = inputs.part.planes["data"]
        expected = oracle.q4k_mmq(inputs.x[-CHECKED_TOKENS:], data, qtype.name)
        return relative_error(out.cpu(), expected)

    return Case(
        name=f"{qtype.name} {shape[0]}x{shape[1]} tokens={tokens}",
        make=make,
        run=lambda inputs: q4k_mmq(inputs.x, inputs.weight, out=inputs.out),
        check=check,
        tolerance=5e-4,
        num_bytes=shape[0] * qtype.row_bytes(shape[1]) + 2 * tokens * sum(shape),
        flops=2 * tokens * shape[0] * shape[1],
        peer=lambda inputs: torch.nn.functional.linear(inputs.x, inputs.dense),
        peer_name="cuBLAS, dense float16 weights",
        max_sets=8,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per matrix and number of tokens; a GPU's kernels alone."""
    if device.type == "cpu":
        raise SystemExit("q4k_mmq: these kernels run on a GPU; a CPU has benchmarks/linear.py.")
    for qtype, *shape in MATRICES:
        rows, columns = shape
        for tokens in TOKENS:
            yield make_case(qtype, (rows, columns), tokens)


if __name__ == "__main__":
    main(__doc__, cases)
