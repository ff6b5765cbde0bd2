"""K-quants from the layout of the file to planes, against a copy of the same bytes.

    python -m benchmarks.packed_repack --out benchmarks/results/q4k_repack_h200.json

Floor: each byte read once and written once. It runs once per matrix, at load.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.op_timing import Case, main
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant import QuantTensor
from tiercel.quant_types import PLANES, Layout, QuantType
from tiercel.reference import packed_repack as oracle

SHAPES = {"cuda": ((24576, 4096), (4096, 12288)), "cpu": ((1024, 4096),)}
CHECKED_ROWS = 16


def make(qtype: QuantType, shape: tuple[int, int], device: torch.device, seed: int) -> QuantTensor:
    """Random bytes."""
    torch.manual_seed(seed)
    size = (shape[0], qtype.row_bytes(shape[1]))
    data = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    return QuantTensor(qtype, Layout.FILE, shape, {"data": data})


def check(weight: QuantTensor) -> float:
    """0 where a tile's planes are those of the oracle, else 1."""
    qtype = weight.qtype
    data = weight.rows(0, CHECKED_ROWS).planes["data"].cpu().numpy()
    expected = oracle.packed_repack(data.reshape(CHECKED_ROWS, -1, qtype.block_bytes), qtype)
    planes = packed_repack(weight, Layout.SOA).planes
    same = (np.array_equal(planes[name][:1].cpu().numpy(), expected[name]) for name in expected)
    return 0.0 if all(same) else 1.0


def run(weight: QuantTensor) -> QuantTensor:
    """The op."""
    return packed_repack(weight, Layout.SOA)


def copy(weight: QuantTensor) -> torch.Tensor:
    """The peer."""
    return weight.planes["data"].clone()


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per type and shape."""
    for qtype in PLANES:
        for shape in SHAPES[device.type]:
            yield Case(
                name=f"{qtype.name} {shape[0]}x{shape[1]}",
                make=partial(make, qtype, shape, device),
                run=run,
                check=check,
                tolerance=0.0,
                num_bytes=2 * shape[0] * qtype.row_bytes(shape[1]),
                peer=copy,
                peer_name="a copy",
            )


if __name__ == "__main__":
    main(__doc__, cases)
