"""Dozens of tokens times K-quantised matrices of an 8B model, in graphs, from cold memory.

    python -m benchmarks.packed_gemm --out benchmarks/results/q4k_gemm_h200.json

Floor: the larger of the matrix's bytes, x and the result moved once, and the products at the
measured matrix rate. Launches depend on the one before (PDL). The peer is cuBLAS on dense float16
weights. Beside them, under "ways", what `linear` could do instead: the reader 16 tokens at a time,
and weights decoded for the call. The tables of `ops/linear.py` are judged here.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment
from benchmarks.figures import save
from benchmarks.op_timing import Case, bench, measure_ceilings, parse, relative_error, time_inputs
from benchmarks.packed_matvec import CHECKED_ROWS, MATRICES, Inputs, random_part
from tiercel.ops.dequantize import dequantize
from tiercel.ops.packed_gemm import packed_gemm
from tiercel.ops.packed_matvec import MAX_TOKENS, packed_matvec, prepare_packed
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import packed_gemm as oracle

TOKENS = (17, 32, 64, 96, 128, 192, 256, 512, 1024, 4096)
MOST_READER_TOKENS = 128
SECONDS = 0.05


def make_case(
    op: Callable[..., Tensor],
    error: Callable[[Inputs], float],
    tolerance: float,
    qtype: QuantType,
    shape: tuple[int, int],
    tokens: int,
) -> Case:
    """One matrix at one number of tokens.

    Args:
        op: of (x, weight, out=...).
        error: of its result.
        tolerance: of that.
        qtype: of the matrix.
        shape: (rows, columns) of it.
        tokens: rows of x.
    """

    def make(seed: int) -> Inputs:
        part = random_part(qtype, shape, seed)
        weight = prepare_packed(part, Layout.SOA, is_dependent=True)
        x = torch.randn(tokens, shape[1], device="cuda").half()
        dense = dequantize(part, torch.float16)
        out = torch.empty(tokens, shape[0], dtype=torch.float16, device="cuda")
        return Inputs(x, part.rows(0, CHECKED_ROWS).to(torch.device("cpu")), weight, dense, out)

    return Case(
        name=f"{qtype.name} {shape[0]}x{shape[1]} tokens={tokens}",
        make=make,
        run=lambda inputs: op(inputs.x, inputs.weight, out=inputs.out),
        check=error,
        tolerance=tolerance,
        num_bytes=shape[0] * qtype.row_bytes(shape[1]) + 2 * tokens * sum(shape),
        flops=2 * tokens * shape[0] * shape[1],
        peer=lambda inputs: torch.nn.functional.linear(inputs.x, inputs.dense),
        peer_name="cuBLAS, dense float16 weights",
        max_sets=8,
    )


def error_of(inputs: Inputs) -> float:
    """Of some rows, against the oracle."""
    out = packed_gemm(inputs.x, inputs.weight)[:, :CHECKED_ROWS]
    data, name = inputs.part.planes["data"], inputs.part.qtype.name
    return relative_error(out.cpu(), oracle.packed_gemm(inputs.x, data, name))


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per matrix and number of tokens; a GPU's kernels alone."""
    if device.type == "cpu":
        raise SystemExit("packed_gemm: these kernels run on a GPU; a CPU has benchmarks/linear.py.")
    for qtype, *shape in MATRICES:
        rows, columns = shape
        for tokens in TOKENS:
            yield make_case(packed_gemm, error_of, 6e-4, qtype, (rows, columns), tokens)


def reader(inputs: Inputs) -> None:
    """16 tokens at a time."""
    for first in range(0, len(inputs.x), MAX_TOKENS):
        rows = slice(first, first + MAX_TOKENS)
        packed_matvec(inputs.x[rows], inputs.weight, out=inputs.out[rows])


def decoded(inputs: Inputs) -> None:
    """Weights decoded for the call."""
    dense = dequantize(inputs.weight.tensor, torch.float16)
    torch.nn.functional.linear(inputs.x, dense)


def time_ways(device: torch.device) -> list[dict[str, Any]]:
    """Microseconds of the other ways for each case."""
    rows = []
    for case in cases(device):
        inputs = [case.make(seed) for seed in range(3)]
        tokens = len(inputs[0].x)
        row: dict[str, Any] = {"name": case.name}
        if tokens <= MOST_READER_TOKENS:
            row["reader_us"] = time_inputs(reader, inputs, device, SECONDS).median_us
        row["decoded_us"] = time_inputs(decoded, inputs, device, SECONDS).median_us
        rows.append(row)
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    parser = parse(__doc__)
    parser.add_argument("--out")
    options = parser.parse_args()
    on = torch.device("cuda")
    rows = bench(cases(on), on, measure_ceilings(on), SECONDS)
    save(options.out, environment(on), rows + time_ways(on))
