"""A model's kernels beside what the device allows; measured by profiling/kernel_times.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tiercel.bench.files import ModelReport

FORMAT: Final = 1


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of call at one size.

    Attributes:
        name: of the kind, with the shape.
        size: tokens, or requests and context.
        num_bytes: the fewest that must move.
        flops: operations.
        us: microseconds a call, the median.
        of_ceiling: the least time that the ceilings allow, over `us`.
        is_cold: whether weights or keys came from memory.
    """

    name: str
    size: str
    num_bytes: int
    flops: int
    us: float
    of_ceiling: float
    is_cold: bool


class KernelReport(ModelReport, frozen=True, kw_only=True):
    """A whole measurement, with the ceilings of the same run."""

    format: int = FORMAT
    kind: str = "kernels"
    read_gbps: float
    tflops: float
    results: list[KernelRow]


def kernel_table(rows: Sequence[KernelRow]) -> list[list[str]]:
    """One row for each measurement, with a head; what the cache held is marked."""
    head = ["", "size", "MB", "GFLOP", "us", "GB/s", "TFLOP/s", "of ceiling"]
    lines = [
        [
            row.name,
            row.size,
            f"{row.num_bytes / 1e6:,.2f}",
            f"{row.flops / 1e9:,.2f}",
            f"{row.us:,.1f}",
            f"{row.num_bytes / row.us / 1e3:,.0f}",
            f"{row.flops / row.us / 1e6:,.1f}",
            f"{row.of_ceiling:.0%}" + ("" if row.is_cold else " (cached)"),
        ]
        for row in rows
    ]
    return [head, *lines]
