"""Many tokens of 8 bits times K-quantised matrices of an 8B model, in graphs, from cold memory.

    python -m benchmarks.packed_mmq --out benchmarks/results/q4k_mmq_h200.json

Floor: the larger of the matrix's bytes, x and the result moved once, and the products at the
measured rate of bfloat16 (that of 8 bits would be twice as high). Launches depend on the one
before (PDL), rounding x is included. The peer is cuBLAS on dense float16 weights. Against the other
paths of `linear`: benchmarks/prefill_paths.py.
"""

from collections.abc import Iterator

import torch

from benchmarks.op_timing import Case, main, relative_error
from benchmarks.packed_gemm import make_case
from benchmarks.packed_matvec import CHECKED_ROWS, MATRICES, Inputs
from tiercel.ops.packed_mmq import packed_mmq
from tiercel.reference import packed_mmq as oracle

TOKENS = (32, 64, 128, 256, 512, 2048)
CHECKED_TOKENS = 8


def error_of(inputs: Inputs) -> float:
    """Of some tokens and rows, against the oracle."""
    out = packed_mmq(inputs.x, inputs.weight)[-CHECKED_TOKENS:, :CHECKED_ROWS]
    data, name = inputs.part.planes["data"], inputs.part.qtype.name
    return relative_error(out.cpu(), oracle.packed_mmq(inputs.x[-CHECKED_TOKENS:], data, name))


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per matrix and number of tokens; a GPU's kernels alone."""
    if device.type == "cpu":
        raise SystemExit("packed_mmq: these kernels run on a GPU; a CPU has benchmarks/linear.py.")
    for qtype, *shape in MATRICES:
        rows, columns = shape
        for tokens in TOKENS:
            yield make_case(packed_mmq, error_of, 5e-4, qtype, (rows, columns), tokens)


if __name__ == "__main__":
    main(__doc__, cases)
