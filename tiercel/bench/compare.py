"""Comparison of two results with the same workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tiercel.bench.report import Level, Report, rows
from tiercel.bench.workload import Lengths
from tiercel.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure in two results.

    Attributes:
        load: level of the figure.
        title: title of the figure.
        first, second: values; None where a result has none.
        digits: digits after the point.
    """

    load: str
    title: str
    first: float | None
    second: float | None
    digits: int

    @property
    def ratio(self) -> float | None:
        """Second / first; None where one is missing or the first is 0."""
        if self.first is None or self.second is None or self.first == 0:
            return None
        return self.second / self.first


def compare(first: Report, second: Report) -> list[Comparison]:
    """Every figure that one of two results has.

    A result of a server and one without a server can be compared: they have the same requests.

    Raises:
        ArgumentError: workload, bounds or loads differ; the message names each difference.
    """
    found = differences(first, second)
    if found:
        raise ArgumentError(
            f"the results are of different shapes: {'; '.join(found)}.",
            hint="Measure both with the same options.",
        )
    return [
        Comparison(a.load.name, row.title, row.get(a.summary), row.get(b.summary), row.digits)
        for a, b in zip(first.levels, second.levels, strict=True)
        for row in rows()
        if row.get(a.summary) is not None or row.get(b.summary) is not None
    ]


def differences(first: Report, second: Report) -> list[str]:
    """The reasons why two results cannot be compared, one phrase for each."""
    found = []
    for name, a, b in (
        *_fields(first.workload, second.workload),
        *_fields(first.bounds, second.bounds),
        ("loads", _loads(first.levels), _loads(second.levels)),
        ("is_partial", first.is_partial, second.is_partial),
    ):
        if a != b:
            found.append(f"{name} is {_shown(a)} and {_shown(b)}")
    return found


def _fields(a: msgspec.Struct, b: msgspec.Struct) -> list[tuple[str, object, object]]:
    return [(name, getattr(a, name), getattr(b, name)) for name in a.__struct_fields__]


def _loads(levels: Sequence[Level]) -> list[str]:
    return [f"{level.load.requests} requests, {level.load.name}" for level in levels]


def _shown(value: object) -> str:
    if isinstance(value, Lengths):
        return f"{value.low}:{value.high}"
    return f"{value!s:.120}"
