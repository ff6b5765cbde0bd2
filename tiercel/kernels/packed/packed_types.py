"""Sizes and headers of each type of quantised weights, for the kernels of cuda/packed/."""

from __future__ import annotations

from msgspec import Struct

UNIT_COLUMNS = 256  # of a row, in a unit of 16 rows
GROUP_COLUMNS = 32  # rows are multiples of this


class UnitType(Struct, frozen=True):
    """The units of a type: 16 rows x 256 columns each.

    Attributes:
        code: QTYPE of the sources.
        slot_bytes: bytes of the planes of a unit.
        means_bytes: bytes of a unit and token, where weights have minima.
        like: the type whose measured launches are used.
        in_step: whether they are in layout STEP.
    """

    code: int
    slot_bytes: int
    means_bytes: int
    like: str
    in_step: bool = False


UNIT_TYPES = {
    "Q4_K": UnitType(4, 2304, 32, "Q4_K"),
    "Q6_K": UnitType(6, 3360, 0, "Q6_K"),
    "Q4_0": UnitType(40, 2304, 0, "Q4_K"),
    "Q4_1": UnitType(41, 2560, 32, "Q4_K"),
    "Q5_0": UnitType(50, 2816, 0, "Q4_K"),
    "Q5_1": UnitType(51, 3072, 32, "Q6_K"),
    "Q8_0": UnitType(80, 4352, 0, "Q6_K"),
    "IQ4_NL": UnitType(44, 2304, 0, "Q4_K"),
    "IQ4_XS": UnitType(45, 2176, 0, "Q4_K"),
    "Q5_K": UnitType(5, 2816, 32, "Q4_K"),
    "Q3_K": UnitType(3, 1760, 0, "Q4_K"),
    "Q2_K": UnitType(2, 1344, 64, "Q4_K"),
    "Q4_K_STEP": UnitType(4, 2304, 32, "Q4_K", in_step=True),
    "Q6_K_STEP": UnitType(6, 3408, 0, "Q6_K", in_step=True),
}


def num_units(in_features: int) -> int:
    """Units of a row; the last may be cut short."""
    return -(-in_features // UNIT_COLUMNS)


def tail_groups(in_features: int) -> int:
    """Groups of 32 columns in a row's last unit, 0 for all eight."""
    return in_features % UNIT_COLUMNS // GROUP_COLUMNS
