"""Report of a model's kernels and the device's ceilings, measured by profiling/kernel_times.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tiercel.bench.files import ModelReport

FORMAT: Final = 1


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of call at one size.

    Attributes:
        name: kind of the call, with the shape.
        size: number of tokens, or requests and context.
        num_bytes: least number of bytes that must move.
        flops: number of operations.
        us: median microseconds of a call.
        of_ceiling: share of the ceiling: the least time that the ceilings allow, divided by `us`.
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
    """The table with its head, one row for each measurement; cached rows are marked."""
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
