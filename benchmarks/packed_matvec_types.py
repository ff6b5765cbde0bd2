"""benchmarks/packed_matvec.py for the other types: 8B's widest matrix, matrices of small models.

    python -m benchmarks.packed_matvec_types --seconds 0.1 --out FILE.json

Small models mix types in rows that are no multiple of 256: SmolLM2-135M has 576 columns (gate and
up in Q4_1, the head in Q8_0), Gemma 3 270M has 640 (Q5_0).
"""

from collections.abc import Iterator

import torch

from benchmarks.op_timing import Case, main
from benchmarks.packed_matvec import make_case
from tiercel.quant_types import PLANES, Layout, QuantType

SHAPE = (24576, 4096)
SMALL = (
    (QuantType.Q4_1, 3072, 576),
    (QuantType.Q4_1, 576, 1536),
    (QuantType.Q8_0, 49152, 576),
    (QuantType.Q5_0, 4096, 640),
)


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per matrix, tokens and layout; a GPU's kernels alone."""
    if device.type == "cpu":
        raise SystemExit(
            "packed_matvec: these kernels run on a GPU; a CPU has benchmarks/linear.py."
        )
    for qtype in PLANES:
        if qtype not in (QuantType.Q4_K, QuantType.Q6_K):
            for tokens in (1, 8, 16):
                yield make_case(qtype, SHAPE, tokens, Layout.SOA, is_dependent=True)
            yield make_case(qtype, SHAPE, 1, Layout.FILE, is_dependent=True)
    for qtype, rows, columns in SMALL:
        for tokens in (1, 16):
            yield make_case(qtype, (rows, columns), tokens, Layout.SOA, is_dependent=True)


if __name__ == "__main__":
    main(__doc__, cases)
